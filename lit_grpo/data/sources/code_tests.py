"""Tests of programs as data sets of code store them, as the columns that :class:`lit_grpo.rewards.CodeReward` reads."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lit_grpo.data.sources.golds import parsed, plain

COLUMNS = (
    *("reward_model.ground_truth", "input_output", "verification_info", "tests", "test_cases", "official_tests"),
    *("public_test_cases", "private_test_cases", "public_tests", "private_tests", "test_list", "test", "ground_truth"),
)
"""Columns that may hold tests: those of verl, APPS and TACO, prime-rl, DeepCoder, LiveCodeBench, CodeContests, MBPP,
HumanEval and open-instruct, of which the first that does is taken."""


class Tests(NamedTuple):
    """The tests of a row: either pairs of standard input and output, or Python source."""

    cases: list[dict[str, str]]
    sources: list[str]

    @property
    def column(self) -> tuple[str, list[Any]]:
        """Name and value of the column that the reward reads."""
        return ("cases", list(self.cases)) if self.cases else ("tests", list(self.sources))

    def __len__(self) -> int:
        return len(self.cases) or len(self.sources)


def tests_of(value: Any) -> Tests | None:
    """Return the tests that a column holds, None where it holds none.

    Args:
        value: a mapping or its JSON: ``{inputs: [...], outputs: [...]}``, with ``fn_name`` where they are arguments and
            values of a function; a list of ``{input: ..., output: ...}``; a mapping of which ``test_cases`` is one of
            these; a list of assertions; or Python source that asserts something.
    """
    value = plain(value)
    if isinstance(value, str):
        inside = parsed(value)
        if inside is not None:
            return tests_of(inside)
        return Tests([], [_without_import(value)]) if _is_test(value) else None
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("test_cases", "tests") if value.get(key)), None)
        if inner is not None:
            return tests_of(inner)
        name = value.get("fn_name") or value.get("func_name")
        for given, wanted in (("inputs", "outputs"), ("input", "output")):
            inputs, outputs = plain(value.get(given)), plain(value.get(wanted))
            if isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs):
                return _tests(list(zip(inputs, outputs, strict=True)), name)
        return None
    if not isinstance(value, Sequence) or not value:
        return None
    items = [plain(item) for item in value]
    if all(isinstance(item, str) for item in items):
        return Tests([], list(map(_without_import, items))) if all(map(_is_test, items)) else None
    if all(isinstance(item, Mapping) and "input" in item and "output" in item for item in items):
        first = items[0]
        name = first.get("fn_name") or first.get("func_name")
        meta = first.get("metadata")
        meta = parsed(meta) if isinstance(meta, str) else meta
        name = name or (meta.get("func_name") if isinstance(meta, Mapping) else None)
        return _tests([(item["input"], item["output"]) for item in items], name)
    return None


def _is_test(source: str) -> bool:
    if "assert" not in source and "def check" not in source and "def test" not in source:
        return False
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_import(source: str) -> str:
    """Leave out the import of the program under the name that KodCode gives it: tests see its names anyway."""
    return re.sub(r"^from solution import (?:\([^)]*\)|.*)$", "", source, flags=re.MULTILINE)


def _tests(pairs: Sequence[tuple[Any, Any]], function: Any) -> Tests:
    if isinstance(function, str) and function.isidentifier():
        return Tests([], [_call(function, given, wanted) for given, wanted in pairs])
    return Tests([{"input": _lines(given), "output": _lines(wanted)} for given, wanted in pairs], [])


def _lines(value: Any) -> str:
    """Return standard input or output as one text; some data sets store its lines."""
    value = plain(value)
    if isinstance(value, (list, tuple)):
        return "\n".join(_lines(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _call(function: str, given: Any, wanted: Any) -> str:
    """Write the test that a function, or a method of ``Solution``, gives the value that is wanted."""
    given, wanted = _values(given), plain(wanted)
    wanted = _value(wanted) if isinstance(wanted, str) else wanted
    # The expected value stands in a list of its own in APPS, in its other copies it does not.
    also = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted
    return (
        f"try:\n    found = {function}(*{given!r})\n"
        f"except (NameError, AttributeError):\n    found = Solution().{function}(*{given!r})\n"
        "found = list(found) if isinstance(found, tuple) else found\n"
        f"assert found == {wanted!r} or found == {also!r}\n"
    )


def _values(given: Any) -> list[Any]:
    """Return the arguments of a call: a list, or a text with one JSON value a line (LiveCodeBench)."""
    given = plain(given)
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
