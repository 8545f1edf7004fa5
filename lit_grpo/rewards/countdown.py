"""The countdown reward: an expression over given numbers, each used once, that hits a target."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from lit_grpo.errors import UserError
from lit_grpo.rewards.arithmetic import evaluate
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import Extract, check_extract, final_answer
from lit_grpo.types import RewardInput, Score

_WRAPPING = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|[$`]|\\[()\[\]]|\*\*")


class CountdownReward(Reward):
    """Reward of 1 for an expression over the given numbers that equals the target, else 0.

    The expression may hold ``+ - * /`` and brackets. The target is the prompt's answer, the numbers a column of its
    row. The expression is found as :class:`lit_grpo.rewards.MathReward` finds an answer (tag, box, "answer is", end of
    the text). ``expression = target`` is taken too, if the equation is true. It is read by a parser of its own, never
    by ``eval``.

    Args:
        numbers: column with the list of numbers.
        use_all: True: every number must be used once; False: each at most once.
        partial: value of an expression that uses the right numbers and misses the target.
        extract: form in which an answer counts: ``auto``, ``boxed`` or ``tag``.
        answer_tag: name of the tag around an answer.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``partial`` is outside [0, 1), or ``extract`` or ``answer_tag`` is none.
    """

    needs_answer = True
    extracts_answer = True
    range = (0.0, 1.0)

    def __init__(
        self,
        numbers: str = "nums",
        use_all: bool = True,
        partial: float = 0.0,
        extract: Literal["auto", "boxed", "tag"] = "auto",
        answer_tag: str = "answer",
        weight: float = 1.0,
        name: str | None = "countdown",
    ) -> None:
        super().__init__(weight, name)
        if not 0 <= partial < 1:
            raise UserError(f"partial is {partial}", where="CountdownReward.partial", remedy="give 0 or up to 1")
        check_extract(extract, answer_tag, "CountdownReward", ("auto", "boxed", "tag"))
        self._extract: Extract = extract
        self._answer_tag = answer_tag
        self._numbers, self._use_all, self._partial = numbers, use_all, partial

    def row_problem(self, answer: str | None, extra: Mapping[str, Any]) -> str | None:
        numbers = extra.get(self._numbers)
        # By type, not isinstance: True is an int in Python, and no number of a problem.
        if not isinstance(numbers, (list, tuple)) or not numbers or not all(type(n) is int for n in numbers):
            has = "is no list of whole numbers" if self._numbers in extra else "is not there"
            return f"the column {self._numbers!r} with the numbers of the problem {has}"
        try:
            Fraction(answer or "")
        except (ValueError, ZeroDivisionError):
            return f"the gold answer {str(answer)[:80]!r} is no number"
        return None

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: RewardInput) -> Score:
        numbers = item.prompt.extra.get(self._numbers, ())
        if problem := self.row_problem(item.prompt.answer, item.prompt.extra):
            raise ValueError(f"prompt {item.prompt.id!r}: {problem}")
        expression = countdown_expression(item.text, item.completion.truncated, self._extract, self._answer_tag)
        if expression is None:
            return Score(0.0, no_answer=True)
        return Score(self._value(expression, Fraction(item.prompt.answer or "0"), numbers))

    def _value(self, written: str, target: Fraction, available: Sequence[int]) -> float:
        left, equals, right = written.partition("=")
        expression = evaluate(left, powers=False)
        # Only whole numbers in ASCII digits can be counted against the given ones; 1.5 cannot.
        if expression is None or not all(number.isascii() and number.isdigit() for number in expression.numbers):
            return 0.0
        if equals and ((other := evaluate(right)) is None or other.value != expression.value):
            return 0.0
        # As multisets: a number that is given twice may be used twice.
        used, allowed = Counter(map(int, expression.numbers)), Counter(available)
        if used != allowed if self._use_all else used - allowed:
            return 0.0
        return 1.0 if expression.value == target else self._partial


def countdown_expression(
    text: str, truncated: bool = False, extract: Extract = "auto", answer_tag: str = "answer"
) -> str | None:
    """Return the expression that a completion offers as its answer, or None."""
    expression = final_answer(text, "other", truncated, extract, answer_tag)
    expression = _WRAPPING.sub(" ", expression).strip().rstrip(".").strip() if expression else None
    return expression or None
