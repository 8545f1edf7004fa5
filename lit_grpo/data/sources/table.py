"""The base of JSONL, CSV, Parquet, hub and in-memory sources: columns become rows, and every row is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.errors import UserError, nearest

Record = tuple[Mapping[str, Any], str]
"""The columns of one row, and the file and line (or row) that they stand in."""

_ANSWER, _ID = "answer", "id"
# None cannot stand for a column that is not there, since a column may hold null.
_MISSING = object()


class TableSource(PromptSource):
    r"""Base class of sources whose rows have named columns. A subclass implements ``records``.

    A column may lie inside another: ``reward_model.ground_truth``, or ``prompt.0.content`` in a list.

    Args:
        question_column: column of the question; it must be there, and hold text in every row.
        answer_column: column of the gold answer, text or a number. The default may be missing from data without
            answers; any other name must be there. None: the data has no answers.
        answer_pattern: regular expression with one group, which is the gold answer; it is looked for in the answer
            column and the last match counts: ``'####\s*(.+)'`` for GSM8K as published. None: the column as it is.
        id_column: column of an id that is unique in the source. None: the column ``id`` if it is there, else
            ``name/number of the row``.
        where: values that the columns of a row must have for it to be kept, for instance ``{lang: en}``.
        limit: number of rows to keep, the first ones, counted after ``where``.
        name: name of the source. None: that of the file or data set.

    Every other column goes into ``Row.extra``.
    """

    def __init__(
        self,
        question_column: str = "prompt",
        answer_column: str | None = _ANSWER,
        answer_pattern: str | None = None,
        id_column: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        name: str | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"limit is {limit}", where=f"{type(self).__name__}.limit", remedy="keep at least 1 row")
        self.question_column, self.answer_column, self.id_column = question_column, answer_column, id_column
        self.answer_pattern = self._compiled(answer_pattern)
        self.where, self.limit, self.name = dict(where or {}), limit, name or ""
        self._rows: list[Row] | None = None

    def _compiled(self, pattern: str | None) -> re.Pattern[str] | None:
        key = f"{type(self).__name__}.answer_pattern"
        try:
            compiled = re.compile(pattern) if pattern is not None else None
        except re.error as error:
            raise UserError(f"the pattern {pattern!r} is broken: {error}", where=key) from error
        if compiled is not None and compiled.groups != 1:
            raise UserError(
                f"the pattern {pattern!r} has {compiled.groups} groups",
                where=key,
                remedy="put the answer, and nothing else, in brackets: '####\\s*(.+)'",
            )
        return compiled

    def records(self) -> Iterator[Record]:
        """Yield all rows as they are read, in order."""
        raise NotImplementedError(f"{type(self).__name__} must implement records()")

    def place(self) -> str:
        """Return the name of the file or data set, for messages about the whole of it."""
        return self.name

    def matches(self, value: Any, wanted: Any) -> bool:
        """Say whether a row with ``value`` in a column of ``where`` is kept."""
        return bool(value == wanted)

    def rows(self) -> Sequence[Row]:
        """Return the rows that are kept; they are read and checked at the first call.

        Raises:
            UserError: nothing to read, a missing column, an empty prompt, a value of the wrong type, or an id twice.
        """
        if self._rows is None:
            self._rows = self._read()
        return self._rows

    def _read(self) -> list[Row]:
        rows: list[Row] = []
        seen: dict[str, str] = {}
        number = 0
        for number, (record, where) in enumerate(self.records(), start=1):
            # Of the first row only: in JSON a later row may leave out a column that has no value.
            if number == 1:
                self._check_columns(record, where)
            if not all(self.matches(value_of(record, column), value) for column, value in self.where.items()):
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
            # Reading ends here, so a small limit makes a large file quick.
            if len(rows) == self.limit:
                break
        if not rows:
            what = f"none of {number} rows has {self.where}" if number else "there are no rows"
            raise UserError(what, where=self.place(), remedy="check the path and the filter")
        return rows

    def _check_columns(self, record: Mapping[str, Any], where: str) -> None:
        needed = [self.question_column, *self.where]
        # The default may be missing from data without answers; a column that the user has named may not.
        if self.answer_column not in {None, _ANSWER}:
            needed.append(str(self.answer_column))
        if self.id_column is not None:
            needed.append(self.id_column)
        for column in needed:
            if value_of(record, column, _MISSING) is _MISSING:
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
            identity = _text(value_of(record, id_column), id_column, where, "id")
            if not identity:
                raise UserError(f"the id in column {id_column!r} is empty", where=where, remedy="fill it in")
        question = self._question(record, where)
        gold = self._gold(record, where)
        return Row(identity, question, gold, {k: v for k, v in record.items() if k not in used}, where)

    def _gold(self, record: Mapping[str, Any], where: str) -> str | None:
        answer = value_of(record, self.answer_column) if self.answer_column else None
        if _is_missing(answer):
            return None
        gold = _text(answer, str(self.answer_column), where, "answer")
        if self.answer_pattern is None:
            return gold
        matches = self.answer_pattern.findall(gold)
        if not matches:
            raise UserError(
                f"the answer in column {self.answer_column!r} holds nothing like {self.answer_pattern.pattern!r}: "
                f"{gold[-80:]!r}",
                where=where,
                remedy="mend the row, or change answer_pattern",
            )
        return str(matches[-1]).strip()

    def _question(self, record: Mapping[str, Any], where: str) -> str:
        column = self.question_column
        question = value_of(record, column)
        if _is_missing(question) or (isinstance(question, str) and not question.strip()):
            raise UserError(f"the prompt in column {column!r} is empty", where=where, remedy="mend or remove the row")
        if not isinstance(question, str):
            raise UserError(
                f"the prompt in column {column!r} is no text but {type(question).__name__}",
                where=where,
                remedy="give the question as text; the chat around it is made by the prompt format",
            )
        return _encodable(question, column, where)


class FileSource(TableSource):
    """Base class of sources whose rows stand in one file.

    Args:
        path: path of the file. A gzip file is known by its first bytes, whatever its name.
    """

    def __init__(self, path: str, **columns: Any) -> None:
        super().__init__(**columns)
        self.path = str(path)
        self.name = self.name or Path(self.path).name.split(".")[0]

    @property
    def key(self) -> str:
        """Key of the configuration that holds the path, for messages about it."""
        return f"{type(self).__name__}.path"

    def place(self) -> str:
        return self.path


def value_of(record: Mapping[str, Any], column: str, default: Any = None) -> Any:
    """Return the value of a column: of that very name, or else along the dots of its name."""
    # A column whose own name has a dot comes before a path of that spelling.
    if column in record:
        return record[column]
    value: Any = record
    for step in column.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, Sequence) and not isinstance(value, str) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return default
    return value


def _is_missing(value: Any) -> bool:
    # pandas writes a missing value as NaN.
    return value is None or (isinstance(value, float) and math.isnan(value))


def _text(value: Any, column: str, where: str, what: str) -> str:
    """Return a column as text, with numbers written out.

    Raises:
        UserError: the value is neither text nor a finite number.
    """
    if isinstance(value, str):
        return _encodable(value, column, where)
    # bool is a subclass of int; how true, a list or a mapping is to be written as an answer would be a guess.
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
    except UnicodeEncodeError as error:
        # Half of a surrogate pair, which JSON can write and no tokenizer can read.
        raise UserError(
            f"column {column!r} holds half a character ({text[error.start]!a})", where=where, remedy="mend the row"
        ) from error
    return text


def in_memory(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[Record]:
    """Yield rows with their number as the place, and refuse what is no mapping."""
    for number, row in enumerate(rows, start=1):
        where = f"{source}: row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is no mapping but {type(row).__name__}", where=where)
        yield row, where
