"""The objective of a run: what the run's settings change in it, and what they forbid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.sampler_correction import TisToken


def resolve(config: ObjectiveConfig, max_staleness: int) -> Objective:
    """The objective, with token-wise sampler correction where samples may be stale and the user did not choose one."""
    objective = config.resolve()
    if objective.demonstrations and max_staleness > 0:
        raise UserError(
            f"{objective.name} samples nothing, so there is nothing to sample ahead of its turn",
            where="model.max_staleness",
            remedy="set max_staleness: 0",
        )
    chosen = config.sampler_correction is not None or config.custom_objective is not None
    if max_staleness <= 0 or chosen or objective.sampler.kind != "none":
        return objective
    objective = replace(objective, sampler=TisToken())
    rank_zero_info(
        f"max_staleness is {max_staleness}: sampler_correction is tis_token, "
        "unless model.objective.sampler_correction says otherwise."
    )
    return objective


def check_objective(objective: Objective, passes: int, warmup_rollouts: int) -> None:
    """Contradictions that the parts alone do not show.

    Args:
        objective: of the run.
        passes: optimizer steps that see one completion.
        warmup_rollouts: of the critic.

    Raises:
        UserError: with the reason and the key.
    """
    if "beta" in objective.new_state() and passes == 1:
        raise UserError(
            "trpo_target_kl adapts to how far updates leave the old policy, which a single update never measures",
            where="model.objective.trpo_target_kl",
            remedy="set updates_per_rollout to at least 2, or trpo_target_kl: 0",
        )
    if warmup_rollouts and not objective.regularizers.value_coef:
        raise UserError(
            "value_coef is 0, so a warm-up would teach the critic nothing", where="model.critic.warmup_rollouts"
        )


def monte_carlo(objective: Objective) -> Objective:
    """The same with Monte Carlo returns as the critic's targets: lambda 1."""
    advantage: Any = objective.advantage
    return replace(objective, advantage=replace(advantage, gae_lambda=1.0))
