"""A safeguard that is added to an objective takes nothing else of it away, in any recipe."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from lit_grpo.callbacks.diagnosis.remedies import SAFEGUARDS
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.recipes import RECIPES
from lit_grpo.objectives.safeguards import Safeguard, changes_that_add

MAY_CHANGE = {
    "both_signs": {"keep_sign", "advantage", "ratio", "trust_region"},
    "pay_for_reward": {"entropy_reward", "invalid_entropy", "entropy_gamma"},
}
MAY_CHANGE["no_entropy_bonus"] = MAY_CHANGE["both_signs"] | {"entropy_coef", "entropy_bonus"}
MAY_CHANGE["exploration"] = MAY_CHANGE["both_signs"] | MAY_CHANGE["pay_for_reward"] | {"entropy_coef", "clip_high"}


def of(recipe: str, updates: int = 1, **overrides: Any) -> tuple[ObjectiveConfig, Objective]:
    config = ObjectiveConfig(recipe=recipe, **overrides)  # type: ignore[arg-type]
    return config, config.resolve().for_run(64, updates)


def after(safeguard: Any, recipe: str, updates: int = 1, **overrides: Any) -> tuple[dict[str, Any], Objective]:
    config, objective = of(recipe, updates, **overrides)
    changes = changes_that_add(safeguard, objective)
    return changes, replace(config, **changes).resolve().for_run(64, updates)


def differences(before: Objective, then: Objective) -> set[str]:
    """Names of everything that is another: kinds of parts, and the settings of parts of the same kind."""
    labels = before.labels(), then.labels()
    found = {key for key in labels[0] if labels[0][key] != labels[1][key]}
    for one, other in zip(before.parts(), then.parts(), strict=True):
        if type(one) is type(other):
            found |= {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}  # type: ignore[arg-type]
    return found - {"entropy_signal"}


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_only_what_is_lacking_changes(safeguard, recipe, updates):
    before = of(recipe, updates)[1]
    then = after(safeguard, recipe, updates)[1]
    assert differences(before, then) <= MAY_CHANGE[safeguard]
    assert then.filters.zero_variance == before.filters.zero_variance
    then.check(
        group_size=1 if then.demonstrations else 8, updates_per_rollout=updates, has_critic=then.advantage.critic
    )
    assert changes_that_add(safeguard, then) == {}, "what has it needs nothing more"


@pytest.mark.parametrize("recipe", ["dapo", "olmo3"])
@pytest.mark.parametrize("updates", [1, 4])
def test_the_cure_of_an_entropy_collapse_stays(recipe, updates):
    """The remedy used to be recipe grpo: it took clip-higher, token mean, dynamic sampling and TIS away."""
    before = of(recipe, updates)[1]
    _, then = after("exploration", recipe, updates)
    assert then.filters.dynamic_sampling
    assert (then.aggregation, then.sampler, then.advantage) == (before.aggregation, before.sampler, before.advantage)
    clip: Any = then.trust_region
    assert clip.clip_high == (0.28 if recipe == "dapo" or updates == 4 else 0.272)


def test_what_pays_for_uncertainty_goes():
    assert after("no_entropy_bonus", "grpo", entropy_coef=0.5)[0] == {"entropy_coef": 0.0}
    assert after("no_entropy_bonus", "grpo", entropy_coef=-0.5)[0] == {}
    assert after("no_entropy_bonus", "nl")[1].filters.keep_sign == "all", "negatives alone have no end"
    assert after("no_entropy_bonus", "pl")[0] == {}


def test_exploration_is_no_longer_punished():
    assert after("exploration", "grpo", entropy_coef=-0.5)[0] == {"entropy_coef": 0.0}
    assert after("exploration", "rent", invalid_entropy=7.0)[1].shaping.entropy_reward is False
    assert after("exploration", "gtpo")[1].entropy_signal.entropy_gamma == 0
    assert after("exploration", "gtpo")[1].entropy_signal.entropy_filter == "all"
    assert after("exploration", "grpo", 4)[0] == {"clip_high": 0.28}
    assert after("exploration", "grpo", 4, clip_high=0.4)[0] == {}
    assert after("exploration", "grpo", 1)[0] == {}, "with one update no clip acts"
    assert after("exploration", "pl")[1].filters.keep_sign == "all", "positives alone end in certainty"
    assert after("exploration", "nl")[0] == {}


@pytest.mark.parametrize("recipe", ["pl", "nl", "cl", "tnpl", "tnnl", "psr", "nsr", "raft", "w_reinforce", "imle"])
def test_what_learns_from_signs_gets_both_of_them_against_their_group(recipe):
    before = of(recipe, 4)[1]
    _, then = after("both_signs", recipe, 4, max_tokens=50) if recipe[:2] == "tn" else after("both_signs", recipe, 4)
    assert (then.filters.keep_sign, then.advantage.kind) == ("all", "group_std")
    assert then.ratio == "token"
    assert then.trust_region.kind == "clip"
    assert type(then.aggregation) is type(before.aggregation)
    assert then.regularizers == before.regularizers


def test_own_overrides_stay_and_those_of_a_replaced_part_go():
    changes, then = after(
        "both_signs", "nsr", negative_weight=-0.5, mask_truncated=True, sampler_correction="tis_token"
    )
    assert changes["negative_weight"] is None
    assert then.filters.mask_truncated
    assert then.sampler.kind == "tis_token"


def test_the_names_are_the_same_on_both_sides():
    assert get_args(Safeguard) == SAFEGUARDS
    with pytest.raises(ValueError, match="no safeguard 'luck'"):
        changes_that_add("luck", of("grpo")[1])  # type: ignore[arg-type]
