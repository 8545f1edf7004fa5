"""The objective of a run is fitted to the run, exchanged in mid-run and taken up from a checkpoint."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest

from lit_grpo.errors import UserError
from lit_grpo.learner.run_objective import RunObjective, RunShape
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.state import ObjectiveState, PromptHistory
from lit_grpo.policy import CriticConfig
from tests import tiny

TRPO: dict[str, Any] = {"recipe": "grpo", "trust_region": "kl_penalty", "trpo_target_kl": 0.01}
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


def test_a_change_that_does_not_fit_is_an_error_and_says_nothing_when_tried(caplog: pytest.LogCaptureFixture):
    run = present(recipe="grpo")
    with pytest.raises(UserError, match="unknown override 'kl_coeff'") as error:
        run.changed({"kl_coeff": 0.1}, shape())
    assert error.value.remedy == "did you mean 'kl_coef'?"
    # Each says something when it is made in earnest: a warning for the few tokens, a line for the single update.
    with pytest.warns(UserWarning, match="is for thousands of tokens"):
        run.changed({"recipe": "dapo"}, shape())
    with caplog.at_level(logging.INFO):
        run.changed({"recipe": "cispo"}, shape())
    assert "with one update per rollout" in caplog.text
    caplog.clear()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        refused = run.try_changes({"recipe": "ppo"}, shape())
        fitting = [run.try_changes({"recipe": recipe}, shape()) for recipe in ("dapo", "cispo")]
    assert isinstance(refused, UserError)
    assert all(isinstance(found, RunObjective) for found in fitting)
    assert not caplog.text


def test_the_settings_and_the_shape_of_the_run_reach_the_objective():
    grpo = ObjectiveConfig(recipe="grpo")
    assert shape().resolve(grpo).sampler.kind == "none"
    assert shape(max_staleness=1).resolve(grpo).sampler.kind == "tis_token"
    assert not shape().resolve(grpo).off_policy
    assert shape(updates_per_rollout=2).resolve(grpo).off_policy
    # Two passes over a rollout are two updates of it, so that its KL is measured.
    shape().resolve(ObjectiveConfig(**TRPO, lopti_eta=0.5))


@pytest.mark.parametrize(
    ("overrides", "changes", "refused"),
    [
        ({"recipe": "grpo"}, {"context": tiny.context(4, group_size=1)}, "group"),
        ({"recipe": "psr"}, {"context": tiny.context(4, primary_range=None)}, "which completions are correct"),
        (TRPO, {}, "a single update never measures"),
        ({"recipe": "ppo", "value_coef": 0.0}, {"critic": CriticConfig(warmup_rollouts=1)}, "the critic nothing"),
        ({"recipe": "ppo"}, {"critic": CriticConfig(warmup_rollouts=4)}, "no shorter than the run of 4"),
        (
            {"recipe": "ppo"},
            {"critic": CriticConfig(bounded=True), "context": tiny.context(4, reward_range=(0.0, 2.0))},
            r"total rewards lie in \[0, 2\]",
        ),
    ],
)
def test_an_objective_that_does_not_fit_the_run_is_refused(
    overrides: dict[str, Any], changes: dict[str, Any], refused: str
) -> None:
    with pytest.raises(UserError, match=refused):
        shape(**changes).resolve(ObjectiveConfig(**overrides))


def test_a_change_that_adds_a_safeguard_gives_up_only_settings_that_were_given():
    untouched = present(recipe="psr").changes_that_add("both_signs")
    assert untouched["advantage"] == "group_std"
    assert None not in untouched.values()
    given = present(recipe="psr", positive_weight=0.5).changes_that_add("both_signs")
    assert given == untouched | {"positive_weight": None}
    fitted = present(recipe="psr", positive_weight=0.5).changed(given, shape())
    assert fitted.objective.advantage.kind == "group_std"


def test_the_range_of_the_rewards_is_kept_where_it_is_known_and_asked_for():
    def with_range(low: float, high: float) -> RunShape:
        return shape(critic=CriticConfig(), context=tiny.context(4, reward_range=(low, high)))

    ppo = with_range(-1.0, 2.0).resolve(ObjectiveConfig(recipe="ppo"))
    saved = ObjectiveState(reward_range=(0.0, 0.5))
    for changed in (False, True):
        assert with_range(-1.0, 2.0).resumed(ppo, saved, changed=changed).reward_range == (-1.0, 2.0)
    # Of rewards that do not say their range, what was seen of them is all that is known.
    for low, high in ((-1.0, math.inf), (-math.inf, 2.0)):
        assert with_range(low, high).with_rewards(ppo, saved) == saved
    assert shape(context=None).with_rewards(ppo, saved) == saved
    signed = with_range(0.0, 1.0).resolve(ObjectiveConfig(recipe="ppo", reward_map="signed"))
    assert with_range(0.0, 1.0).with_rewards(signed, ObjectiveState()).reward_range == (-1.0, 1.0)
    run = present(recipe="grpo").changed({"recipe": "ppo"}, with_range(-1.0, 2.0))
    assert run.state.reward_range == (-1.0, 2.0)
    without_critic = shape(context=tiny.context(4, reward_range=(-1.0, 2.0)))
    assert run.changed({"recipe": "grpo"}, without_critic).state.reward_range is None
    grpo = without_critic.resolve(ObjectiveConfig(recipe="grpo"))
    assert without_critic.resumed(grpo, ObjectiveState(), changed=False) == ObjectiveState()


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
    # One that was measured or given holds, whatever the first rollout had.
    known = ObjectiveState(initial_entropy=0.4, first_rollout_entropy=0.6)
    assert later.adopted(objective, known).initial_entropy == 0.4
    # The model is untouched still: it will be measured.
    assert shape().adopted(objective, ObjectiveState(first_rollout_entropy=0.6)).initial_entropy is None
    assert later.adopted(later.resolve(ObjectiveConfig(recipe="grpo")), ObjectiveState()) == ObjectiveState()
