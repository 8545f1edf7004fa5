"""Sums behind the step metrics: added over micro-batches and ranks, divided once. docs/metrics.md has the keys."""

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
    """Sums, maxima and moments of one rollout, reduced over ranks in two collectives.

    Values stay on the device that is still computing them: only :meth:`compute` waits.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}
        self.maxima: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}
        """Number, sum and sum of squares of the values under a key, [3]: their standard deviation is no mean."""

    def add(self, key: str, total: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add ``total`` and ``count`` to the sum under ``key``, whose mean is the one divided by the other."""
        # Detached: a metric must not keep the graph of its micro-batch.
        total, count = torch.as_tensor(total).detach().double(), torch.as_tensor(count).detach().double()
        old = self.sums.get(key)
        self.sums[key] = Sum(total, count) if old is None else Sum(old.total + total, old.weight + count)

    def deviation(self, key: str, values: Tensor) -> None:
        """Add ``values`` to those whose standard deviation, with the divisor N, is logged under ``key``."""
        values = values.detach().double()
        moments = torch.stack([values.new_tensor(float(values.numel())), values.sum(), values.square().sum()])
        self.moments[key] = self.moments[key] + moments if key in self.moments else moments

    def maximum(self, key: str, value: Tensor | float) -> None:
        """Keep the largest value seen under ``key``; NaN wins."""
        value = torch.as_tensor(value).detach().double()
        self.maxima[key] = torch.maximum(self.maxima[key], value) if key in self.maxima else value

    def update(self, sums: dict[str, Sum], maxima: dict[str, Tensor] | None = None) -> None:
        """Add the sums and maxima of a :class:`lit_grpo.types.LossOutput`."""
        for key, (total, count) in sums.items():
            self.add(key, total, count)
        for key, value in (maxima or {}).items():
            self.maximum(key, value)

    def snapshot(self) -> tuple[dict[str, Sum], dict[str, Tensor], dict[str, Tensor]]:
        """Return what is known so far, for :meth:`restore`."""
        # What lies under a key is replaced and never changed, so that no tensor has to be copied.
        return dict(self.sums), dict(self.maxima), dict(self.moments)

    def restore(self, snapshot: tuple[dict[str, Sum], dict[str, Tensor], dict[str, Tensor]]) -> None:
        """Forget what came after a :meth:`snapshot`."""
        self.sums, self.maxima, self.moments = (dict(part) for part in snapshot)  # type: ignore[assignment]

    def agree(self, world_size: int) -> None:
        """Give every rank the keys of all ranks."""
        # A rank that had nothing to do in a step does not know the keys of its losses.
        keys: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(keys, (sorted(self.sums), sorted(self.maxima), sorted(self.moments)))
        for sums, maxima, moments in keys:
            for key in sums:
                self.add(key, 0.0, 0.0)
            for key in maxima:
                self.maximum(key, float("-inf"))
            for key in moments:
                self.deviation(key, torch.zeros(0))

    def compute(self, reduce_sum: Reduce | None = None, reduce_max: Reduce | None = None) -> dict[str, float]:
        """Return means, maxima and standard deviations of the whole step. What is over nothing is left out.

        With more than one rank every rank must hold the same keys, see :meth:`agree`.
        """
        # Sorted: ranks add numbers by their place, and each may have met its keys in another order.
        mean_keys, max_keys, deviation_keys = sorted(self.sums), sorted(self.maxima), sorted(self.moments)
        added = [x for key in mean_keys for x in self.sums[key]]
        added += [x for key in deviation_keys for x in self.moments[key]]
        values = _on_cpu(added + [self.maxima[key] for key in max_keys])
        sums, maxima = values[: len(added)], values[len(added) :]
        if reduce_sum is not None and added:
            sums = reduce_sum(sums)
        if reduce_max is not None and max_keys:
            maxima = reduce_max(maxima)
        means, moments = sums[: 2 * len(mean_keys)].view(-1, 2), sums[2 * len(mean_keys) :].view(-1, 3)
        out = {key: float(total / weight) for key, (total, weight) in zip(mean_keys, means, strict=True) if weight > 0}
        out |= {key: _deviation(*row) for key, row in zip(deviation_keys, moments.tolist(), strict=True) if row[0]}
        # -inf is the maximum over nothing, on this rank or on all.
        known = {key: float(value) for key, value in zip(max_keys, maxima, strict=True)}
        return out | {key: value for key, value in known.items() if value != float("-inf")}


