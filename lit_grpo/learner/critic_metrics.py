"""Measurements of the critic after an update."""

from __future__ import annotations

import torch

from lit_grpo.learner.batch import scored_rows
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.learner.metric_sums import Reduce
from lit_grpo.objectives.diagnostics import mean_of, rows_by_verdict
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.objectives.tensors import masked
from lit_grpo.types import Experience, Rollout, Sum


@torch.no_grad()
def critic_after_update(
    forward: ForwardRunner,
    batch: Rollout,
    objective: Objective,
    experience: Experience,
    state: ObjectiveState,
    reduce: Reduce | None = None,
) -> dict[str, Sum]:
    """Measure the critic on a rollout that it has just learned from, and return sums by metric key.

    Args:
        forward: computes the values with the weights as they are now.
        batch: the rollout.
        objective: the objective whose returns and rewards the values are compared with.
        experience: tensors of the rollout, values before the update among them.
        state: histories of the objective.
        reduce: sum over ranks; None for one process.
    """
    values = forward.rollout_values(batch)
    # One that no reward scored has no return.
    if (scored := scored_rows(batch)) is not None:
        experience, values = experience.select(scored), values[scored.to(values.device)]
    returns = objective.returns(experience, state, reduce)
    values, mask = values.to(returns.dtype), experience.mask
    by_verdict = rows_by_verdict(objective.correct(experience, state), mask)
    error = masked(returns - values, mask)
    return {f"critic/value_{name}_after": mean_of(values, tokens) for name, tokens in by_verdict.items()} | {
        "critic/error_after": mean_of(error, mask),
        "critic/error_sq_after": mean_of(error * error, mask),
    }
