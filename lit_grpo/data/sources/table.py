"""The base of JSONL, CSV, Parquet, hub and in-memory sources: columns become rows, and every row is checked."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.layout import (
    AUTO,
    MISSING,
    Layout,
    LayoutName,
    behind_hashes,
    check_columns,
    columns_of,
    disagree,
    find_layout,
    value_of,
)
from lit_grpo.data.sources.messages import is_chat, question_of, read_chat
from lit_grpo.errors import UserError
from lit_grpo.types import Message
from lit_grpo.utils.text import shorten

Record = tuple[Mapping[str, Any], str]
"""The columns of one row, and the file and line (or row) that they stand in."""

_ID = "id"
MOST_CHARACTERS = 5_000_000
"""Longest prompt, in characters: more than fit into a million tokens."""


class TableSource(PromptSource):
    r"""Base class of sources whose rows have named columns. A subclass implements ``records``.

    Rows are read as people publish them: which column holds the prompt, the answer and the source is found in the
    first row (``layout``), and said in :meth:`columns_taken`. A column may lie inside another:
    ``reward_model.ground_truth``. A prompt is text, or the list of messages of a chat.

    Args:
        layout: ``auto``: as the columns of the first row say. ``trl``, ``verl``, ``openrlhf``, ``gsm8k``: the columns
            of these, see ``docs/data.md``. ``columns``: ``prompt`` and ``answer``, as they stand.
        question_column: column of the prompt; ``auto``: as the layout says.
        answer_column: column of the gold answer, text or a number; ``auto``: as the layout says, and data without
            answers may lack it. None: the data has no answers.
        answer_pattern: regular expression with one group, which is the gold answer; it is looked for in the answer
            column and the last match counts. The whole text stays in the column ``solution``. None: the column as it
            is, and of a solution that ends in the line ``#### 42`` what that line says.
        id_column: column of an id that is unique in the source. None: the column ``id`` if it is there, else
            ``name/number of the row``.
        source_column: column of the name of the data set that a row is from, for metrics and rewards by source;
            ``auto``: as the layout says (``data_source`` of verl, ``datasource`` of OpenRLHF). None: all rows have the
            name of the source.
        where: values that the columns of a row must have for it to be kept, for instance ``{lang: en}``.
        limit: number of rows to keep, the first ones, counted after ``where``.
        name: name of the source. None: that of the file or data set.

    Every other column goes into ``Row.extra``.
    """

    def __init__(
        self,
        question_column: str = AUTO,
        answer_column: str | None = AUTO,
        answer_pattern: str | None = None,
        id_column: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        name: str | None = None,
        layout: LayoutName = AUTO,
        source_column: str | None = AUTO,
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"limit is {limit}", where=f"{type(self).__name__}.limit", remedy="keep at least 1 row")
        self.question_column, self.answer_column, self.id_column = question_column, answer_column, id_column
        self.source_column = source_column
        self.answer_pattern = self._compiled(answer_pattern)
        self.layout: LayoutName = layout
        self._columns: Layout | None = None
        self._seen = _Seen()
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
            if self._columns is None:
                self._columns = self._find_columns(record, where)
            if not all(self.matches(value_of(record, column), value) for column, value in self.where.items()):
                continue
            row = self._row(self._columns, record, where, number)
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

    def columns_taken(self) -> list[str]:
        """Say in one line what was taken from which column, once the rows are read."""
        if self._columns is None or self._rows is None:
            return []
        columns, seen = self._columns, self._seen
        forms = " and ".join(form for form, count in (("messages", seen.chats), ("text", seen.texts)) if count)
        answer = "no answer"
        if seen.answers:
            behind = ", behind ####" if columns.hashes else ""
            if self.answer_pattern is not None:
                behind = f", as {self.answer_pattern.pattern!r}"
            answer = f"answer from {columns.answer}{behind}"
            missing = len(self._rows) - seen.answers
            answer += f" (missing in {missing:,})" if missing else ""
        source = f", source from {columns.source}" if columns.source else ""
        rows = f"{len(self._rows):,} row{'s' if len(self._rows) > 1 else ''}"
        return [f"{self.title()} ({columns.name}): prompt from {columns.question} ({forms}), {answer}{source}, {rows}"]

    def title(self) -> str:
        """Return the short name of the file or data set, for the line that says what was taken from it."""
        return self.name

    def _find_columns(self, record: Mapping[str, Any], where: str) -> Layout:
        # From the first row only: in JSON a later row may leave out a column that has no value.
        source = self.source_column
        named = [column for column in (self.id_column, source) if column not in (AUTO, None)]
        check_columns(record, [*self.where, *named], where)
        pattern = self.answer_pattern is not None
        found = find_layout(record, self.layout, self.question_column, self.answer_column, pattern=pattern, where=where)
        return found if source == AUTO else replace(found, source=source)

    def _row(self, columns: Layout, record: Mapping[str, Any], where: str, number: int) -> Row:
        used = {columns.question, columns.answer, columns.source}
        id_column = self.id_column or (_ID if _ID in record else None)
        if id_column is None:
            identity = f"{self.name}/{number}"
        else:
            used.add(id_column)
            identity = _text(value_of(record, id_column), id_column, where, "id")
            if not identity:
                raise UserError(f"the id in column {id_column!r} is empty", where=where, remedy="fill it in")
        question, messages = self._question(columns.question, record, where)
        extra = {k: v for k, v in record.items() if k not in used}
        gold = self._gold(columns, record, where, extra)
        source = value_of(record, columns.source) if columns.source else None
        name = "" if source is None else _text(source, str(columns.source), where, "source")
        self._seen.count(messages is not None, gold is not None)
        return Row(identity, question, gold, extra, where, name, messages)

    def _gold(self, columns: Layout, record: Mapping[str, Any], where: str, extra: dict[str, Any]) -> str | None:
        """Return the gold answer; where it is part of a longer text, that text goes into the column ``solution``."""
        answer = value_of(record, columns.answer) if columns.answer else None
        if _is_missing(answer):
            return None
        whole = _text(answer, str(columns.answer), where, "answer")
        if self.answer_pattern is not None:
            matches = self.answer_pattern.findall(whole)
            gold = str(matches[-1]).strip() if matches else None
        else:
            gold = behind_hashes(whole) if columns.hashes else whole
            if self.layout == AUTO and not columns.hashes and behind_hashes(whole) is not None:
                raise UserError(
                    f"the answer in column {columns.answer!r} ends in '#### ...', and that of the first row does not",
                    where=where,
                    remedy="set layout: gsm8k if the answer stands behind ####, or layout: columns to take it all",
                )
        if gold is None:
            looked_for = self.answer_pattern.pattern if self.answer_pattern is not None else "#### 42"
            raise UserError(
                f"the answer in column {columns.answer!r} holds nothing like {looked_for!r}: {whole[-80:]!r}",
                where=where,
                remedy="mend the row, or change answer_pattern"
                + (" (layout: columns takes the column as it is)" if columns.hashes else ""),
            )
        for column in columns.others:
            other = value_of(record, column)
            if isinstance(other, (str, int, float)) and not _is_missing(other) and disagree(gold, str(other), column):
                raise UserError(
                    f"the columns {columns.answer!r} and {column!r} give different answers, {shorten(gold, 40)!r} and "
                    f"{shorten(str(other), 40)!r}; the columns are {columns_of(record)}",
                    where=where,
                    remedy=f"say which is the gold answer: answer_column: {columns.answer}, or answer_column: {column}",
                )
        if gold != whole:
            # Supervised fine-tuning learns from the whole text. A column of that name is the data's own, and stays.
            extra.setdefault("solution", whole)
        return gold

    def _question(
        self, column: str, record: Mapping[str, Any], where: str
    ) -> tuple[str, tuple[Message, ...] | None]:  # fmt: skip
        """Return the text of the question, and the messages where it is a chat."""
        question = value_of(record, column, MISSING)
        if question is MISSING:
            raise UserError(
                f"the row has no column {column!r}; its columns are {columns_of(record)}",
                where=where,
                remedy="mend or remove the row: all rows of a file are laid out like its first",
            )
        if _is_missing(question) or (isinstance(question, str) and not question.strip()):
            raise UserError(f"the prompt in column {column!r} is empty", where=where, remedy="mend or remove the row")
        if is_chat(question):
            messages = read_chat(question, column, where)
            for message in messages:
                _encodable(message["content"], column, where)
            return question_of(messages), messages
        if not isinstance(question, str):
            raise UserError(
                f"the prompt in column {column!r} is no text but {type(question).__name__}",
                where=where,
                remedy="give the question as text, or as a list of messages",
            )
        if len(question) > MOST_CHARACTERS:
            raise UserError(
                f"the prompt in column {column!r} has {len(question):,} characters",
                where=where,
                remedy="mend or remove the row: no model takes so much",
            )
        self._check_whose_text(column, record, where)
        return _encodable(question, column, where), None

    def _check_whose_text(self, column: str, record: Mapping[str, Any], where: str) -> None:
        """Refuse a column that is one message of a list, and not the one that asks."""
        parent = column.removesuffix(".content")
        message = value_of(record, parent)
        if parent == column or column in record or not isinstance(message, Mapping) or "role" not in message:
            return
        whole = parent.rpartition(".")[0]
        messages = value_of(record, whole)
        if message["role"] != "user" or (is_chat(messages) and question_of(read_chat(messages, whole, where)) != (
            message["content"]
        )):  # fmt: skip
            raise UserError(
                f"the column {column!r} is a message of the role {message['role']!r}, not the question"
                if message["role"] != "user"
                else f"the column {column!r} is not the last message of the user",
                where=where,
                remedy=f"take the whole list: question_column: {whole}",
            )


@dataclass
class _Seen:
    """What the rows held, counted."""

    chats: int = 0
    texts: int = 0
    answers: int = 0

    def count(self, chat: bool, answer: bool) -> None:
        self.chats += chat
        self.texts += not chat
        self.answers += answer


class FileSource(TableSource):
    """Base class of sources whose rows stand in files. A subclass implements ``read``.

    Args:
        path: path of the file, a pattern such as ``train-*.parquet``, or a list of these; files are read in the order
            of the list, those of a pattern in that of their names. A gzip file is known by its first bytes, whatever
            its name.
    """

    def __init__(self, path: str | list[str], **columns: Any) -> None:
        super().__init__(**columns)
        self.path = [str(one) for one in path] if isinstance(path, (list, tuple)) else str(path)
        given = [self.path] if isinstance(self.path, str) else self.path
        if not given:
            raise UserError("the list of files is empty", where=self.key, remedy="name at least one file")
        self._given = given
        self.name = self.name or re.sub(r"[-_.]*[*?\[].*", "", Path(given[0]).name.split(".")[0]) or "files"

    @property
    def key(self) -> str:
        """Key of the configuration that holds the path, for messages about it."""
        return f"{type(self).__name__}.path"

    def read(self, path: str) -> Iterator[Record]:
        """Yield the rows of one file, in order."""
        raise NotImplementedError(f"{type(self).__name__} must implement read()")

    def records(self) -> Iterator[Record]:
        for path in self.files():
            yield from self.read(path)

    def files(self) -> list[str]:
        """Return the files that the path names.

        Raises:
            UserError: a pattern fits no file.
        """
        found: list[str] = []
        for path in self._given:
            # A file whose own name has such a sign comes before a pattern of that spelling.
            if not glob.has_magic(path) or Path(path).expanduser().exists():
                found.append(path)
                continue
            # Path.glob takes no absolute pattern.
            fitting = sorted(glob.glob(str(Path(path).expanduser()), recursive=True))  # noqa: PTH207
            if not fitting:
                raise UserError(f"no file fits {path!r}", where=self.key, remedy="check the folder and the pattern")
            found += fitting
        return found

    def place(self) -> str:
        return ", ".join(self._given)

    def title(self) -> str:
        return ", ".join(Path(path).name for path in self._given)


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
    # A list of one is written by libraries that allow several; of several nobody could say which counts.
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, int, float)):
        return _text(value[0], column, where, what)
    # bool is a subclass of int; how true, a list or a mapping is to be written as an answer would be a guess.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    remedy = "write it as text, several answers as one comma-separated text"
    if isinstance(value, Mapping) and value:
        remedy = f"name a column inside it: answer_column: {column}.{next(iter(value))}"
    elif isinstance(value, list) and len(value) > 1:
        remedy = f"take the first of them (answer_column: {column}.0), or write them as one comma-separated text"
    raise UserError(
        f"the {what} in column {column!r} is neither text nor a number but {type(value).__name__}",
        where=where,
        remedy=remedy,
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
