"""The numeric reward: a number within a relative tolerance of the gold number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, get_args

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import Extract, check_extract, final_answer, gold_answer
from lit_grpo.rewards.math.text import clean, parse_number, split_unit
from lit_grpo.types import RewardInput, Score


class NumericReward(Reward):
    """Reward of 1 if the final number is within ``tolerance * |gold|`` of the gold number, else 0.

    A gold of 0 needs a 0.

    The final answer is found as :class:`lit_grpo.rewards.MathReward` finds it (tag, box, "answer is", end of the text).
    Integers, decimals, fractions, mixed and scientific numbers are read exactly, also with thousands commas; a unit
    behind the number is ignored, 5 % is 0.05.

    Args:
        tolerance: largest difference that is right, as a share of the gold number.
        extract: form in which an answer counts: ``auto``, ``boxed``, ``tag`` or ``last_number``.
        answer_tag: name of the tag around an answer.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``tolerance`` is negative or not finite, or ``extract`` or ``answer_tag`` is none.
        ValueError: from ``score``, if a gold answer is no number.
    """

    needs_answer = True
    extracts_answer = True
    range = (0.0, 1.0)

    def __init__(
        self,
        tolerance: float = 1e-4,
        extract: Extract = "auto",
        answer_tag: str = "answer",
        weight: float = 1.0,
        name: str | None = "numeric",
    ) -> None:
        super().__init__(weight, name)
        if not 0 <= tolerance < float("inf"):
            raise UserError(
                f"tolerance is {tolerance}", where="NumericReward.tolerance", remedy="give a number such as 0.0001"
            )
        check_extract(extract, answer_tag, "NumericReward", get_args(Extract))
        self._extract, self._answer_tag = extract, answer_tag
        # A fraction, as the numbers are: a float would round an answer at the very edge to one side or the other.
        self._tolerance = Fraction(tolerance)

    def row_problem(self, answer: str | None, extra: Mapping[str, Any]) -> str | None:
        if number_in(gold_answer(answer or "")) is None:
            return f"the gold answer {str(answer)[:80]!r} is no number"
        return None

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: RewardInput) -> Score:
        gold = number_in(gold_answer(item.prompt.answer or ""))
        if gold is None:
            raise ValueError(self.row_problem(item.prompt.answer, item.prompt.extra))
        value = self._value(item)
        if value is None:
            return Score(0.0, no_answer=True)
        return Score(float(abs(value - gold) <= self._tolerance * abs(gold)))

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        return [None if value is None else str(value) for value in map(self._value, batch)]

    def _value(self, item: RewardInput) -> Fraction | None:
        answer = final_answer(item.text, "number", item.completion.truncated, self._extract, self._answer_tag)
        return number_in(answer) if answer is not None else None


def number_in(text: str) -> Fraction | None:
    """Return the number that a written answer is, or None; ``x = 5 cm`` is 5."""
    number = parse_number(split_unit(clean(text).rpartition("=")[2].strip())[0])
    if number is None:
        return None
    return number.value / 100 if number.percent else number.value
