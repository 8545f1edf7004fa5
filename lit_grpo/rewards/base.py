"""What a reward is: it looks at a batch of completions and gives each a number."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lit_grpo.types import RewardInput, Score


class Reward:
    """Base class of all rewards. A subclass gives ``score``; everything else has a default.

    Args:
        weight: factor in the total reward of a completion.
        name: key under which the reward is logged (``reward/<name>``); the class name in snake case if left out.
    """

    needs_answer: bool = False
    """True if every prompt must have a gold answer; checked when the data is loaded."""

    finds_answer: bool = False
    """True if its scores tell, by ``no_answer``, which completions hold no parsable answer."""

    needs_tokens: bool = False
    """True if it counts the completion's tokens; its text is not enough then."""

    correct_at: float | None = 1.0
    """A completion with at least this value is correct (full marks by default); None if the reward does not say
    whether an answer is right (format, length, penalties)."""

    made_of: Sequence[Reward] = ()
    """Rewards that it is made of."""

    range: tuple[float, float] = (-math.inf, math.inf)
    """Least and greatest value it can give, before its weight."""

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight = weight
        self.name = name or _snake_case(type(self).__name__)

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Score | float]:
        """One score for each input, in order. May be called from several threads at once."""
        raise NotImplementedError(f"{type(self).__name__} must implement score()")

    def for_source(self, source: str) -> Reward:
        """The reward that judges completions of a source's prompts: itself, unless it has another for each.

        Raises:
            UserError: none does.
        """
        return self

    def correct(self, value: float) -> bool:
        """Whether a value of this reward says that the answer is right; False for one that does not judge that."""
        # Sums of shares such as 3 x 1/3 may miss full marks by a rounding error.
        return self.correct_at is not None and value >= self.correct_at - 1e-9

    def start(self) -> None:
        """Get ready beside whatever else starts (worker processes). Returns at once; may be left out."""

    def final_answers(self, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
        """The final answer of each completion in a normal form, equal where answers are; None where there is none.

        What maj@k counts votes by. None altogether, the default: the reward looks for no final answer.
        """
        return None

    def close(self) -> None:
        """Free what the reward holds (worker processes, connections). Safe to call twice."""


def judging_reward(rewards: Sequence[Reward]) -> Reward | None:
    """The reward that says whether an answer is right: the first in the list with ``correct_at``; None if none does.

    pass@k, maj@k, filters by difficulty and ``lit-grpo score`` all go by it.
    """
    return next((reward for reward in rewards if reward.correct_at is not None), None)


def total_range(rewards: Sequence[Reward]) -> tuple[float, float]:
    """Least and greatest total reward of a completion: weighted, and infinite where a reward does not say."""
    ends = [(reward.weight * low, reward.weight * high) for reward in rewards for low, high in (reward.range,)]
    ends = [(0.0, 0.0) if reward.weight == 0 else end for reward, end in zip(rewards, ends, strict=True)]
    return sum(min(end) for end in ends), sum(max(end) for end in ends)


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
