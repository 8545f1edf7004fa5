"""The interface of all rewards: each looks at a batch of completions and gives every one a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lit_grpo.types import RewardInput, Score


class Reward:
    """Base class of all rewards. A subclass implements ``score``; everything else has a default.

    Args:
        weight: factor in the total reward of a completion.
        name: key under which the reward is logged (``reward/<name>``); the class name in snake case if left out.
    """

    needs_answer: bool = False
    """True if every prompt must have a gold answer; checked when the data is loaded."""

    extracts_answer: bool = False
    """True if the scores say, by ``no_answer``, which completions hold no parsable answer."""

    needs_tokens: bool = False
    """True if the number of tokens of a completion is needed, not its text alone."""

    correct_threshold: float | None = 1.0
    """A completion with at least this value is correct (full marks by default); None if the reward does not say
    whether an answer is right (format, length, penalties)."""

    range: tuple[float, float] = (-math.inf, math.inf)
    """Least and greatest value that ``score`` can give, before the weight."""

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight = weight
        self.name = name or _snake_case(type(self).__name__)

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Score | float]:
        """Return one score for each input, in order. May be called from several threads at once."""
        raise NotImplementedError(f"{type(self).__name__} must implement score()")

    def for_source(self, source: str) -> Reward:
        """Return the reward for completions of a source's prompts: this one, unless it has another for each source.

        Raises:
            UserError: there is none for this source.
        """
        return self

    def correct(self, value: float) -> bool:
        """Say whether a value of this reward means a right answer; False for a reward that does not say that."""
        # Sums of shares such as 3 x 1/3 may miss full marks by a rounding error, hence the small allowance.
        return self.correct_threshold is not None and value >= self.correct_threshold - 1e-9

    def start(self) -> None:
        """Begin to start worker processes, and return at once. Without it the first ``score`` starts them."""

    def final_answers(self, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
        """Return the final answer of each completion in a normal form: the votes of maj@k, equal where answers are.

        None for a completion without an answer; None altogether, the default, where the reward looks for none.
        """
        return None

    def close(self) -> None:
        """End worker processes and close connections. Safe to call twice."""


def primary_reward(rewards: Sequence[Reward]) -> Reward | None:
    """Return the reward that says whether an answer is right: the first in the list with a ``correct_threshold``.

    pass@k, maj@k, filters by difficulty and ``lit-grpo score`` all go by it. None if no reward says so.
    """
    return next((reward for reward in rewards if reward.correct_threshold is not None), None)


def total_range(rewards: Sequence[Reward]) -> tuple[float, float]:
    """Return the least and greatest weighted sum of the rewards; infinite where a reward does not state its range."""
    ends = [(reward.weight * low, reward.weight * high) for reward in rewards for low, high in (reward.range,)]
    # 0 times infinity is no number: a reward that is only logged adds nothing, whatever its range.
    ends = [(0.0, 0.0) if reward.weight == 0 else end for reward, end in zip(rewards, ends, strict=True)]
    return sum(min(end) for end in ends), sum(max(end) for end in ends)


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
