"""State of a run that a checkpoint holds besides weights and optimizers: counters, histories, random state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed

from lit_grpo.distributed.optimizer_state import to_plain, to_quantized
from lit_grpo.errors import UserError
from lit_grpo.learner.optimizer_step import StepCounters
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.utils import random as rng

KEY = "lit_grpo"
"""Key of the learner's state in a Lightning checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LearnerState:
    """What a run remembers besides weights and optimizers, as it goes into a checkpoint and comes out of it."""

    policy_version: int
    """Number of rollouts that the weights have been trained on."""
    counters: StepCounters
    objective: ObjectiveState
    best_held_out: Mapping[str, Mapping[int, float]]
    """Reward of each held-out prompt in the best evaluation so far, by set."""
    logged_keys: Collection[str]
    """Keys that any rollout has logged."""
    budget: Mapping[str, Any] | None
    """Bound on micro-batches that the run had come to, as of ``MicroBatchBudget.state``; None: not known."""


@dataclass(frozen=True)
class LoadedState:
    """The learner's state as a rank reads it from a checkpoint."""

    state: LearnerState
    random: dict[str, Any] | None
    """Random state of this rank. None where the saved run had fewer ranks: the rank keeps what it was seeded with."""


def save_state(checkpoint: dict[str, Any], state: LearnerState, *, world_size: int, sharded: bool) -> None:
    """Put the state into a checkpoint that Lightning has begun. All ranks must call it.

    Args:
        checkpoint: checkpoint of Lightning that the state is added to.
        state: the state of this rank, which is that of all but for their random numbers.
        world_size: number of ranks.
        sharded: whether optimizer states are written as shards, in a format of their own.
    """
    # One rank writes the file for all, and each must go on with its own random numbers when the run is resumed.
    random_states: list[Any] = [rng.get_state()]
    if world_size > 1:
        random_states = [None] * world_size
        torch.distributed.all_gather_object(random_states, rng.get_state())
    checkpoint[KEY] = {
        "policy_version": state.policy_version,
        **asdict(state.counters),
        "objective": state.objective.to_dict(),
        "best_held_out": _plain(state.best_held_out),
        # In order: that of a set changes from process to process.
        "logged_keys": sorted(state.logged_keys),
        "budget": None if state.budget is None else dict(state.budget),
        "rng": random_states,
    }
    if not sharded and "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [to_plain(one) for one in checkpoint["optimizer_states"]]


def load_state(checkpoint: dict[str, Any], *, fitting: bool) -> LoadedState:
    """Return the state of a checkpoint, whose optimizer states are prepared for Lightning to load.

    Args:
        checkpoint: checkpoint as it was read; moments in its ``optimizer_states`` that were quantized are so again.
        fitting: whether a fit begins, so that Lightning will load the optimizers.
    """
    if "optimizer_states" in checkpoint and fitting:
        checkpoint["optimizer_states"] = [to_quantized(one) for one in checkpoint["optimizer_states"]]
    saved = checkpoint[KEY]
    # A checkpoint from before each rank had its own random state holds a single one.
    random_states = saved["rng"] if isinstance(saved["rng"], list) else [saved["rng"]]
    # Not Trainer.global_rank: a checkpoint is also loaded without a Trainer.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    state = LearnerState(
        policy_version=saved.get("policy_version", 0),
        counters=StepCounters(**{field.name: saved.get(field.name, 0) for field in fields(StepCounters)}),
        objective=ObjectiveState.from_dict(saved["objective"]),
        best_held_out=_plain(saved.get("best_held_out", {})),
        logged_keys=frozenset(saved.get("logged_keys", ())),
        budget=saved.get("budget"),
    )
    return LoadedState(state, random_states[rank] if rank < len(random_states) else None)


def check_fits(checkpoint: Mapping[str, Any], own: Mapping[str, Any], optimizer: str, *, fitting: bool) -> None:
    """Refuse a checkpoint of something else before anything of it is loaded.

    Args:
        checkpoint: checkpoint as it was read.
        own: the module's weights by name; a rank of a sharded run reads those of the checkpoint elsewhere.
        optimizer: import path of the policy's optimizer.
        fitting: whether a fit begins, which goes on with optimizers and loops.

    Raises:
        UserError: it lacks a part, or its weights are others in name or shape, or its optimizer is another.
    """
    remedy = (
        "go on with the settings that the run began with, or begin a new one: lit-grpo export, then model.policy.path"
    )
    needed = [KEY, "loops", "callbacks", "lr_schedulers"] if fitting else [KEY]
    # Where models are in shards, weights and optimizers have been read into their places already.
    if fitting and "state_dict" in checkpoint:
        needed.append("optimizer_states")
    if missing := [name for name in needed if name not in checkpoint]:
        raise UserError(
            f"the checkpoint is not one of a lit-grpo run: it has no {missing[0]!r}",
            where="ckpt_path",
            remedy="give one that lit-grpo fit wrote; weights alone are loaded by model.policy.path",
        )
    saved = checkpoint.get("state_dict")
    # A module that is loaded without a Trainer may have no model yet.
    if saved and own:
        different = [
            *sorted(own.keys() ^ saved.keys()),
            *(k for k in own if k in saved and own[k].shape != saved[k].shape),
        ]
        if different:
            raise UserError(f"the checkpoint holds other weights than the model: {_in_words(different, own, saved)}",
                            where="ckpt_path", remedy=remedy)  # fmt: skip
    before = checkpoint.get("hyper_parameters", {}).get("optimizer", {}).get("type", optimizer)
    if fitting and before != optimizer:
        raise UserError(
            f"the checkpoint holds the states of another optimizer: {before}, not {optimizer}",
            where="model.optimizer.type",
            remedy=remedy,
        )


def _in_words(different: Sequence[str], own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    first = different[0]
    if "lora_" in "".join(different):
        kind = (
            "adapters, and the model has none" if any("lora_" in k for k in saved) else "no adapters, and the model has"
        )
        return f"it has {kind} (model.policy.lora)"
    if first.startswith("critic.") or "value_head" in first:
        return f"it has {'a' if first in saved else 'no'} critic (model.critic)"
    if first in own and first in saved:
        return f"{first} is {tuple(saved[first].shape)}, not {tuple(own[first].shape)}; {len(different)} differ"
    return f"{first} is only in the {'checkpoint' if first in saved else 'model'}; {len(different)} differ"


def _plain(rewards: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    return {name: dict(of_set) for name, of_set in rewards.items()}
