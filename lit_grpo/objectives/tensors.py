"""Small helpers shared by the parts: masks that never read junk, sums over ranks, statistics of whole groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over ranks. Every rank calls it equally often, in the same order."""

LOG_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20] before exp; outside, their gradient is zero."""


def over_ranks(value: Tensor, reduce: Reduce | None) -> Tensor:
    """Sum ``value`` over ranks; without ``reduce`` there is one process."""
    return value if reduce is None else reduce(value)


def masked(value: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Keep ``value`` where ``mask``, put ``fill`` elsewhere."""
    # where, and no product with the mask: 0 * NaN is NaN, forward and backward, and padding may hold NaN.
    return torch.where(mask, value, fill)


def exp_clamped(log_value: Tensor) -> Tensor:
    """Take exp of a log-ratio clamped to [-20, 20]."""
    return log_value.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def token_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of each completion, [N, T] -> [N]; 0 for an empty completion."""
    return masked(value, mask).sum(1) / mask.sum(1).clamp_min(1)


@dataclass(frozen=True)
class Groups:
    """The groups of a batch: each holds all completions of one prompt, never split over steps or ranks."""

    index: Tensor
    """Number of the group of each completion, counted from 0, [N] int64."""
    size: Tensor
    """Number of completions in each group, [G] int64."""

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """Number the groups of ``group_ids`` [N]; the ids themselves may be anything."""
        _, index, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index, size)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the completions of each group: [N] -> [G]."""
        return value.new_zeros(len(self.size)).index_add_(0, self.index, value)

    def mean(self, value: Tensor) -> Tensor:
        """Average over the completions of each group: [N] -> [G]."""
        return self.sum(value) / self.size

    def variance(self, value: Tensor, ddof: int = 1) -> Tensor:
        """Compute the variance within each group, [N] -> [G]; divisor size - ddof, or 0 where that is not positive."""
        centred = value - self.spread(self.mean(value))
        return self.sum(centred * centred) / (self.size - ddof).clamp_min(1) * (self.size > ddof)

    def spread(self, per_group: Tensor) -> Tensor:
        """Give each completion the value of its group: [G] -> [N]."""
        return per_group[self.index]

    def any(self, flag: Tensor) -> Tensor:
        """Tell of each group whether the flag of any of its completions is set: [N] bool -> [G] bool."""
        return self.sum(flag.to(torch.int64)) > 0

    def uniform(self, value: Tensor) -> Tensor:
        """Tell of each group whether all its values are equal, [N] -> [G] bool; a group of one is uniform."""
        # By minimum and maximum, which are exact; the variance of equal values may be rounded to just above 0.
        first = value.new_full((len(self.size),), float("inf"))
        low = first.scatter_reduce(0, self.index, value, "amin")
        high = (-first).scatter_reduce(0, self.index, value, "amax")
        return low == high
