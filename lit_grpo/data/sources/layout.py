"""How published data sets lay their rows out: which column holds what, found in the first row and said in the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from lit_grpo.data.sources import choices, code_tests
from lit_grpo.data.sources.golds import parsed, plain
from lit_grpo.data.sources.messages import CONVERSATIONS, is_chat
from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import nearest

LayoutName = Literal["auto", "columns", "trl", "verl", "openrlhf", "gsm8k", "open_instruct", "prime", "choices"]
AUTO: Final = "auto"
"""Stands for a column that the layout decides."""
# None cannot stand for a column that is not there, since a column may hold null.
MISSING: Any = object()

_PROMPT = "prompt"
_QUESTIONS = ("question", "problem", "input", "query", "instruction", "question_stem", "question_content")
"""Columns of questions, of which one must be there alone; ``prompt`` goes before them all, conversations behind."""
_ANSWERS = (
    *("reward_model.ground_truth", "verification_info.ground_truth", "answer", "ground_truth", "final_answer", "label"),
    *("target", "expected_answer", "correct_answer", "golden_answers", "answers", "gold_answer", "answerkey"),
)
"""Columns of gold answers, in any case of letters. Where there are several, they must agree in every row."""
_SOLUTION = "solution"
"""A gold answer where no other is there; beside one it is a worked solution."""
_COLUMNS = {
    "columns": ("prompt", "answer"),
    "trl": ("prompt", AUTO),
    "verl": ("prompt", "reward_model.ground_truth"),
    "openrlhf": ("input", "label"),
    "gsm8k": ("question", "answer"),
    "open_instruct": ("messages", "ground_truth"),
    "prime": ("prompt", "verification_info.ground_truth"),
    "choices": (AUTO, AUTO),
}
"""Columns of question and answer in each layout."""
_SOURCES = {"verl": "data_source", "openrlhf": "datasource", "open_instruct": "dataset", "prime": "task_type"}
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
    tests: str | None = None
    """Column of the tests of a program; None: the rows ask for no program."""
    options: str | None = None
    """Column of the options of a multiple choice, which are written below the question; None: there is none."""


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
    chosen = answer
    if name != AUTO:
        question = _COLUMNS[name][0] if question == AUTO else question
        answer = _COLUMNS[name][1] if answer == AUTO else answer
    question = _question(record, where) if question == AUTO else question
    tests = _tests(record) if name != "columns" and chosen == AUTO else None
    others: tuple[str, ...] = ()
    if answer == AUTO:
        there = [column for column in map(partial(_spelt, record), _ANSWERS) if column is not None]
        # Beside tests a solution is a program.
        there += [column] if tests is None and (column := _spelt(record, _SOLUTION)) is not None else []
        # A row of JSON may leave out a column that has no value in it, so the usual one is looked for in each.
        answer, others = (there[0], tuple(there[1:])) if there else ("answer", ())
    gold = None if answer is None else value_of(record, answer)
    ends_in_hashes = isinstance(gold, str) and _HASHES.search(gold) is not None
    hashes = not pattern and (name == "gsm8k" or (name != "columns" and ends_in_hashes))
    options = None if pattern or hashes or name not in (AUTO, "choices") else _options(record, question, gold)
    kind = name if name != AUTO else _kind(record, question, hashes=hashes, options=options)
    needed = [question, *named]
    if name not in (AUTO, "columns", "trl", "choices") and answer is not None and tests is None:
        needed.append(answer)
    check_columns(record, needed, where)
    if name == "choices" and options is None:
        raise UserError(
            f"no column of {', '.join(map(repr, choices.COLUMNS))} holds options of which {answer!r} is one; the "
            f"columns are {columns_of(record)}",
            where=where,
            remedy="rename the column of the options, or leave layout out",
        )
    source = _SOURCES.get(kind)
    return Layout(kind, question, answer, source if source in record else None, hashes, others, tests, options)


def _question(record: Mapping[str, Any], where: str) -> str:
    if (prompt := _spelt(record, _PROMPT)) is not None:
        return prompt
    there = [column for column in map(partial(_spelt, record), _QUESTIONS) if column is not None]
    if len(there) > 1:
        raise UserError(
            f"several columns could hold the prompt: {', '.join(map(repr, there))}; the columns are "
            f"{columns_of(record)}",
            where=where,
            remedy=f"say which: question_column: {there[0]}",
        )
    # Beside a question, messages are the whole conversation, answer included.
    conversation = next((column for column in CONVERSATIONS if column in record), _PROMPT)
    return there[0] if there else conversation


def _spelt(record: Mapping[str, Any], column: str) -> str | None:
    """Return a column as the record spells it, whatever the case of its letters; None where it is not there."""
    if value_of(record, column, MISSING) is not MISSING:
        return column
    return next((name for name in record if name.lower() == column), None)


def _tests(record: Mapping[str, Any]) -> str | None:
    """Return the column of tests; that of verl and prime-rl also where the first row has none, for it may be mixed."""
    # What the reward reads as it stands stays as it is.
    native = code_tests.tests_of(record.get("tests"))
    if "cases" in record or (native is not None and native.sources):
        return None
    if value_of(record, "reward_model.ground_truth", MISSING) is not MISSING:
        return "reward_model.ground_truth"
    if "verification_info" in record:
        return "verification_info"
    return next((column for column in code_tests.COLUMNS if code_tests.tests_of(value_of(record, column))), None)


def _options(record: Mapping[str, Any], question: str, gold: Any) -> str | None:
    """Return the column of the options where the prompt is a text and the gold is one of them."""
    if not isinstance(value_of(record, question), str) or is_chat(value_of(record, question)):
        return None
    there = [
        column for column in choices.COLUMNS if (found := choices.options_of(record.get(column))) and found.letter(gold)
    ]
    return there[0] if there else None


def _kind(record: Mapping[str, Any], question: str, *, hashes: bool, options: str | None) -> str:
    if value_of(record, "reward_model.ground_truth", MISSING) is not MISSING:
        return "verl"
    if "verification_info" in record:
        return "prime"
    if question == "input" and "label" in record:
        return "openrlhf"
    if question == "messages" and "ground_truth" in record:
        return "open_instruct"
    if options is not None:
        return "choices"
    if hashes:
        return "gsm8k"
    value = value_of(record, question)
    return "trl" if value is not None and is_chat(value) else "columns"


def columns_of(record: Mapping[str, Any]) -> str:
    """List the columns of a row for a message, those inside ``reward_model`` too."""
    names = list(record)
    for column in ("reward_model", "verification_info"):
        inside = parsed(value) if isinstance(value := record.get(column), str) else value
        names += [f"{column}.{key}" for key in (inside if isinstance(inside, Mapping) else ())]
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
                remedy=f"did you mean {guess!r}?" if guess else _remedy(column, record, in_memory=": row " in where),
            )


def _remedy(column: str, record: Mapping[str, Any], in_memory: bool) -> str:
    """Name the columns that could hold the question where the usual ones are missing."""
    texts = [name for name, value in record.items() if is_chat(value) or isinstance(value, str)]
    if column != _PROMPT or not texts:
        return f"say which holds the question and which the answer: question_column, answer_column; not {column!r}"
    named = f"question_column: {' or '.join(texts[:6])}"
    # Rows that a program hands over have no place for the key of a configuration.
    return f"say which holds the question: {named}" + (
        f"; in Python: InMemoryPrompts(ROWS, question_column={texts[0]!r})" if in_memory else ""
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
    if column.lower() == _SOLUTION and not numbers:
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
    for number, step in enumerate(column.split(".")):
        # Some columns hold their fields as one text of JSON, as prime-rl's verification_info.
        value = plain(parsed(value) if number and isinstance(value, str) else value)
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, Sequence) and not isinstance(value, str) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return default
    return value
