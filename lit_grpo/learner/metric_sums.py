"""Step metrics: added over micro-batches and ranks, divided once. docs/metrics.md says what each key means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from lit_grpo.types import Rollout, Sum

Reduce = Callable[[Tensor], Tensor]
"""Sum (or maximum) of a tensor over ranks."""


class StepMetrics:
    """Gathers :class:`Sum` s and maxima over one rollout and reduces them over ranks in two collectives.

    Figures stay where they come from, on a GPU that is still computing them: only :meth:`compute` waits for them.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, key: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add to the sum under ``key``."""
        total, count = torch.as_tensor(total).detach().double(), torch.as_tensor(count).detach().double()
        old = self.sums.get(key)
        self.sums[key] = Sum(total, count) if old is None else Sum(old.total + total, old.weight + count)

    def maximum(self, key: str, value: Tensor | float) -> None:
        """Keep the largest value seen under ``key``; NaN wins."""
        value = torch.as_tensor(value).detach().double()
        self.maxima[key] = torch.maximum(self.maxima[key], value) if key in self.maxima else value

    def update(self, sums: dict[str, Sum], maxima: dict[str, Tensor] | None = None) -> None:
        """Add everything of a :class:`lit_grpo.types.LossOutput`."""
        for key, (total, count) in sums.items():
            self.add(key, total, count)
        for key, value in (maxima or {}).items():
            self.maximum(key, value)

    def agree(self, world_size: int) -> None:
        """Hold the keys of all ranks: one that had nothing to do in a step does not know those of its losses."""
        keys: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(keys, (sorted(self.sums), sorted(self.maxima)))
        for sums, maxima in keys:
            for key in sums:
                self.add(key, 0.0, 0.0)
            for key in maxima:
                self.maximum(key, float("-inf"))

    def compute(self, reduce_sum: Reduce | None = None, reduce_max: Reduce | None = None) -> dict[str, float]:
        """Means and maxima of the whole step. A mean over nothing is left out.

        With more than one rank every rank must hold the same keys, see :meth:`agree`.
        """
        keys, peaks = sorted(self.sums), sorted(self.maxima)
        figures = _on_cpu([x for k in keys for x in self.sums[k]] + [self.maxima[k] for k in peaks])
        sums, tops = figures[: 2 * len(keys)].view(-1, 2), figures[2 * len(keys) :]
        if reduce_sum is not None and keys:
            sums = reduce_sum(sums)
        if reduce_max is not None and peaks:
            tops = reduce_max(tops)
        out = {k: float(t / c) for k, (t, c) in zip(keys, sums, strict=True) if c > 0}
        return out | {k: float(v) for k, v in zip(peaks, tops, strict=True)}


def _on_cpu(figures: list[Tensor]) -> Tensor:
    """Numbers from any devices, [n]; waits once for each."""
    out = torch.zeros(len(figures), dtype=torch.float64)
    for device in {x.device for x in figures}:
        places = [i for i, x in enumerate(figures) if x.device == device]
        out[places] = torch.stack([figures[i] for i in places]).cpu()
    return out


def add_rollout_metrics(metrics: StepMetrics, rollout: Rollout) -> None:
    """Everything that can be said of a rollout before the learner has seen it."""
    reward = rollout.reward.double()
    lengths = torch.tensor([len(c.token_ids) for c in rollout.completions], dtype=torch.float64)
    count = len(reward)
    metrics.add("length", lengths.sum(), count)
    metrics.maximum("length/max", lengths.max() if count else 0.0)
    metrics.add("truncated", sum(c.truncated for c in rollout.completions), count)
    metrics.add("empty", (lengths == 0).sum(), count)
    if not rollout.rewards:  # solutions of the data: nothing was judged
        return
    metrics.add("reward", reward.sum(), count)
    metrics.add("reward/std", reward.std(correction=0) * count if count else 0.0, count)
    for name, values in rollout.rewards.items():
        metrics.add(f"reward/{name}", values.double().sum(), count)
    correct = reward > 0
    metrics.add("length/correct", lengths[correct].sum(), correct.sum())
    metrics.add("length/incorrect", lengths[~correct].sum(), (~correct).sum())
    if rollout.no_answer is not None:
        metrics.add("no_answer", rollout.no_answer.sum(), count)
    groups = reward.view(-1, rollout.group_size)
    flat = (groups == groups[:, :1]).all(1)
    metrics.add("groups/zero_gradient", flat.sum(), len(groups))
    metrics.add("groups/all_correct", (flat & (groups[:, 0] > 0)).sum(), len(groups))
    metrics.add("groups/all_wrong", (flat & (groups[:, 0] <= 0)).sum(), len(groups))
    _add_sources(metrics, rollout)


def _add_sources(metrics: StepMetrics, rollout: Rollout) -> None:
    """Of every source, also of those that this rank has no prompt of: ranks must hold the same keys."""
    reward = rollout.reward.double().view(-1, rollout.group_size).sum(1)
    for source in rollout.sources:
        mine = torch.tensor([prompt.source == source for prompt in rollout.prompts])
        metrics.add(f"source/{source}/reward", reward[mine].sum(), mine.sum() * rollout.group_size)
        metrics.add(f"source/{source}/share", mine.sum(), len(mine))
