"""What of a run a checkpoint holds besides weights and optimizers: counters, histories, random numbers of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.distributed.optimizer_state import to_plain, to_quantized
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.utils import random as rng

if TYPE_CHECKING:
    from lit_grpo.module import LitGRPO

KEY = "lit_grpo"
"""Of a checkpoint."""
_COUNTERS = ("policy_version", "optimizer_steps", "critic_steps", "skipped_steps", "empty_steps", "skipped_in_a_row")


def save(module: LitGRPO, checkpoint: dict[str, Any]) -> None:
    """Put everything into a checkpoint that Lightning has begun. All ranks must call it."""
    checkpoint[KEY] = get_state(module)
    if not module.sharded and "optimizer_states" in checkpoint:  # shards are written by a format of their own
        checkpoint["optimizer_states"] = [to_plain(state) for state in checkpoint["optimizer_states"]]


def load(module: LitGRPO, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Take everything back, before the optimizers are loaded; what is returned see :func:`set_state`."""
    trainer = module._trainer  # the property raises where there is none
    if "optimizer_states" in checkpoint and trainer is not None and trainer.state.fn == "fit":  # else nobody reads them
        checkpoint["optimizer_states"] = [to_quantized(state) for state in checkpoint["optimizer_states"]]
    return set_state(module, checkpoint[KEY])


def get_state(module: LitGRPO) -> dict[str, Any]:
    """In plain types. All ranks must call it: one file is written, and it holds the random state of every rank."""
    states: list[Any] = [rng.get_state()]
    if module.trainer.world_size > 1:
        states = [None] * module.trainer.world_size
        torch.distributed.all_gather_object(states, rng.get_state())
    counters = {name: getattr(module, name) for name in _COUNTERS}
    return counters | {"objective": module.objective_state.to_dict(), "rng": states}


def set_state(module: LitGRPO, state: dict[str, Any]) -> dict[str, Any] | None:
    """Take everything back but the random state, which is returned: it must be set later.

    Returns:
        The random state of this rank; None where the run had fewer ranks then: the rank keeps what it was seeded with.
    """
    for name in _COUNTERS:
        setattr(module, name, state.get(name, 0))
    module.objective_state = ObjectiveState.from_dict(state["objective"])
    saved: Any = state["rng"]
    states = saved if isinstance(saved, list) else [saved]  # one state: written before each rank had its own
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0  # a checkpoint is also loaded without a Trainer
    return states[rank] if rank < len(states) else None