def _deviation(number: float, total: float, squares: float) -> float:
    mean = total / number
    variance = squares / number - mean**2
    # The two terms are rounded: equal values may leave a trace of their own size, which is no deviation.
    return variance**0.5 if not variance <= 1e-14 * mean**2 else 0.0


def _on_cpu(scalars: list[Tensor]) -> Tensor:
    """Return scalars from any devices as one CPU tensor, [n], with one transfer for each device."""
    out = torch.zeros(len(scalars), dtype=torch.float64)
    for device in {x.device for x in scalars}:
        indices = [i for i, x in enumerate(scalars) if x.device == device]
        out[indices] = torch.stack([scalars[i] for i in indices]).cpu()
    return out


def add_rollout_metrics(metrics: StepMetrics, rollout: Rollout, ranks: int = 1) -> None:
    """Add the metrics of a rollout that need nothing of the learner: lengths, rewards and groups.

    Args:
        metrics: added to.
        rollout: this rank's part of the rollout.
        ranks: number of processes.
    """
    reward = rollout.reward.double()
    lengths = torch.tensor([len(c.token_ids) for c in rollout.completions], dtype=torch.float64)
    count = len(reward)
    metrics.add("completions/length", lengths.sum(), count)
    # A sum over ranks is divided by their number, each having a weight of 1.
    tokens = lengths.sum() if rollout.sampled_tokens is None else rollout.sampled_tokens
    metrics.add("completions/tokens", tokens * ranks)
    for key, (total, number) in rollout.sums.items():
        metrics.add(key, total, number)
    metrics.maximum("completions/length_max", lengths.max() if count else 0.0)
    metrics.add("completions/truncated_frac", sum(c.truncated for c in rollout.completions), count)
    metrics.add("completions/empty_frac", (lengths == 0).sum(), count)
    # Demonstrations, the solutions of the data, are scored by no reward.
    if not rollout.rewards:
        return
    # What no reward scored has no part in what is said of rewards, and what none judged in what is said of verdicts.
    scored = torch.ones(count, dtype=torch.bool) if rollout.scored is None else rollout.scored
    judged = scored if rollout.judged is None else scored & rollout.judged
    metrics.add("reward", reward[scored].sum(), scored.sum())
    metrics.deviation("reward/std", reward[scored])
    for name, values in rollout.rewards.items():
        given = values.double()[scored & ~values.isnan()]
        metrics.add(f"reward/{name}", given.sum(), len(given))
    if rollout.no_answer is not None:
        metrics.add("completions/no_answer_frac", (rollout.no_answer & judged).sum(), judged.sum())
    known = scored.view(-1, rollout.group_size)
    groups = reward.view(-1, rollout.group_size)
    # Groups of which nothing is scored say nothing; equal are the values whose least is their greatest.
    least = groups.where(known, torch.inf).amin(1)
    flat = least == groups.where(known, -torch.inf).amax(1)
    metrics.add("groups/zero_std_frac", (flat & known.any(1)).sum(), known.any(1).sum())
    if rollout.correct is not None:
        right, wrong = rollout.correct & judged, ~rollout.correct & judged
        # Empty completions count with their 0 tokens, as in completions/length, which so lies between the two.
        metrics.add("completions/correct_length", lengths[right].sum(), right.sum())
        metrics.add("completions/incorrect_length", lengths[wrong].sum(), wrong.sum())
        size, some = rollout.group_size, judged.view(-1, rollout.group_size).any(1)
        metrics.add("groups/all_correct_frac", (some & ~wrong.view(-1, size).any(1)).sum(), some.sum())
        metrics.add("groups/all_wrong_frac", (some & ~right.view(-1, size).any(1)).sum(), some.sum())
    _add_sources(metrics, rollout)


def _add_sources(metrics: StepMetrics, rollout: Rollout) -> None:
    # Also of a source that this rank has no prompt of: all ranks must hold the same keys.
    scored = (~rollout.reward.isnan()).view(-1, rollout.group_size).sum(1)
    reward = rollout.reward.double().nan_to_num(0.0).view(-1, rollout.group_size).sum(1)
    for source in rollout.sources:
        mine = torch.tensor([prompt.source == source for prompt in rollout.prompts])
        metrics.add(f"source/{source}/reward", reward[mine].sum(), scored[mine].sum())
        metrics.add(f"source/{source}/prompts_frac", mine.sum(), len(mine))
