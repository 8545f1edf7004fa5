"""The objective of a run: fitted to the run's shape, exchanged in mid-run, taken up from a checkpoint."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_grpo.context import RunContext
from lit_grpo.errors import UserError
from lit_grpo.learner.run_checks import (
    check_critic_settings,
    check_objective,
    check_verdicts,
    resolve_objective,
    warmup_rollouts,
)
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.safeguards import Safeguard, changes_that_add
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.policy.config import CriticConfig
from lit_grpo.utils.logging import log_level
from lit_grpo.utils.spelling import nearest

RANK_ZERO_LOGGER = "lightning.pytorch.utilities.rank_zero"
"""The logger that ``rank_zero_info`` writes to."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What an objective must fit: the learner's settings and, once the data module has told it, the run's shape."""

    updates_per_rollout: int
    max_staleness: int
    critic: CriticConfig | None
    context: RunContext | None
    """Shape of the rollouts; None: it is not known yet, and nothing is fitted to it."""
    trained_rollouts: int = 0
    """Number of rollouts that the model has been trained on."""

    def resolve(self, config: ObjectiveConfig) -> Objective:
        """Return the objective of some settings, fitted to the run.

        Raises:
            UserError: the objective and the run contradict each other.
        """
        objective = resolve_objective(config, self.max_staleness)
        return objective if self.context is None else self.fit(objective, self.context)

    def fit(self, objective: Objective, context: RunContext) -> Objective:
        """Return an objective with what the run fixes.

        Raises:
            UserError: the objective, the updates and the shape of the rollouts contradict each other.
        """
        for caution in objective.shaping.cautions(context.max_new_tokens):
            rank_zero_warn(caution)
        objective = objective.for_run(context.max_new_tokens, self.updates_per_rollout)
        objective.check(
            group_size=context.group_size,
            updates_per_rollout=self.updates_per_rollout,
            has_critic=self.critic is not None,
        )
        warmup = 0 if self.critic is None else warmup_rollouts(self.critic, objective)
        check_objective(objective, self.updates_per_rollout * objective.passes, warmup)
        check_verdicts(objective, context.primary_range)
        check_critic_settings(
            self.critic,
            objective,
            rollouts=context.rollouts,
            max_new_tokens=context.max_new_tokens,
            reward_range=context.reward_range,
        )
        return objective

    def with_rewards(self, objective: Objective, state: ObjectiveState) -> ObjectiveState:
        """Return the objective's state with the range of the run's rewards, as far as it is known."""
        return state if self.context is None else with_reward_range(objective, state, self.context.reward_range)

    def adopted(self, objective: Objective, state: ObjectiveState) -> ObjectiveState:
        """Return the state with which the run goes on under another objective: what both know of the run is kept.

        Raises:
            UserError: the objective needs the entropy of the untouched model, of which nothing was measured.
        """
        return with_untouched_entropy(objective, objective.adopt_state(state), self.trained_rollouts)

    def resumed(self, objective: Objective, saved: ObjectiveState, *, changed: bool) -> ObjectiveState:
        """Return the state with which a run goes on from a checkpoint.

        Args:
            objective: the objective that it goes on under.
            saved: the state in the checkpoint.
            changed: whether the checkpoint was saved under another objective.

        Raises:
            UserError: as :meth:`adopted`.
        """
        state = self.adopted(objective, saved) if changed else saved
        # Rewards, too, may be others than those it was saved with.
        return self.with_rewards(objective, state)


@dataclass(frozen=True)
class RunObjective:
    """The objective that a run learns by."""

    config: ObjectiveConfig
    """Its settings."""
    objective: Objective
    """What they resolve to, with what the run fixes."""
    state: ObjectiveState
    """What it remembers of the rollouts so far."""

    def changed(self, changes: Mapping[str, Any], shape: RunShape) -> RunObjective:
        """Return another objective to go on with; histories that both have are kept.

        Args:
            changes: overrides of this objective; with ``recipe`` that recipe, without the old overrides.
            shape: what the other objective must fit.

        Raises:
            UserError: an override is unknown, or the run does not fit the other objective.
        """
        known = {field.name for field in fields(ObjectiveConfig)}
        if unknown := next((key for key in changes if key not in known), None):
            close = nearest(unknown, known)
            raise UserError(f"unknown override {unknown!r}", where="model.objective",
                            remedy=f"did you mean {close!r}?" if close else None)  # fmt: skip
        config = replace(ObjectiveConfig() if "recipe" in changes else self.config, **changes)
        objective = shape.resolve(config)
        return RunObjective(config, objective, shape.adopted(objective, shape.with_rewards(objective, self.state)))

    def try_changes(self, changes: Mapping[str, Any], shape: RunShape) -> RunObjective | UserError:
        """Return what :meth:`changed` returns or raises, and say nothing of what the change warns of."""
        with warnings.catch_warnings(), log_level(RANK_ZERO_LOGGER, logging.WARNING):
            warnings.simplefilter("ignore")
            try:
                return self.changed(changes, shape)
            except UserError as error:
                return error

    def changes_that_add(self, safeguard: str) -> dict[str, Any]:
        """Return the changes that add a :data:`lit_grpo.objectives.safeguards.Safeguard` and keep everything else."""
        changes = changes_that_add(cast(Safeguard, safeguard), self.objective)
        # Settings of a part that is replaced are given up; most of them were never given.
        return {k: v for k, v in changes.items() if v is not None or getattr(self.config, k) is not None}


def with_reward_range(objective: Objective, state: ObjectiveState, reward_range: tuple[float, float]) -> ObjectiveState:
    """Return the objective's state with the range of the shaped reward, where it keeps one and the rewards tell it."""
    low, high = objective.shaping.bounds(*reward_range)
    if "reward_range" in objective.state_fields and math.isfinite(low) and math.isfinite(high):
        return state.with_reward_range(low, high)
    return state


def with_untouched_entropy(objective: Objective, state: ObjectiveState, rollouts: int) -> ObjectiveState:
    """Return the state of an objective that is switched to after ``rollouts`` rollouts, with H_init if it needs that.

    Raises:
        UserError: the objective needs the entropy of the untouched model, of which nothing was measured.
    """
    # Before the first rollout the model is untouched, and the entropy is measured as in any run.
    if not objective.initial_entropy_prompts or state.initial_entropy is not None or not rollouts:
        return state
    if state.first_rollout_entropy is None:
        raise UserError(
            f"{objective.name} compares with the entropy of the untouched model, and the first rollout measured none",
            where="model.objective.initial_entropy",
            remedy="give initial_entropy, in nats, or entropy_gate: .inf, under which the filter always acts",
        )
    rank_zero_info(
        f"entropy of the untouched model: {state.first_rollout_entropy:.4f} nats, over the completions of the first "
        "rollout, since the objective was switched on in mid-run."
    )
    return state.with_initial_entropy(state.first_rollout_entropy)
