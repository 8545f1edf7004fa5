"""Rewards that depend on the length of a completion in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.wrappers import WrappingReward
from lit_grpo.types import RewardInput, Score


class LengthReward(Reward):
    """Value of a completion's length: from ``at_zero`` for no token to ``at_max`` for ``max_tokens`` and more.

    With x = n / max_tokens, at most 1: ``linear`` gives at_max + (at_zero - at_max) (1 - x), ``cosine`` gives
    at_max + (at_zero - at_max) (1 + cos(pi x)) / 2. It rewards short completions, right or wrong:
    :class:`CosineReward` tells them apart.

    Args:
        max_tokens: length from which on the value no longer changes.
        shape: shape of the curve between the two values.
        at_zero: value at length 0.
        at_max: value at ``max_tokens``.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``max_tokens`` is not positive.
    """

    correct_threshold = None
    needs_tokens = True

    def __init__(
        self,
        max_tokens: int,
        shape: Literal["linear", "cosine"] = "linear",
        at_zero: float = 1.0,
        at_max: float = 0.0,
        weight: float = 1.0,
        name: str | None = "length",
    ) -> None:
        super().__init__(weight, name)
        _check_positive("LengthReward", max_tokens)
        self._max, self._shape, self._ends = max_tokens, shape, (at_zero, at_max)
        self.range = (min(self._ends), max(self._ends))

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(between(*self._ends, self._relative_length(item), self._shape)) for item in batch]

    def _relative_length(self, item: RewardInput) -> float:
        return min(1.0, len(item.completion.token_ids) / self._max)


class CosineReward(WrappingReward):
    """Value of a right or wrong answer that depends on its length, 2502.03373 (Demystifying Long CoT) Sec. 4.2.

    A right completion gets from ``correct[0]`` at length 0 to ``correct[1]`` at ``max_tokens`` along half a cosine, a
    wrong one from ``wrong[0]`` to ``wrong[1]``; one of ``max_tokens`` or more gets ``exceed``. Right is what the
    wrapped reward calls so (its ``correct_threshold``). The paper's values are the defaults: short is good if right,
    long is good if wrong.

    Args:
        reward: the reward that tells right from wrong; its weight is not used.
        max_tokens: the length L_max, in tokens, from which on a completion gets ``exceed``.
        correct: values of a right completion at length 0 and L_max.
        wrong: values of a wrong completion at length 0 and L_max.
        exceed: value of any completion from L_max on.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``max_tokens`` is not positive, or the reward does not say what is right.
    """

    needs_tokens = True

    def __init__(
        self,
        reward: Reward,
        max_tokens: int,
        correct: tuple[float, float] = (2.0, 1.0),
        wrong: tuple[float, float] = (-10.0, 0.0),
        exceed: float = -10.0,
        weight: float = 1.0,
        name: str | None = "cosine",
    ) -> None:
        super().__init__(reward, weight, name)
        _check_positive("CosineReward", max_tokens)
        self._max, self._right, self._wrong, self._exceed = max_tokens, correct, wrong, exceed
        ends = (*correct, *wrong, exceed)
        self.range = (min(ends), max(ends))
        # The value tells right from wrong only where the worst right completion is above the best wrong one.
        lowest, highest = min(correct), max(*wrong, exceed)
        self.correct_threshold = lowest if lowest > highest else None

    def change(self, item: RewardInput, score: Score) -> float:
        length = len(item.completion.token_ids)
        if length >= self._max:
            return self._exceed
        ends = self._right if self.reward.correct(score.value) else self._wrong
        return between(*ends, length / self._max, "cosine")


def between(start: float, end: float, x: float, shape: Literal["linear", "cosine"]) -> float:
    """Interpolate from ``start`` at x = 0 to ``end`` at x = 1."""
    remaining = 1 - x if shape == "linear" else (1 + math.cos(math.pi * x)) / 2
    return end + (start - end) * remaining


def _check_positive(name: str, max_tokens: int) -> None:
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}", where=f"{name}.max_tokens", remedy="give a positive number")
