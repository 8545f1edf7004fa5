"""What JSONL, Parquet, hub and in-memory sources share: columns become rows, and every row is checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError, nearest
from lit_grpo.tasks.base import PromptSource, Row

Record = tuple[Mapping[str, Any], str]
"""Columns of one row, and the file and line (or row) they stand in."""

_ANSWER, _ID = "answer", "id"


class TableSource(PromptSource):
    """A source whose rows have named columns. A subclass gives ``records``.

    Args:
        question_column: must be there, and hold text in every row.
        answer_column: gold answer, text or a number. The default may be missing from data without answers; any other
            name must be there. None: the data has no answers.
        id_column: unique in the source. None: the column ``id`` if it is there, else ``name/number of the row``.
        where: keep the rows whose columns equal these values, for instance ``{lang: en}``.
        limit: keep the first so many rows, counted after ``where``.
        name: of the source.

    Every other column goes into ``Row.extra``.
    """

    def __init__(
        self,
        *,
        question_column: str = "prompt",
        answer_column: str | None = _ANSWER,
        id_column: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        name: str,
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"limit is {limit}", where=f"{type(self).__name__}.limit", remedy="keep at least 1 row")
        self.question_column, self.answer_column, self.id_column = question_column, answer_column, id_column
        self.where, self.limit, self.name = dict(where or {}), limit, name
        self._rows: list[Row] | None = None

    def records(self) -> Iterator[Record]:
        """All rows as they are read, in order."""
        raise NotImplementedError(f"{type(self).__name__} must implement records()")

    def place(self) -> str:
        """The file or data set, for messages about the whole of it."""
        return self.name

    def rows(self) -> Sequence[Row]:
        """All rows that are kept; read and checked at the first call.

        Raises:
            UserError: nothing to read, a missing column, an empty prompt, a value of the wrong type, an id twice, or,
                with ``require_answer``, a row without gold answer.
        """
        if self._rows is None:
            self._rows = self._read()
        if self.require_answer:
            self.check_answers()
        return self._rows

    def check_answers(self) -> None:
        """As in the base class; a column that is missing altogether is named."""
        rows = self._rows if self._rows is not None else self._read()
        self._rows = rows
        for row in rows:
            if row.answer is None or not row.answer.strip():
                column = repr(self.answer_column) if self.answer_column else "answer_column: null"
                columns = f" (other columns: {', '.join(map(str, row.extra))})" if row.extra else ""
                raise UserError(
                    f"row {row.id!r} has no gold answer in column {column}{columns}, and a reward needs one",
                    where=row.where,
                    remedy="name the column with answer_column, add the answer, or remove the row",
                )

    def _read(self) -> list[Row]:
        rows: list[Row] = []
        seen: dict[str, str] = {}
        number = 0
        for number, (record, where) in enumerate(self.records(), start=1):
            if number == 1:
                self._check_columns(record, where)
            if not all(record.get(column) == value for column, value in self.where.items()):
                continue
            row = self._row(record, where, number)
            if row.id in seen:
                raise UserError(
                    f"the id {row.id!r} stands in two rows; a prompt's history is kept under its id",
                    where=f"{seen[row.id]} and {where}",
                    remedy="make the ids unique, or name another column with id_column",
                )
            seen[row.id] = where
            rows.append(row)
            if len(rows) == self.limit:
                break
        if not rows:
            what = f"none of {number} rows has {self.where}" if number else "there are no rows"
            raise UserError(what, where=self.place(), remedy="check the path and the filter")
        return rows

    def _check_columns(self, record: Mapping[str, Any], where: str) -> None:
        needed = [self.question_column, *self.where]
        if self.answer_column not in {None, _ANSWER}:
            needed.append(str(self.answer_column))
        if self.id_column is not None:
            needed.append(self.id_column)
        for column in needed:
            if column not in record:
                guess = nearest(column, record)
                raise UserError(
                    f"there is no column {column!r}; the columns are {', '.join(map(repr, record)) or 'none'}",
                    where=where,
                    remedy=f"did you mean {guess!r}?" if guess else "name one of them (question_column, ...)",
                )

    def _row(self, record: Mapping[str, Any], where: str, number: int) -> Row:
        used = {self.question_column, self.answer_column}
        id_column = self.id_column or (_ID if _ID in record else None)
        if id_column is None:
            identity = f"{self.name}/{number}"
        else:
            used.add(id_column)
            identity = _text(record.get(id_column), id_column, where, "id")
            if not identity:
                raise UserError(f"the id in column {id_column!r} is empty", where=where, remedy="fill it in")
        question = self._question(record, where)
        answer = record.get(self.answer_column) if self.answer_column else None
        gold = None if _is_missing(answer) else _text(answer, str(self.answer_column), where, "answer")
        return Row(identity, question, gold, {k: v for k, v in record.items() if k not in used}, where)

    def _question(self, record: Mapping[str, Any], where: str) -> str:
        column = self.question_column
        question = record.get(column)
        if _is_missing(question) or (isinstance(question, str) and not question.strip()):
            raise UserError(f"the prompt in column {column!r} is empty", where=where, remedy="mend or remove the row")
        if not isinstance(question, str):
            raise UserError(
                f"the prompt in column {column!r} is no text but {type(question).__name__}",
                where=where,
                remedy="give the question as text; the chat around it is made by the prompt format",
            )
        return _encodable(question, column, where)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _text(value: Any, column: str, where: str, what: str) -> str:
    """A column as text. Whole and decimal numbers are written out; anything else would be a guess."""
    if isinstance(value, str):
        return _encodable(value, column, where)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise UserError(
        f"the {what} in column {column!r} is neither text nor a number but {type(value).__name__}",
        where=where,
        remedy="write it as text, several answers as one comma-separated text",
    )


def _encodable(text: str, column: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write and no tokenizer can read
        raise UserError(
            f"column {column!r} holds half a character ({text[error.start]!a})", where=where, remedy="mend the row"
        ) from error
    return text


def existing_file(path: str, key: str) -> Path:
    """The file at ``path``.

    Raises:
        UserError: it is missing (names the most similar file beside it) or a folder.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        inside = ", ".join(_names(file)[:5]) or "none"
        raise UserError(f"{path} is a folder, not a file", where=key, remedy=f"name one of its files: {inside}")
    parent = next(p for p in [*file.absolute().parents] if p.is_dir())
    if parent != file.absolute().parent:
        raise UserError(
            f"there is no file {path}", where=key, remedy=f"the folder is missing as well; {parent} is there"
        )
    close = difflib.get_close_matches(file.name, _names(parent), n=1, cutoff=0.4)
    raise UserError(
        f"there is no file {path}",
        where=key,
        remedy=f"did you mean {parent / close[0]}?" if close else f"looked in {parent}",
    )


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def in_memory(rows: Iterable[Mapping[str, Any]], place: str) -> Iterator[Record]:
    """Number the rows, and refuse what is no mapping."""
    for number, row in enumerate(rows, start=1):
        where = f"{place}: row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is no mapping but {type(row).__name__}", where=where)
        yield row, where
