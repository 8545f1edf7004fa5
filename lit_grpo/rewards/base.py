"""What a reward is: it looks at a batch of completions and gives each a number."""

from __future__ import annotations

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

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight = weight
        self.name = name or _snake_case(type(self).__name__)

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Score | float]:
        """One score for each input, in order. May be called from several threads at once."""
        raise NotImplementedError(f"{type(self).__name__} must implement score()")

    def close(self) -> None:
        """Free what the reward holds (worker processes, connections). Safe to call twice."""


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
