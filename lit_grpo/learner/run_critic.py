"""The critic of a run: what contradicts the run's settings, and what is measured of it after an update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_grpo.errors import UserError
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.objectives.diagnostics import mean_of
from lit_grpo.objectives.tensors import masked

if TYPE_CHECKING:
    from lit_grpo.learner.forward import Passes
    from lit_grpo.module import LitGRPO
    from lit_grpo.objectives.objective import Objective
    from lit_grpo.objectives.state import ObjectiveState
    from lit_grpo.policy.config import CriticConfig
    from lit_grpo.types import Experience, Rollout

KEY = "model.critic"
Range = tuple[float, float]
"""Least and greatest total reward of a completion."""
UNKNOWN: Range = (-math.inf, math.inf)
"""Where the rewards do not say."""


def check(
    config: CriticConfig | None, objective: Objective, rollouts: int, max_new_tokens: int, reward_range: Range
) -> None:
    """Hold the critic's settings to the run; warn of what is allowed and yet hardly meant.

    Args:
        config: of the critic; None: nothing to check.
        objective: of the run.
        rollouts: of the whole run.
        max_new_tokens: limit of a completion.
        reward_range: least and greatest total reward, before shaping.

    Raises:
        UserError: a warm-up that leaves no rollout for the policy, a bounded head that cannot reach the rewards.
    """
    if config is None:
        return
    if config.warmup_rollouts and config.warmup_rollouts >= rollouts:
        raise UserError(
            f"the critic's warm-up of {config.warmup_rollouts} rollouts is no shorter than the run of {rollouts}: the "
            "policy would never learn",
            where=f"{KEY}.warmup_rollouts",
            remedy=f"choose fewer than {rollouts}, or raise data.rollouts",
        )
    low, high = objective.shaping.bounds(*reward_range)
    if config.bounded and ((math.isfinite(low) and low < config.value_low) or
                           (math.isfinite(high) and high > config.value_high)):  # fmt: skip
        raise UserError(
            f"the critic's values are bounded to [{config.value_low:g}, {config.value_high:g}], but total rewards lie "
            f"in [{low:g}, {high:g}]: it could not learn them",
            where=f"{KEY}.value_low" if low < config.value_low else f"{KEY}.value_high",
            remedy=f"set value_low: {low:g} and value_high: {high:g}, or bounded: false",
        )
    advantage = objective.advantage
    for caution in advantage.cautions(max_new_tokens):
        rank_zero_warn(caution)
    if advantage.pretrained_critic and not config.warmup_rollouts:
        rank_zero_warn(
            f"{objective.name} was published with a critic trained before the policy, and {KEY}.warmup_rollouts is 0."
        )


def with_range(objective: Objective, state: ObjectiveState, reward_range: Range) -> ObjectiveState:
    """Return the state with the range of the shaped reward where it is known; otherwise it is what the run has seen."""
    low, high = objective.shaping.bounds(*reward_range)
    if "reward_range" in objective.state_fields and math.isfinite(low) and math.isfinite(high):
        return state.with_reward_range(low, high)
    return state


@torch.no_grad()
def measure_after(
    module: LitGRPO,
    passes: Passes,
    batch: Rollout,
    objective: Objective,
    experience: Experience,
    metrics: StepMetrics,
) -> None:
    """The critic on the same rollout once it has learned from it, every ``critic.measure_every`` rollouts."""
    config = module.critic_config
    if config is None or not config.measure_every or module.policy_version % config.measure_every:
        return
    returns = objective.returns(experience, module.objective_state, module.reduce_or_none)
    values, mask = passes.values_of(batch).to(returns.dtype), experience.mask
    positive = (objective.rewards(experience, module.objective_state)[0] > 0)[:, None]
    error = masked(returns - values, mask)
    metrics.update(
        {
            "value/correct_after": mean_of(values, mask & positive),
            "value/incorrect_after": mean_of(values, mask & ~positive),
            "value/error_after": mean_of(error, mask),
            "value/error_sq_after": mean_of(error * error, mask),
        }
    )
