"""The table of an evaluation shows a standard error only where something scattered."""

from __future__ import annotations

import math
from typing import Any

from lit_grpo.evaluation.evaluator import EvaluationResult
from lit_grpo.evaluation.table import table


def shown(**sets: dict[str, float]) -> list[str]:
    result: Any = object.__new__(EvaluationResult)
    object.__setattr__(result, "sets", sets)
    return table(result).splitlines()


def test_errors_stand_beside_shares_in_percent():
    lines = shown(a={"prompts": 50.0, "pass@1": 0.5, "pass@1/se": 0.071, "reward": 0.5})
    assert "50.0 ± 7.1" in lines[1]
    assert lines[-1] == "percent, with the standard error over prompts"


def test_nothing_that_scattered_has_no_error_of_0():
    lines = shown(
        a={"prompts": 50.0, "pass@1": 0.0, "pass@1/se": 0.0}, b={"prompts": 9.0, "pass@1": 1.0, "pass@1/se": 0.1}
    )
    assert "±" not in lines[1]
    assert lines[1].split() == ["a", "50", "1", "0.0"]
    assert "100.0 ± 10.0" in lines[2]
    assert "none where all prompts came out alike" in lines[-1]


def test_one_prompt_has_no_error():
    lines = shown(a={"prompts": 1.0, "pass@1": 0.5, "pass@1/se": math.nan})
    assert "nan" not in "".join(lines)
    assert "±" not in lines[1]


def test_a_small_error_keeps_its_first_digit():
    assert "0.1 ± 0.02" in shown(a={"prompts": 9e6, "pass@1": 0.001, "pass@1/se": 0.0002})[1]
