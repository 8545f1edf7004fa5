"""Checks of a run: what its settings change in the objective, and what they and its rollouts forbid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.sampler_correction import TisToken
from lit_grpo.policy.config import CriticConfig
from lit_grpo.types import Rollout

CRITIC_KEY = "model.critic"


def resolve_objective(config: ObjectiveConfig, max_staleness: int) -> Objective:
    """Return the objective, with token-wise sampler correction where samples may be stale and the user chose none.

    Raises:
        UserError: staleness is allowed and nothing is sampled.
    """
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


def check_batch(batch: Any) -> None:
    """Check that a batch is a rollout, and not what a loader of the user's own gives.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(batch, Rollout):
        raise UserError(
            f"the module learns from rollouts, and the loader gave a {type(batch).__name__}",
            where="train_dataloaders",
            remedy="trainer.fit(module, datamodule=RolloutDataModule(prompts=ROWS, rewards=[FUNCTION])): its loader "
            "samples with the weights of the step before",
        )


def check_staleness(batch: Rollout, version: int, most: int) -> int:
    """Return how many rollouts the weights that sampled a batch are older than the policy.

    Args:
        batch: the rollout.
        version: number of rollouts that the policy has been trained on.
        most: greatest age that is allowed.

    Raises:
        RuntimeError: the weights are older than that, or newer than the policy.
    """
    staleness = version - batch.policy_version
    if not 0 <= staleness <= most:
        raise RuntimeError(
            f"rollout {batch.index + 1} was sampled with weights of version {batch.policy_version}, but the policy is "
            f"at version {version}: {staleness} rollouts old, allowed are {most}. "
            "Lightning reads ahead of a loader without a length: use RolloutDataModule's loader or give yours one."
        )
    return staleness


def check_batch_verdicts(batch: Rollout, objective: Objective) -> None:
    """Check that a rollout says which completions are correct where the objective asks.

    Raises:
        UserError: a completion that one reward has scored was not judged by the one that says what is right.
        RuntimeError: it says so of none.
    """
    keys = objective.uses_correct
    if keys and batch.correct is None and not objective.demonstrations:
        raise RuntimeError(
            f"{objective.name} asks which completions are correct (by {', '.join(keys)}), and rollout "
            f"{batch.index} does not say it: Rollout.correct is None"
        )
    scored, judged = batch.scored, batch.judged
    if not keys or judged is None:
        return
    unjudged = ~judged if scored is None else ~judged & scored
    if unjudged.any():
        # Left out it would be from a total that other rewards have paid, and right or wrong it is not.
        first = int(unjudged.nonzero()[0])
        skipped = [repr(name) for name, values in batch.rewards.items() if values[first].isnan()]
        raise UserError(
            f"{objective.name} asks which completions are correct (by {', '.join(keys)}), and "
            f"{' and '.join(skipped)} gave None for a completion of prompt "
            f"{batch.prompts[first // batch.group_size].id!r} that another reward scored",
            where="data.rewards",
            remedy="have the others give None for it too, which leaves it out, or have one of those that say what "
            "is right score it; or take an objective that goes by the total reward alone",
        )


