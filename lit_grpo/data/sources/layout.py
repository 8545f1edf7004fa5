"""How published data sets lay their rows out: which column holds what, found in the first row and said in the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lit_grpo.data.sources.messages import is_chat
from lit_grpo.errors import UserError, nearest

LayoutName = Literal["auto", "columns", "trl", "verl", "openrlhf", "gsm8k"]
AUTO: Final = "auto"
"""Stands for a column that the layout decides."""
# None cannot stand for a column that is not there, since a column may hold null.
MISSING: Any = object()

_QUESTIONS = ("question", "problem", "input", "query", "instruction")
"""Columns of questions, of which one must be there alone; ``prompt`` goes before them all, ``messages`` behind."""
_ANSWERS = ("reward_model.ground_truth", "answer", "ground_truth", "final_answer", "label")
"""Columns of gold answers. Where there are several, they must agree in every row."""
_SOLUTION = "solution"
"""A gold answer where no other is there; beside one it is a worked solution."""
_COLUMNS = {
    "columns": ("prompt", "answer"),
    "trl": ("prompt", AUTO),
    "verl": ("prompt", "reward_model.ground_truth"),
    "openrlhf": ("input", "label"),
    "gsm8k": ("question", "answer"),
}
"""Columns of question and answer in each layout."""
_SOURCES = {"verl": "data_source", "openrlhf": "datasource"}
_HASHES = re.compile(r"^####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\$?[-+]?\d[\d,]*(\.\d+)?")


@dataclass(frozen=True)
class Layout:
    """The columns that a table's rows are read from."""

    name: str
    """``columns``, or the library or data set whose layout it is."""
    question: str
    answer: str | None
    """None: the rows have no answers."""
    source: str | None = None
    """Column of the source's name; None: that of the file or data set."""
    hashes: bool = False
    """Whether the answer column holds worked solutions that end in ``#### 42``."""
    others: tuple[str, ...] = ()
    """Further columns of answers, which must agree with ``answer``."""


def find_layout(
    record: Mapping[str, Any], name: LayoutName, question: str, answer: str | None, *, pattern: bool, where: str
) -> Layout:
    """Decide from the first row which column holds what.

    Args:
        record: columns of the first row.
        name: the layout that is asked for; ``auto``: whichever the columns are those of.
        question: column of the question, or ``auto``.
        answer: column of the gold answer, ``auto``, or None for none.
        pattern: whether the user gives a pattern for the answer, which then is not looked for behind ``####``.
        where: file and line of the row.

    Raises:
        UserError: several columns could be the question's, or a column is missing; it lists those that are there.
    """
    named = [column for column in (question, answer) if column not in (AUTO, None)]
    if name != AUTO:
        question = _COLUMNS[name][0] if question == AUTO else question
        answer = _COLUMNS[name][1] if answer == AUTO else answer
    question = _question(record, where) if question == AUTO else question
    others: tuple[str, ...] = ()
    if answer == AUTO:
        there = [column for column in _ANSWERS if value_of(record, column, MISSING) is not MISSING]
        there += [_SOLUTION] if _SOLUTION in record else []
        # A row of JSON may leave out a column that has no value in it, so the usual one is looked for in each.
        answer, others = (there[0], tuple(there[1:])) if there else ("answer", ())
    gold = None if answer is None else value_of(record, answer)
    ends_in_hashes = isinstance(gold, str) and _HASHES.search(gold) is not None
    hashes = not pattern and (name == "gsm8k" or (name != "columns" and ends_in_hashes))
    kind = name if name != AUTO else _kind(record, question, hashes)
    needed = [question, *named]
    if name not in (AUTO, "columns", "trl") and answer is not None:
        needed.append(answer)
    check_columns(record, needed, where)
    source = _SOURCES.get(kind)
    return Layout(kind, question, answer, source if source in record else None, hashes, others)


def _question(record: Mapping[str, Any], where: str) -> str:
    if "prompt" in record:
        return "prompt"
    there = [column for column in _QUESTIONS if column in record]
    if len(there) > 1:
        raise UserError(
            f"several columns could hold the prompt: {', '.join(map(repr, there))}; the columns are "
            f"{columns_of(record)}",
            where=where,
            remedy=f"say which: question_column: {there[0]}",
        )
    # Beside a question, messages are the whole conversation, answer included.
    return there[0] if there else "messages" if "messages" in record else "prompt"


def _kind(record: Mapping[str, Any], question: str, hashes: bool) -> str:
    if value_of(record, "reward_model.ground_truth", MISSING) is not MISSING:
        return "verl"
    if question == "input" and "label" in record:
        return "openrlhf"
    if hashes:
        return "gsm8k"
    value = value_of(record, question)
    return "trl" if value is not None and is_chat(value) else "columns"


def columns_of(record: Mapping[str, Any]) -> str:
    """List the columns of a row for a message, those inside ``reward_model`` too."""
    inside = record.get("reward_model")
    names = [*record, *(f"reward_model.{key}" for key in (inside if isinstance(inside, Mapping) else ()))]
    return ", ".join(map(repr, names)) or "none"


def check_columns(record: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    """Check that the first row has every column that is needed.

    Raises:
        UserError: a column is missing; it lists those that are there.
    """
    for column in needed:
        if value_of(record, column, MISSING) is MISSING:
            guess = nearest(column, record)
            raise UserError(
                f"there is no column {column!r}; the columns are {columns_of(record)}",
                where=where,
                remedy=f"did you mean {guess!r}?" if guess else "name one of them (question_column, ...)",
            )


def behind_hashes(text: str) -> str | None:
    """Return what follows ``####`` in the last line, without the commas of a number; None without such a line."""
    match = _HASHES.search(text)
    return None if match is None else without_commas(match[1])


def without_commas(answer: str) -> str:
    """Take the commas out of a number: ``13,500`` becomes ``13500``, and ``(1,234)`` stays as it is."""
    return answer.replace(",", "") if _NUMBER.fullmatch(answer) else answer


def disagree(answer: str, other: str, column: str) -> bool:
    """Say whether two columns of a row give different gold answers.

    A ``solution`` beside an answer may be any text that leads to it: it disagrees only as another number.
    """
    ours, theirs = _plain(answer), _plain(other)
    numbers = _NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs)
    if column == _SOLUTION and not numbers:
        return False
    return float(ours) != float(theirs) if numbers else ours != theirs


def _plain(answer: str) -> str:
    return without_commas(" ".join((behind_hashes(answer) or answer).split())).replace("$", "")


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
