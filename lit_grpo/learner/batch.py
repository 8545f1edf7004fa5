"""A rollout as tensors, as model inputs, and cut into minibatches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_grpo.policy.forward.batching import Layout, PolicyInput, cut
from lit_grpo.types import Experience, Rollout
from lit_grpo.utils.random import derive_seed
from lit_grpo.utils.tensors import padded_rows


def make_experience(batch: Rollout, device: torch.device | str) -> Experience:
    """Make the tensors of a rollout that the objective looks at; rewards are NaN where nothing scored a completion.

    Of such a rollout the objective is given the other rows alone (:func:`scored_rows`).
    """
    # Masks come from lengths, never from ids: the padding id may be one that the policy generates.
    lengths = [len(c.token_ids) for c in batch.completions]
    count, width = len(lengths), max(lengths, default=0)
    ids = padded_rows([c.token_ids for c in batch.completions], width, 0, torch.int64)
    # NaN where the engine gave no log-probability: a number would be taken for one.
    sampled = padded_rows([c.logprobs for c in batch.completions], width, float("nan"), torch.float64)
    return Experience(
        lengths=torch.tensor(lengths),
        group_ids=torch.arange(count) // batch.group_size,
        rewards=batch.reward.float(),
        correct=batch.correct,
        flipped_rewards=None if batch.flipped_reward is None else batch.flipped_reward.float(),
        sample_keys=torch.tensor(_sample_keys(batch), dtype=torch.long),
        truncated=torch.tensor([c.truncated for c in batch.completions]),
        width=width,
        token_ids=ids,
        sampler_logprobs=sampled.float(),
        invalid=batch.no_answer,
        prompt_ids=[batch.prompts[i // batch.group_size].id for i in range(count)],
    ).to(device)


def scored_rows(batch: Rollout) -> Tensor | None:
    """Return the completions that have a reward, as indices [n]; None where all have."""
    return None if batch.scored is None else batch.scored.nonzero()[:, 0]


def _sample_keys(batch: Rollout) -> list[int]:
    """Return a number for each completion that is the same however the rollout is spread over ranks."""
    positions = batch.positions or range(len(batch.prompts))
    return [derive_seed("sample", position, place) for position in positions for place in range(batch.group_size)]


def minibatches(
    batch: Rollout, prompts: int | None, steps: int, seed: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[Tensor]:
    """Yield the completions of each optimizer step: whole groups, each group equally often, in a seeded order.

    A rank may have none of a step's groups. Completions that no reward scored are in no step, so that each is what it
    would be had they not been sampled: denominators count the scored ones.

    Args:
        batch: this rank's part of the rollout.
        prompts: groups in each step, over all ranks; None: all.
        steps: number of optimizer steps, rounded up to whole rounds over the groups.
        seed: seed of the order.
        rank: rank of this process.
        world_size: number of processes.
    """
    own, scored = len(batch.prompts), batch.scored
    groups, first = own * world_size, own * rank
    size = min(prompts or groups, groups)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        # The order is that of the groups of all ranks, so that a step is the same however they are spread.
        order = torch.arange(groups) if size == groups else torch.randperm(groups, generator=generator)
        for start in range(0, groups, size):
            chosen = order[start : start + size].sort().values
            chosen = chosen[(chosen >= first) & (chosen < first + own)] - first
            rows = (chosen[:, None] * batch.group_size + torch.arange(batch.group_size)).flatten()
            yield rows if scored is None else rows[scored[rows]]
            done += 1


def micro_batches(
    batch: Rollout, rows: Tensor, layout: Layout, *, tokens: int | None, size: int | None = None
) -> Iterator[Tensor]:
    """Cut completions into micro-batches, the largest first. Any order and cut gives the same sum.

    Args:
        batch: the rollout.
        rows: completions to cut.
        layout: layout of a micro-batch.
        tokens: bound on the tokens that go through the model at once, see
            :func:`lit_grpo.policy.forward.batching.cut`; None: no bound.
        size: bound on the completions at once; None: no bound.
    """
    chosen = sorted(rows.tolist())
    prompts = [batch.prompts[i // batch.group_size].token_ids for i in chosen]
    completions = [batch.completions[i].token_ids for i in chosen]
    for indices in cut(layout, prompts, completions, tokens=tokens, size=size):
        yield torch.tensor([chosen[k] for k in indices])


def probe(
    batch: Rollout,
    rows: Tensor,
    count: int | None,
    seed: int,
    multiplicity: Tensor | None = None,
    *,
    per_group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose a few completions that stand for all of some, and count how many each of them stands for.

    Systematic sampling with probability proportional to length (Madow, 1949): sums over the sample, weighted, estimate
    the sums over all without bias, and that of the tokens exactly, so that a mean over tokens has no bias either.

    Args:
        batch: the rollout.
        rows: the completions to choose from, [n]; empty ones are left out.
        count: chosen at most; None: all.
        seed: seed of the choice.
        multiplicity: how many completions each of ``rows`` stands for already, [n] float64; None: itself alone.
        per_group: completions that are taken from one group where it can be, 1 or 2. With two the model reads half as
            many prompts, and the estimate has the same expectation and a larger variance.

    Returns:
        The chosen rows and their weights, float64.
    """
    given = torch.ones(len(rows), dtype=torch.float64) if multiplicity is None else multiplicity
    lengths = torch.tensor([len(batch.completions[i].token_ids) for i in rows.tolist()], dtype=torch.float64)
    rows, given, lengths = rows[lengths > 0], given[lengths > 0], lengths[lengths > 0]
    if count is None or count >= len(rows):
        return rows, given
    if not count:
        return rows[:0], given[:0]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    if per_group > 1:
        # Groups in random order, and the completions of a group beside one another in random order.
        rank_of_group = torch.randperm(len(batch.prompts), generator=generator)
        order = order[rank_of_group[rows[order] // batch.group_size].argsort(stable=True)]
    rows, given, lengths = rows[order], given[order], lengths[order]
    ends = (given * lengths).cumsum(0)
    # Points at equal distances from one random start: long completions may be hit more than once, and a weight counts
    # the hits. Rounding may put the last point on the very end, hence the clamp.
    draws = -(-count // per_group)
    points = (torch.rand(1, generator=generator, dtype=torch.float64) + torch.arange(draws)) * ends[-1] / draws
    if per_group > 1:
        points = torch.cat([points, _opposite(points, ends, rows // batch.group_size)])
        count = len(points)
    drawn = torch.searchsorted(ends, points, right=True).clamp(max=len(rows) - 1).bincount(minlength=len(rows))
    chosen = drawn.nonzero()[:, 0]
    return rows[chosen], drawn[chosen] * ends[-1] / (count * lengths[chosen])


def _opposite(points: Tensor, ends: Tensor, groups: Tensor) -> Tensor:
    """Move each point half of its group's length on, around the group's end.

    A point that is uniform over all of them stays uniform: given its group it is uniform within the group, and a
    rotation keeps that.
    """
    last = torch.ones_like(groups, dtype=torch.bool)
    last[:-1] = groups[1:] != groups[:-1]
    group_ends = ends[last]
    group_starts = torch.cat([group_ends.new_zeros(1), group_ends[:-1]])
    of_point = torch.searchsorted(group_ends, points, right=True).clamp(max=len(group_ends) - 1)
    starts, lengths = group_starts[of_point], (group_ends - group_starts)[of_point]
    return starts + (points - starts + lengths / 2).remainder(lengths)


def policy_input(batch: Rollout, rows: Tensor, layout: Layout, *, device: torch.device | str) -> PolicyInput:
    """Make the model input of some completions of a rollout; results are as wide as the rollout's longest one."""
    chosen = rows.tolist()
    return layout.build(
        [batch.prompts[i // batch.group_size].token_ids for i in chosen],
        [batch.completions[i].token_ids for i in chosen],
        width=max(len(c.token_ids) for c in batch.completions),
        device=device,
    )


def gather_rows(micro_batches: list[tuple[Tensor, Tensor]], count: int, missing: float = 0.0) -> Tensor:
    """Put (rows, values) of micro-batches into the rollout's order, [count, ...]; ``missing`` fills the other rows."""
    first = micro_batches[0][1]
    out = first.new_full((count, *first.shape[1:]), missing)
    for rows, values in micro_batches:
        out[rows.to(out.device)] = values
    return out


def positions(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return the index in ``rows`` of each of ``chosen``, all of which must be there: [m], [n] -> [n]."""
    order = rows.argsort()
    return order[torch.searchsorted(rows[order], chosen)]
