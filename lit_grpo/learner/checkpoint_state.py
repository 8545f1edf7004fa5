"""State of a run that a checkpoint holds besides weights and optimizers: counters, histories, random state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from lit_grpo.distributed.optimizer_state import to_plain, to_quantized
from lit_grpo.utils import random as rng

KEY = "lit_grpo"
"""Key of the learner's state in a Lightning checkpoint."""


@dataclass(frozen=True)
class LearnerState:
    """The learner's state as it comes out of a checkpoint."""

    counters: Mapping[str, int]
    objective: dict[str, Any]
    best_held_out: dict[str, dict[int, float]]
    """Reward of each held-out prompt in the best evaluation so far, by set."""
    random: dict[str, Any] | None
    """Random state of this rank. None where the saved run had fewer ranks: the rank keeps what it was seeded with."""


def save_state(
    checkpoint: dict[str, Any],
    *,
    counters: Mapping[str, int],
    objective: Any,
    best_held_out: Mapping[str, Mapping[int, float]],
    world_size: int,
    sharded: bool,
) -> None:
    """Put the state into a checkpoint that Lightning has begun. All ranks must call it.

    Args:
        checkpoint: checkpoint of Lightning that the state is added to.
        counters: how far the run is, by name.
        objective: histories of the objective, in plain types.
        best_held_out: reward of each held-out prompt in the best evaluation so far, by set.
        world_size: number of ranks.
        sharded: whether optimizer states are written as shards, in a format of their own.
    """
    # One rank writes the file for all, and each must go on with its own random numbers when the run is resumed.
    random_states: list[Any] = [rng.get_state()]
    if world_size > 1:
        random_states = [None] * world_size
        torch.distributed.all_gather_object(random_states, rng.get_state())
    checkpoint[KEY] = {**counters, "objective": objective, "best_held_out": _plain(best_held_out), "rng": random_states}
    if not sharded and "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [to_plain(state) for state in checkpoint["optimizer_states"]]


def load_state(checkpoint: dict[str, Any], *, fitting: bool) -> LearnerState:
    """Return the state of a checkpoint, whose optimizer states are prepared for Lightning to load.

    Args:
        checkpoint: checkpoint as it was read; moments in its ``optimizer_states`` that were quantized are so again.
        fitting: whether a fit begins, so that Lightning will load the optimizers.
    """
    if "optimizer_states" in checkpoint and fitting:
        checkpoint["optimizer_states"] = [to_quantized(state) for state in checkpoint["optimizer_states"]]
    state = checkpoint[KEY]
    counters = {name: value for name, value in state.items() if name not in ("objective", "best_held_out", "rng")}
    # A checkpoint from before each rank had its own random state holds a single one.
    random_states = state["rng"] if isinstance(state["rng"], list) else [state["rng"]]
    # Not Trainer.global_rank: a checkpoint is also loaded without a Trainer.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    random = random_states[rank] if rank < len(random_states) else None
    return LearnerState(counters, state["objective"], _plain(state.get("best_held_out", {})), random)


def _plain(rewards: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    return {name: dict(of_set) for name, of_set in rewards.items()}
