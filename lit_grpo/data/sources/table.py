"""The base of JSONL, CSV, Parquet, hub and in-memory sources: columns become rows, and every row is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.choices import options_of
from lit_grpo.data.sources.code_tests import tests_of
from lit_grpo.data.sources.files import files_of, read_saved, saved_kind
from lit_grpo.data.sources.golds import encodable, is_missing, plain, read_golds
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
from lit_grpo.data.sources.messages import LastAssistant, is_chat, question_of, read_chat, system_of
from lit_grpo.errors import UserError
from lit_grpo.types import Message
from lit_grpo.utils.text import shorten

Record = tuple[Mapping[str, Any], str]
"""The columns of one row, and the file and line (or row) that they stand in."""

_ID = "id"
_SYSTEM = "system"
"""Column of the system prompt beside a chat, as in ShareGPT's form."""
MOST_CHARACTERS = 5_000_000
"""Longest prompt, in characters: more than fit into a million tokens."""


class TableSource(PromptSource):
    r"""Base class of sources whose rows have named columns. A subclass implements ``records``.

    Rows are read as people publish them: which column holds the prompt, the answer and the source is found in the
    first row (``layout``), and said in :meth:`columns_taken`. A column may lie inside another:
    ``reward_model.ground_truth``. A prompt is text, or the list of messages of a chat.

    Args:
        layout: ``auto``: as the columns of the first row say. ``trl``, ``verl``, ``openrlhf``, ``gsm8k``,
            ``open_instruct``, ``prime``, ``choices``: the columns of these, see ``docs/data.md``. ``columns``:
            ``prompt`` and ``answer``, as they stand.
        question_column: column of the prompt; ``auto``: as the layout says.
        answer_column: column of the gold answer: text, a number, or a list of which any is right; ``auto``: as the
            layout says, and data without answers may lack it. None: the data has no answers.
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
        last_assistant: what the last message of a chat is where it is the assistant's. ``auto``: in the columns
            ``messages`` and ``conversations`` the answer, which is left out of the prompt and kept in the column
            ``solution``; in others an error. ``leave_out``: the answer. ``continue``: the beginning of the completion.

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
        last_assistant: LastAssistant = "auto",
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"limit is {limit}", where=f"{type(self).__name__}.limit", remedy="keep at least 1 row")
        self.question_column, self.answer_column, self.id_column = question_column, answer_column, id_column
        self.source_column = source_column
        self.answer_pattern = self._compiled(answer_pattern)
        self.layout: LayoutName = layout
        self.last_assistant: LastAssistant = last_assistant
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
        count = len(self._rows)
        forms = " and ".join(form for form, number in (("messages", seen.chats), ("text", seen.texts)) if number)
        prompt = f"prompt from {columns.question} ({forms})"
        if columns.options is not None and seen.options:
            prompt += f", with the options from {columns.options} below it"
        if seen.systems:
            prompt += f", the system message of {seen.systems:,} from {_SYSTEM}"
        if seen.left_out:
            prompt += f", the assistant's last message left out of {seen.left_out:,} and kept as solution"
        answer = "no answer"
        if seen.answers:
            behind = ", behind ####" if columns.hashes else ""
            if self.answer_pattern is not None:
                behind = f", as {self.answer_pattern.pattern!r}"
            behind += ", as a letter" if columns.options is not None and seen.options else ""
            answer = f"answer from {columns.answer}{behind}"
            answer += f" (any of up to {seen.most_golds} is right)" if seen.most_golds > 1 else ""
            missing = count - seen.answers - seen.tests
            answer += f" (missing in {missing:,})" if missing > 0 else ""
        if seen.tests:
            tests = f"tests from {columns.tests} ({seen.tests:,} rows)"
            answer = f"{answer}, {tests}" if seen.answers else tests
        source = f", source from {columns.source}" if columns.source else ""
        rows = f"{count:,} row{'s' if count > 1 else ''}"
        return [f"{self.title()} ({columns.name}): {prompt}, {answer}{source}, {rows}"]

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
        question, messages, left_out = self._question(columns.question, record, where)
        extra = {k: v for k, v in record.items() if k not in used}
        if left_out is not None and left_out.strip():
            # What supervised fine-tuning learns. A column of that name is the data's own, and stays.
            extra.setdefault("solution", left_out)
        has_tests = self._add_tests(columns, record, extra)
        letter = None
        if columns.options is not None:
            question, letter = self._choice(columns, record, where, question)
        if letter is not None:
            golds: tuple[str, ...] = (letter,)
        else:
            # Of verl and prime-rl one column holds the gold of a question, and the tests of a program.
            one_column = has_tests and f"{columns.answer}.".startswith(f"{columns.tests}.")
            golds = () if one_column else self._golds(columns, record, where, extra)
        source = value_of(record, columns.source) if columns.source else None
        name = "" if source is None else _text(source, str(columns.source), where, "source")
        seen = self._seen
        seen.chats, seen.texts = seen.chats + (messages is not None), seen.texts + (messages is None)
        seen.answers, seen.most_golds = seen.answers + bool(golds), max(seen.most_golds, len(golds))
        seen.tests, seen.left_out = seen.tests + has_tests, seen.left_out + (left_out is not None)
        seen.options += letter is not None
        return Row(identity, question, golds[0] if golds else None, extra, where, name, messages, golds[1:])

    def _add_tests(self, columns: Layout, record: Mapping[str, Any], extra: dict[str, Any]) -> bool:
        """Put the tests of a program where the reward looks for them; say whether the row has any."""
        tests = tests_of(value_of(record, columns.tests)) if columns.tests is not None else None
        if not tests:
            return False
        column, value = tests.column
        extra.pop("cases" if column == "tests" else "tests", None)
        extra[column] = value
        return True

    def _choice(self, columns: Layout, record: Mapping[str, Any], where: str, question: str) -> tuple[str, str | None]:
        """Return a question with its options below, and the letter of the right one; None where there is no gold."""
        options = options_of(record.get(str(columns.options)))
        gold = value_of(record, columns.answer) if columns.answer else None
        if options is None or (letter := options.letter(gold)) is None:
            if options is not None and is_missing(gold):
                return options.below(question), None
            raise UserError(
                f"the column {columns.options!r} holds no list of options, unlike in the first row"
                if options is None
                else f"the answer in column {columns.answer!r} is none of the options: {shorten(str(gold), 60)!r}",
                where=where,
                remedy="mend or remove the row, or set layout: columns to take question and answer as they stand",
            )
        return options.below(question), letter

    def _golds(self, columns: Layout, record: Mapping[str, Any], where: str, extra: dict[str, Any]) -> tuple[str, ...]:
        """Return the gold answers, any of which is right; the text that one is part of goes into ``solution``."""
        value = value_of(record, columns.answer) if columns.answer else None
        golds = read_golds(value, str(columns.answer), where, as_json=_is_verls(columns.answer))
        found = tuple(dict.fromkeys(self._gold(whole, columns, where, extra) for whole in golds))
        for column in columns.others if found else ():
            other = value_of(record, column)
            # A worked solution may be a list of anything.
            if column.lower() == "solution" and not isinstance(other, (str, int, float)):
                continue
            try:
                others = read_golds(other, column, where, as_json=_is_verls(column))
            # A column of another kind under a usual name is no second answer.
            except UserError:
                continue
            if others and all(disagree(gold, one, column) for gold in found for one in others):
                raise UserError(
                    f"the columns {columns.answer!r} and {column!r} give different answers, {shorten(found[0], 40)!r} "
                    f"and {shorten(others[0], 40)!r}; the columns are {columns_of(record)}",
                    where=where,
                    remedy=f"say which is the gold answer: answer_column: {columns.answer}, or answer_column: {column}",
                )
        return found

    def _gold(self, whole: str, columns: Layout, where: str, extra: dict[str, Any]) -> str:
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
        if gold != whole:
            # Supervised fine-tuning learns from the whole text. A column of that name is the data's own, and stays.
            extra.setdefault("solution", whole)
        return gold

    def _question(
        self, column: str, record: Mapping[str, Any], where: str
    ) -> tuple[str, tuple[Message, ...] | None, str | None]:  # fmt: skip
        """Return the text of the question, the messages where it is a chat, and the answer that was left out of it."""
        question = value_of(record, column, MISSING)
        if question is MISSING:
            raise UserError(
                f"the row has no column {column!r}; its columns are {columns_of(record)}",
                where=where,
                remedy="mend or remove the row: all rows of a file are laid out like its first",
            )
        if is_missing(question) or (isinstance(question, str) and not question.strip()):
            raise UserError(f"the prompt in column {column!r} is empty", where=where, remedy="mend or remove the row")
        if is_chat(question):
            messages, left_out = read_chat(question, column, where, self.last_assistant)
            messages = self._with_system(messages, record)
            for message in messages:
                encodable(message["content"], column, where)
            return question_of(messages), messages, left_out
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
        return encodable(question, column, where), None, None

    def _with_system(self, messages: tuple[Message, ...], record: Mapping[str, Any]) -> tuple[Message, ...]:
        """Put the row's system prompt first where it stands in a column beside a chat that has none."""
        system = record.get(_SYSTEM)
        if not isinstance(system, str) or not system.strip() or system_of(messages) is not None:
            return messages
        self._seen.systems += 1
        return ({"role": "system", "content": system}, *messages)

    def _check_whose_text(self, column: str, record: Mapping[str, Any], where: str) -> None:
        """Refuse a column that is one message of a list, and not the one that asks."""
        parent = column.removesuffix(".content")
        message = value_of(record, parent)
        if parent == column or column in record or not isinstance(message, Mapping) or "role" not in message:
            return
        whole = parent.rpartition(".")[0]
        messages = value_of(record, whole)
        # Whether the assistant's last message is an answer makes no difference to what the user asked last.
        chat = read_chat(messages, whole, where, "leave_out").messages if is_chat(messages) else ()
        if message["role"] != "user" or (chat and question_of(chat) != message["content"]):
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
    most_golds: int = 0
    """Golds of the row that has most of them."""
    tests: int = 0
    options: int = 0
    systems: int = 0
    """Chats whose system message stands in a column of its own."""
    left_out: int = 0
    """Chats whose last message, of the assistant, is no part of the prompt."""


