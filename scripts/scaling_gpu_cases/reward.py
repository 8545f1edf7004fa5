"""The reward of all points: it costs nothing, spreads every group, and random weights can learn it."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.rewards import Reward
from lit_grpo.types import RewardInput


class EvenShare(Reward):
    """Share of a completion's ids that are even: about a half of what random weights write."""

    range = (0.0, 1.0)
    correct_threshold = None
    needs_tokens = True

    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        """Return one share for each completion; 0 for an empty one."""
        found = [item.completion.token_ids for item in batch]
        return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in found]
