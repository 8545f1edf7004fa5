"""The objective of a run: what the run's settings change in it, and what they forbid."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.sampler_correction import TisToken

if TYPE_CHECKING:
    from lit_grpo.module import LitGRPO


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
    if "beta" in objective.state_fields and passes == 1:
        raise UserError(
            "trpo_target_kl adapts to how far updates leave the old policy, which a single update never measures",
            where="model.objective.trpo_target_kl",
            remedy="set updates_per_rollout to at least 2, or trpo_target_kl: 0",
        )
    if warmup_rollouts and not objective.regularizers.value_coef:
        raise UserError(
            "value_coef is 0, so a warm-up would teach the critic nothing", where="model.critic.warmup_rollouts"
        )


def check_minibatches(prompts: int, size: int | None, updates: int) -> None:
    """Minibatches of ``size`` prompts (None: all) must divide a rollout's ``prompts``, and be used equally often.

    Raises:
        UserError: with what would fit.
    """
    size = prompts if size is None else size
    if size < 1 or prompts % size:
        raise UserError(
            f"{prompts} prompts per rollout cannot be divided into minibatches of {size}",
            where="model.minibatch_prompts",
            remedy=f"choose a divisor of {prompts}",
        )
    if updates % (parts := prompts // size):
        raise UserError(
            f"{updates} updates per rollout would use some of the {parts} minibatches more often than others",
            where="model.updates_per_rollout",
            remedy=f"choose a multiple of {parts}",
        )


def monte_carlo(objective: Objective) -> Objective:
    """The same with Monte Carlo returns as the critic's targets: lambda 1."""
    advantage: Any = objective.advantage
    return replace(objective, advantage=replace(advantage, gae_lambda=1.0))


def measure_initial_entropy(module: LitGRPO) -> None:
    """<H> of the untouched model, for objectives that compare with it: once in a run, resumed or not.

    Raises:
        UserError: there is no data module to sample the completions from.
    """
    count = module.objective.initial_entropy_prompts
    if not count or module.objective_state.initial_entropy is not None:
        return
    source = getattr(getattr(module.trainer, "datamodule", None), "initial_completions", None)
    if source is None:
        raise UserError(
            f"{module.objective.name} compares with the entropy of the untouched model, "
            "which only RolloutDataModule lets it measure",
            where="model.objective.initial_entropy",
            remedy="set initial_entropy to the measured mean, in nats",
        )
    entropy = module._passes.sequence_entropy(source(count)).double()
    total, number = module.reduce_sum(torch.stack([entropy.sum(), entropy.new_tensor(float(len(entropy)))])).tolist()
    module.objective_state = module.objective_state.with_initial_entropy(total / number)
    rank_zero_info(f"entropy of the untouched model: {total / number:.4f} nats, over {number:.0f} completions")
