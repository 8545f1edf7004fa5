"""Rollouts that were sampled before their turn, as a checkpoint holds them: plain types and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from lit_grpo.rollout.dynamic_sampling import Tried
from lit_grpo.types import Completion, Prompt, Rollout
from lit_grpo.utils.tensors import tensor_of

_APART = ("prompts", "completions", "evaluation")
"""Fields of a rollout that are kept in a form of their own, or not at all."""


class ProducedRollout(NamedTuple):
    """A rollout, and what became of the prompts that were looked at to make it."""

    rollout: Rollout
    prompts: int
    """Number of positions of the order that it used up, over all ranks, those passed over included."""
    skipped: list[str]
    """Ids of the prompts that dynamic sampling left out."""
    outcomes: list[tuple[int, str, float]]
    """Position, id and pass rate of every prompt sampled, over all ranks; empty without a curriculum."""
    tried: Tried = (0, 0)
    """Mixed groups of dynamic sampling and the prompts that gave them, over all ranks."""


def pack(made: ProducedRollout, index_of: Mapping[int, int]) -> dict[str, Any]:
    """Return a rollout in plain types and tensors.

    Args:
        made: the rollout; its prompts are those of the loader.
        index_of: position of each of the loader's prompts among them, by ``id()`` of the object.
    """
    rollout = made.rollout
    completions = rollout.completions
    return {
        "fields": {f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name not in _APART},
        "prompts": [index_of[id(prompt)] for prompt in rollout.prompts],
        # As tensors: a checkpoint is read by an unpickler in Python, slow where there are millions of numbers.
        "lengths": torch.tensor([len(completion.token_ids) for completion in completions]),
        "token_ids": tensor_of((i for c in completions for i in c.token_ids), torch.int64),
        "logprobs": tensor_of((value for c in completions for value in c.logprobs), torch.float64),
        "places": [(c.request, c.sample, c.finish_reason, c.policy_version) for c in completions],
        "experts": [completion.experts for completion in completions],
        "used": made.prompts,
        "skipped": list(made.skipped),
        "outcomes": [tuple(outcome) for outcome in made.outcomes],
        "tried": list(made.tried),
    }


def unpack(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> ProducedRollout:
    """Return the rollout that :func:`pack` was given.

    Args:
        state: what it returned.
        prompts: all prompts of the loader, the same as then.
    """
    bounds = list(pairwise(accumulate(state["lengths"].tolist(), initial=0)))
    ids, logprobs = state["token_ids"].tolist(), state["logprobs"].tolist()
    completions = [
        Completion(request, sample, tuple(ids[a:b]), tuple(logprobs[a:b]), reason, version, experts)
        for (a, b), (request, sample, reason, version), experts in zip(
            bounds, state["places"], state["experts"], strict=True
        )
    ]
    rollout = Rollout(
        prompts=[prompts[index] for index in state["prompts"]], completions=completions, **state["fields"]
    )
    mixed, prompts_tried = state.get("tried", (0, 0))
    outcomes = [tuple(one) for one in state["outcomes"]]
    return ProducedRollout(rollout, state["used"], list(state["skipped"]), outcomes, (mixed, prompts_tried))