class FileSource(TableSource):
    """Base class of sources whose rows stand in files. A subclass implements ``read``.

    Args:
        path: path of a file, of a folder, a pattern such as ``train-*.parquet``, or a list of these; files are read in
            the order of the list, those of a folder or pattern in that of their names. A gzip file is known by its
            first bytes, whatever its name. A folder that ``Dataset.save_to_disk`` wrote is read as it is.
    """

    endings: tuple[str, ...] = ()
    """Endings of the names that are read in a folder, ``.gz`` behind them left out."""

    def __init__(self, path: str | list[str], **columns: Any) -> None:
        super().__init__(**columns)
        self.path = [str(one) for one in path] if isinstance(path, (list, tuple)) else str(path)
        # Key of the configuration that holds the path, for messages about it.
        self.key = f"{type(self).__name__}.path"
        self._given = [self.path] if isinstance(self.path, str) else self.path
        if not self._given:
            raise UserError("the list of files is empty", where=self.key, remedy="name at least one file")
        named = Path(self._given[0]).name.split(".")[0]
        self.name = self.name or re.sub(r"[-_.]*[*?\[].*", "", named) or "files"

    def read(self, path: str) -> Iterator[Record]:
        """Yield the rows of one file, in order."""
        raise NotImplementedError(f"{type(self).__name__} must implement read()")

    def records(self) -> Iterator[Record]:
        for path in self.files():
            if saved_kind(path) is None:
                yield from self.read(path)
            else:
                yield from in_memory(read_saved(path, None, self.key), path)

    def files(self) -> list[str]:
        """Return the files that the path names.

        Raises:
            UserError: a pattern or a folder has no file.
        """
        return files_of(self._given, self.endings, self.key)

    def place(self) -> str:
        return ", ".join(self._given)

    def title(self) -> str:
        return ", ".join(Path(path).name for path in self._given)


def _is_verls(column: str | None) -> bool:
    """Say whether a column is the one that holds its golds as JSON in some sets: verl's, whatever it is called."""
    return str(column).rpartition(".")[2] == "ground_truth"


def _text(value: Any, column: str, where: str, what: str) -> str:
    """Return a column as text, with numbers written out.

    Raises:
        UserError: the value is neither text nor a finite number.
    """
    if isinstance(value, str):
        return encodable(value, column, where)
    value = plain(value)
    # A list of one is written by libraries that allow several.
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, int, float)):
        return _text(value[0], column, where, what)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise UserError(
        f"the {what} in column {column!r} is neither text nor a number but {type(value).__name__}",
        where=where,
        remedy=f"write it as text, or name another column with {what}_column",
    )


def in_memory(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[Record]:
    """Yield rows with their number as the place, and refuse what is no mapping."""
    for number, row in enumerate(rows, start=1):
        where = f"{source}: row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} is no mapping but {type(row).__name__}", where=where)
        yield row, where
