"""From a rollout to the tensors that an objective looks at, and how its completions are cut into passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_grpo.policy.forward.batching import Layout, PolicyInput, cut
from lit_grpo.types import Experience, Rollout


def make_experience(batch: Rollout, device: torch.device | str) -> Experience:
    """The tensors of a rollout that the objective looks at. Masks come from lengths, never from ids."""
    lengths = [len(c.token_ids) for c in batch.completions]
    count, width = len(lengths), max(lengths, default=0)
    ids = torch.tensor([[*c.token_ids, *([0] * (width - len(c.token_ids)))] for c in batch.completions])
    unknown = [float("nan")] * width
    sampled = torch.tensor([[*c.logprobs, *unknown[len(c.logprobs) :]] for c in batch.completions])
    return Experience(
        lengths=torch.tensor(lengths),
        group_ids=torch.arange(count) // batch.group_size,
        rewards=batch.reward.float(),
        truncated=torch.tensor([c.truncated for c in batch.completions]),
        width=width,
        token_ids=ids.view(count, width).long(),
        sampler_logprobs=sampled.view(count, width).float(),
        invalid=batch.no_answer,
        prompt_ids=[batch.prompts[i // batch.group_size].id for i in range(count)],
    ).to(device)


def minibatches(
    batch: Rollout, prompts: int | None, steps: int, seed: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[Tensor]:
    """Completions of each optimizer step: whole groups, each group equally often, in a seeded order.

    The order is that of all ranks' groups, so that a step is the same however they are spread; a rank may have none of
    a step's groups.

    Args:
        batch: this rank's part of the rollout.
        prompts: groups in each step, over all ranks; None: all.
        steps: optimizer steps.
        seed: of the order.
        rank: of this process.
        world_size: number of processes.
    """
    own = len(batch.prompts)
    groups, first = own * world_size, own * rank
    size = min(prompts or groups, groups)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = torch.arange(groups) if size == groups else torch.randperm(groups, generator=generator)
        for start in range(0, groups, size):
            chosen = order[start : start + size].sort().values
            chosen = chosen[(chosen >= first) & (chosen < first + own)] - first
            yield (chosen[:, None] * batch.group_size + torch.arange(batch.group_size)).flatten()
            done += 1


def micro_batches(
    batch: Rollout, rows: Tensor, layout: Layout, *, tokens: int | None, size: int | None = None
) -> Iterator[Tensor]:
    """Completions cut into micro-batches, the largest first. Any order and cut gives the same sum.

    Args:
        batch: the rollout.
        rows: which completions.
        layout: of a micro-batch.
        tokens: that go through the model at once; None: no bound. See :func:`lit_grpo.policy.forward.batching.cut`.
        size: completions at once; None: no bound.
    """
    chosen = sorted(rows.tolist())
    prompts = [batch.prompts[i // batch.group_size].token_ids for i in chosen]
    completions = [batch.completions[i].token_ids for i in chosen]
    for part in cut(layout, prompts, completions, tokens=tokens, size=size):
        yield torch.tensor([chosen[k] for k in part])


def probe(batch: Rollout, rows: Tensor, count: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """A few of some completions that stand for all of them, and how many each of them stands for.

    Systematic sampling with probability proportional to length (Madow, 1949): sums over the sample, weighted, estimate
    the sums over all without bias, and that of the tokens exactly, so that a mean over tokens has no bias either.

    Args:
        batch: the rollout.
        rows: the completions to choose from; empty ones are left out.
        count: chosen at most; None: all.
        seed: of the choice.

    Returns:
        the chosen rows and their weights, float64.
    """
    rows = torch.tensor([i for i in rows.tolist() if batch.completions[i].token_ids], dtype=torch.long)
    if count is None or count >= len(rows):
        return rows, torch.ones(len(rows), dtype=torch.float64)
    if not count:
        return rows[:0], torch.zeros(0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    lengths = torch.tensor([len(batch.completions[i].token_ids) for i in rows.tolist()], dtype=torch.float64)
    ends = lengths.cumsum(0)
    places = (torch.rand(1, generator=generator, dtype=torch.float64) + torch.arange(count)) * ends[-1] / count
    drawn = torch.searchsorted(ends, places, right=True).clamp(max=len(rows) - 1).bincount(minlength=len(rows))
    chosen = drawn.nonzero()[:, 0]
    return rows[chosen], drawn[chosen] * ends[-1] / (count * lengths[chosen])


def policy_input(batch: Rollout, rows: Tensor, layout: Layout, *, device: torch.device | str) -> PolicyInput:
    """What goes through the models for some completions of a rollout; results are as wide as its longest one."""
    chosen = rows.tolist()
    return layout.build(
        [batch.prompts[i // batch.group_size].token_ids for i in chosen],
        [batch.completions[i].token_ids for i in chosen],
        width=max(len(c.token_ids) for c in batch.completions),
        device=device,
    )


def gather_rows(parts: list[tuple[Tensor, Tensor]], count: int, missing: float = 0.0) -> Tensor:
    """[count, ...] in the rollout's order from micro-batches of (rows, values); ``missing`` where there is no value."""
    first = parts[0][1]
    out = first.new_full((count, *first.shape[1:]), missing)
    for rows, values in parts:
        out[rows.to(out.device)] = values
    return out


def positions(rows: Tensor, chosen: Tensor) -> Tensor:
    """Where each of ``chosen`` stands in ``rows``."""
    order = rows.argsort()
    return order[torch.searchsorted(rows[order], chosen)]
