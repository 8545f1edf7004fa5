"""From a rollout to the tensors that an objective looks at, and how its completions are cut into passes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_grpo.policy.batching import PolicyInput, pad_rows, share_prompts
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


def minibatches(batch: Rollout, prompts: int | None, steps: int, seed: int) -> Iterator[Tensor]:
    """Completions of each optimizer step: whole groups, each group equally often, in a seeded order.

    Args:
        batch: the rollout.
        prompts: groups in each step; None: all.
        steps: optimizer steps.
        seed: of the order.
    """
    groups = len(batch.prompts)
    size = min(prompts or groups, groups)
    generator = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        order = torch.arange(groups) if size == groups else torch.randperm(groups, generator=generator)
        for start in range(0, groups, size):
            chosen = order[start : start + size].sort().values
            yield (chosen[:, None] * batch.group_size + torch.arange(batch.group_size)).flatten()
            done += 1


def micro_batches(batch: Rollout, rows: Tensor, size: int, *, share: bool) -> Iterator[Tensor]:
    """Completions in an order that saves tokens, cut into micro-batches. Any order and cut gives the same sum.

    Args:
        batch: the rollout.
        rows: which completions.
        size: completions in a micro-batch.
        share: whether completions of one prompt will share its tokens.
    """
    if not len(rows):
        return

    def place(i: int) -> tuple[int, int]:
        group = i // batch.group_size
        prompt = len(batch.prompts[group].token_ids)
        if share:  # the samples of a prompt stay together
            return prompt, group
        return prompt + len(batch.completions[i].token_ids), i

    yield from torch.tensor(sorted(rows.tolist(), key=place)).split(size)


def policy_input(batch: Rollout, rows: Tensor, *, share: bool, device: torch.device | str) -> PolicyInput:
    """What goes through the models for some completions of a rollout; results are as wide as its longest one."""
    chosen = rows.tolist()
    build = share_prompts if share else pad_rows
    return build(
        [batch.prompts[i // batch.group_size].token_ids for i in chosen],
        [batch.completions[i].token_ids for i in chosen],
        width=max(len(c.token_ids) for c in batch.completions),
        device=device,
    )


def gather_rows(parts: list[tuple[Tensor, Tensor]], count: int) -> Tensor:
    """[count, ...] in the rollout's order from micro-batches of (rows, values)."""
    first = parts[0][1]
    out = first.new_zeros(count, *first.shape[1:])
    for rows, values in parts:
        out[rows.to(out.device)] = values
    return out


def positions(rows: Tensor, chosen: Tensor) -> Tensor:
    """Where each of ``chosen`` stands in ``rows``."""
    order = rows.argsort()
    return order[torch.searchsorted(rows[order], chosen)]