def check_objective(objective: Objective, passes: int, warmup_rollouts: int) -> None:
    """Refuse contradictions that the parts of an objective alone do not show, and say what the updates make of it.

    Args:
        objective: the objective of the run, with what the run fixes.
        passes: optimizer steps that see one completion.
        warmup_rollouts: length of the critic's warm-up.

    Raises:
        UserError: they contradict each other; names the reason and the key.
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
    if objective.without_importance_sampling:
        rank_zero_warn(
            f"{objective.name}: the ratio is {objective.ratio!r}, so the gradient of all {passes} updates per rollout "
            "is that of on-policy data, though the data are off-policy from the second on, and no clip acts."
        )
    elif passes == 1 and objective.trust_region_idles:
        rank_zero_info(
            f"{objective.name}: with one update per rollout every ratio is 1, so the trust region "
            f"{objective.trust_region.kind!r} never acts (model.updates_per_rollout)."
        )


def check_verdicts(objective: Objective, primary_range: tuple[float, float] | None) -> None:
    """Refuse an objective that asks which completions are correct in a run whose rewards do not say it.

    Args:
        objective: the objective of the run.
        primary_range: least and greatest that the reward that says what is right adds to the total; None: none says it.

    Raises:
        UserError: names the settings that ask, and what would answer them.
    """
    keys = () if objective.demonstrations else objective.uses_correct
    if keys and primary_range is None:
        alone = keys == ("uniform_by",)
        raise UserError(
            f"{objective.name} asks which completions are correct (by {', '.join(keys)}), and no reward says it",
            where="data.rewards",
            remedy="add one that does, for instance lit_grpo.rewards.MathReward (with weight 0 it changes nothing "
            "else), or set correct_threshold of yours" + (", or uniform_by: reward" if alone else ""),
        )
    if not objective.shaping.label_noise or primary_range is None:
        return
    if not all(map(math.isfinite, primary_range)):
        raise UserError(
            "label_noise turns a value of the reward that says what is right into its opposite within the reward's "
            "range, and that reward does not state its range",
            where="model.objective.label_noise",
            remedy="give its range: in a class of yours `range = (0.0, 1.0)`, of FunctionReward init_args.range",
        )
    if primary_range[0] == primary_range[1] and keys == ("label_noise",):
        raise UserError(
            "the reward that says what is right adds nothing to the total, so label_noise would change no advantage",
            where="model.objective.label_noise",
            remedy="give that reward a weight other than 0, or set label_noise: 0",
        )


def check_minibatches(prompts: int, size: int | None, updates: int) -> None:
    """Check that minibatches of ``size`` prompts (None: all) divide a rollout and are used equally often.

    Raises:
        UserError: they do not; says which numbers would fit.
    """
    size = prompts if size is None else size
    if size < 1 or prompts % size:
        raise UserError(
            f"{prompts} prompts per rollout cannot be divided into minibatches of {size}",
            where="model.minibatch_prompts",
            remedy=f"choose a divisor of {prompts}",
        )
    if updates % (minibatches := prompts // size):
        raise UserError(
            f"{updates} updates per rollout would use some of the {minibatches} minibatches more often than others",
            where="model.updates_per_rollout",
            remedy=f"choose a multiple of {minibatches}",
        )


def check_critic_settings(
    config: CriticConfig | None,
    objective: Objective,
    *,
    rollouts: int,
    max_new_tokens: int,
    reward_range: tuple[float, float],
) -> None:
    """Check the critic's settings against the run, and warn of what is allowed and yet hardly meant.

    Args:
        config: settings of the critic; None: there is none, and nothing to check.
        objective: the objective of the run.
        rollouts: number of rollouts in the whole run.
        max_new_tokens: most tokens of a completion.
        reward_range: least and greatest total reward, before shaping.

    Raises:
        UserError: a warm-up that leaves no rollout for the policy, a bounded head that cannot reach the rewards.
    """
    if config is None:
        return
    warmup = warmup_rollouts(config, objective)
    if warmup and warmup >= rollouts:
        whose = f" (what {objective.recipe} was published with)" if config.warmup_rollouts is None else ""
        raise UserError(
            f"the critic's warm-up of {warmup} rollouts{whose} is no shorter than the run of {rollouts}: the "
            "policy would never learn",
            where=f"{CRITIC_KEY}.warmup_rollouts",
            remedy=f"choose fewer than {rollouts}, or raise data.rollouts",
        )
    low, high = objective.shaping.bounds(*reward_range)
    if config.bounded and ((math.isfinite(low) and low < config.value_low) or
                           (math.isfinite(high) and high > config.value_high)):  # fmt: skip
        raise UserError(
            f"the critic's values are bounded to [{config.value_low:g}, {config.value_high:g}], but total rewards lie "
            f"in [{low:g}, {high:g}]: it could not learn them",
            where=f"{CRITIC_KEY}.value_low" if low < config.value_low else f"{CRITIC_KEY}.value_high",
            remedy=f"set value_low: {low:g} and value_high: {high:g}, or bounded: false",
        )
    for caution in objective.advantage.cautions(max_new_tokens):
        rank_zero_warn(caution)
    if objective.critic_warmup_rollouts and not warmup:
        rank_zero_warn(
            f"{objective.name} was published with a critic trained before the policy, and "
            f"{CRITIC_KEY}.warmup_rollouts is 0: leave it out for the {objective.critic_warmup_rollouts} of its recipe."
        )


def warmup_rollouts(config: CriticConfig, objective: Objective) -> int:
    """Return the number of rollouts that train the critic alone: as set, or else as the recipe was published with."""
    return objective.critic_warmup_rollouts if config.warmup_rollouts is None else config.warmup_rollouts


def with_monte_carlo_returns(objective: Objective) -> Objective:
    """Return the objective with Monte Carlo returns as the critic's targets (lambda 1), for its warm-up."""
    advantage: Any = objective.advantage
    return replace(objective, advantage=replace(advantage, gae_lambda=1.0))
