"""Exact match and addition, and what importing rewards costs."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.errors import UserError
from lit_grpo.rewards import AdditionReward, ExactMatch
from lit_grpo.rewards.addition import final_integer
from lit_grpo.types import Score


@pytest.mark.parametrize(
    ("arguments", "text", "answer", "value"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "paris", "Paris", 0),
        ({"ignore_case": True}, "STRASSE", "Straße", 1),
        ({}, "", None, 0),
        ({}, "", "", 1),
        ({"pattern": r"<answer>(.*?)</answer>"}, "<answer>\n7 </answer>", "7", 1),
        ({"pattern": r"<answer>(.*?)</answer>"}, "<answer>6</answer><answer>7</answer>", "7", 1),
        ({"pattern": r"<answer>(.*?)</answer>"}, "<answer>6</answer><answer>7</answer>", "6", 0),
        ({"pattern": r"<answer>(.*?)</answer>"}, "7", "7", 0),
        ({"pattern": r"\d+"}, "12 and 13", "13", 1),
        ({"pattern": r"(a)|b"}, "b", "b", 0),
    ],
)
def test_exact_match(reward_input, arguments, text, answer, value):
    assert [s.value for s in ExactMatch(**arguments).score([reward_input(text, answer)])] == [value]


def test_a_broken_expression_is_refused():
    with pytest.raises(UserError, match="is not a regular expression"):
        ExactMatch(pattern="(")


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("12", "12"),
        ("3+4=7", "7"),
        (" It is 7. \n", "7"),
        ("007", "7"),
        ("-7", "-7"),
        ("= -7", "-7"),
        ("=-7", "-7"),
        ("5-2", "2"),
        ("-0", "0"),
        ("1.5", None),
        ("1,500", None),
        ("x2", None),
        ("7 apples", None),
        ("", None),
        (".", None),
        ("７", None),
        ("9" * 10_000, "9" * 10_000),
        ("1" * 1_000_000 + "x", None),
    ],
)
def test_the_integer_at_the_end(text, integer):
    assert final_integer(text) == integer


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_addition_rewards_the_sum_and_nothing_else(reward_input, a, b):
    reward = AdditionReward()
    batch = [
        reward_input(f"{a}+{b}={a + b}", str(a + b)),
        reward_input(str(a + b + 1), str(a + b)),
        reward_input("", str(a + b)),
    ]
    assert [s.value for s in reward.score(batch)] == [1.0, 0.0, 0.0]
    assert reward.score([reward_input("7", None), reward_input("", None)]) == [Score(0.0)] * 2


def test_names_and_needs():
    assert (AdditionReward().name, ExactMatch().name, ExactMatch(name="x", weight=2).name) == (
        "addition",
        "exact_match",
        "x",
    )
    assert AdditionReward.needs_answer
    assert ExactMatch.needs_answer


def test_importing_rewards_and_tasks_is_light():
    code = (
        "import sys, lit_grpo.rewards, lit_grpo.data; from lit_grpo.rewards import MathReward, score_all; "
        "print([m for m in ('transformers', 'sympy', 'datasets', 'pyarrow', 'math_verify') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "."}
    )
    assert done.stdout.strip() == "[]"
