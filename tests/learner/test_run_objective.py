"""The objective of a run is fitted to the run, exchanged in mid-run and taken up from a checkpoint."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from lit_grpo.errors import UserError
from lit_grpo.learner.run_objective import RunObjective, RunShape
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.state import ObjectiveState, PromptHistory
from tests import tiny

HISTORY = {"p0": PromptHistory(0.5, 0.1, 2.0)}


def shape(**changes: Any) -> RunShape:
    settings: dict[str, Any] = {
        "updates_per_rollout": 1,
        "max_staleness": 0,
        "critic": None,
        "context": tiny.context(4),
    }
    return RunShape(**(settings | changes))


def present(**overrides: Any) -> RunObjective:
    config = ObjectiveConfig(**overrides)
    objective = shape().resolve(config)
    return RunObjective(config, objective, objective.new_state())


def test_overrides_stay_unless_another_recipe_is_named():
    run = present(recipe="grpo", entropy_coef=0.03)
    assert run.changed({"kl_coef": 0.1}, shape()).config == ObjectiveConfig(
        recipe="grpo", entropy_coef=0.03, kl_coef=0.1
    )
    assert run.changed({"recipe": "dapo"}, shape()).config == ObjectiveConfig(recipe="dapo")
    assert run.config == ObjectiveConfig(recipe="grpo", entropy_coef=0.03)


def test_histories_that_both_objectives_have_are_kept():
    run = present(recipe="dcpo")
    run = replace(run, state=replace(run.state, prompts=HISTORY))
    assert run.changed({"kl_coef": 0.1}, shape()).state.prompts == HISTORY
    assert run.changed({"recipe": "grpo"}, shape()).state == ObjectiveState()


def test_a_change_that_does_not_fit_is_an_error_and_says_nothing_when_tried():
    run = present(recipe="grpo")
    with pytest.raises(UserError, match="unknown override 'kl_coeff'"):
        run.changed({"kl_coeff": 0.1}, shape())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused = run.try_changes({"recipe": "ppo"}, shape())
        fitting = run.try_changes({"recipe": "cispo"}, shape(updates_per_rollout=2))
    assert isinstance(refused, UserError)
    assert isinstance(fitting, RunObjective)


def test_without_a_shape_nothing_is_fitted():
    """Before the data module has spoken, an objective that no run could have is only resolved."""
    assert shape(context=None).resolve(ObjectiveConfig(recipe="ppo")).advantage.critic
    with pytest.raises(UserError, match="critic"):
        shape().resolve(ObjectiveConfig(recipe="ppo"))


def test_a_checkpoint_of_the_same_objective_is_taken_up_as_it_is():
    run = present(recipe="gtpo", initial_entropy=0.7)
    saved = ObjectiveState(initial_entropy=0.4, prompts=HISTORY)
    assert shape().resumed(run.objective, saved, changed=False) == saved
    adopted = shape().resumed(run.objective, saved, changed=True)
    assert (adopted.initial_entropy, adopted.prompts) == (0.4, {})


def test_an_entropy_that_nobody_measured_is_asked_for():
    later = shape(trained_rollouts=3)
    objective = later.resolve(ObjectiveConfig(recipe="gtpo"))
    assert later.adopted(objective, ObjectiveState(first_rollout_entropy=0.6)).initial_entropy == 0.6
    with pytest.raises(UserError, match="entropy of the untouched model"):
        later.adopted(objective, ObjectiveState())
