"""The numbers that a rollout is logged with, once all of its optimizer steps were taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lit_grpo.distributed.reduction import RankReduction
from lit_grpo.learner.budget import MicroBatchBudget
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.learner.optimizer_step import OptimizerBundle, StepCounters
from lit_grpo.objectives import diagnostics
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.types import Rollout


def report_rollout(
    batch: Rollout,
    metrics: StepMetrics,
    *,
    ranks: RankReduction,
    counters: StepCounters,
    bundles: Sequence[OptimizerBundle],
    budget: MicroBatchBudget,
    state: ObjectiveState,
    policy_version: int,
    staleness: int,
    seconds: float,
) -> dict[str, float]:
    """Return the numbers of a rollout by metric key, the same on every rank; docs/metrics.md says what they are.

    Args:
        batch: the rollout, with what sampling it was measured by.
        metrics: what the learner has measured on this rank.
        ranks: exchange between the ranks of the run; every rank takes part.
        counters: optimizer steps so far.
        bundles: the policy's optimizer, then the critic's if there is one.
        budget: bound on micro-batches that is in force.
        state: histories of the objective during the optimizer steps.
        policy_version: number of rollouts that the policy has been trained on, this one included.
        staleness: rollouts by which the weights that sampled it were older than the policy.
        seconds: time that learning from it took.
    """
    if ranks.several:
        metrics.agree(ranks.world_size)
    values = metrics.compute(ranks.sum_or_none, ranks.max_or_none)
    values |= diagnostics.derive(values) | batch.metrics
    values |= {
        "optim/steps": float(counters.optimizer_steps),
        "optim/skipped_steps": float(counters.skipped_steps),
        "optim/clipped_steps": float(counters.clipped_steps),
        "optim/empty_steps": float(counters.empty_steps),
        "optim/repeated_steps": float(counters.repeated_steps),
        "rollout/policy_version": float(policy_version),
        "rollout/staleness": float(staleness),
        "time/update": seconds,
    }
    for bundle in bundles:
        values[f"{bundle.prefix}lr"] = bundle.lr
    if budget.tokens is not None:
        values["memory/micro_batch_tokens"] = float(budget.tokens)
    if len(bundles) > 1:
        values["critic/steps"] = float(counters.critic_steps)
    if state.initial_entropy is not None:
        values["policy/entropy_initial"] = state.initial_entropy
    if state.beta is not None:
        values["policy/kl_beta"] = state.beta
    # Beside the learner's work, sampling costs only what the learner waits for it.
    phases = ("wait", "sync") if "time/learner_idle" in batch.metrics else ("generate", "reward", "sync")
    busy = seconds + sum(batch.metrics.get(f"time/{phase}", 0.0) for phase in phases)
    values["time/tokens_per_second"] = values["completions/tokens"] / busy if busy > 0 else 0.0
    return values


def state_after_rollout(
    objective: Objective, state: ObjectiveState, values: dict[str, float], policy_version: int
) -> ObjectiveState:
    """Return what an objective remembers of a rollout, by the numbers that it was logged with.

    Args:
        objective: the objective of the run.
        state: its histories so far.
        values: the numbers of the rollout by metric key.
        policy_version: number of rollouts that the policy has been trained on, this one included.
    """
    entropy = values.get("policy/entropy_sequence")
    if policy_version == 1 and entropy is not None:
        state = replace(state, first_rollout_entropy=entropy)
    return objective.end_of_rollout(state, approx_kl=values.get("policy/approx_kl_k3"))
