"""Recipes cannot be half set: overrides, names, refusals, configuration, own parts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives import RECIPES, Objective, ObjectiveConfig, aggregation
from lit_grpo.objectives.advantages import AdvantageInputs, Estimator
from lit_grpo.objectives.aggregation import Aggregation, SeqMean
from lit_grpo.objectives.registry import (
    find_parts,
    known_overrides,
    settings,
)
from lit_grpo.objectives.trust_regions import SurrogateInputs, SurrogateOutput
from scripts import objectives_config
from tests.objectives.random_batches import batch, step
from tests.paths import ROOT

RUN: dict[str, Any] = {"group_size": 4, "updates_per_rollout": 1, "has_critic": False}


def refused(**given: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        Objective.from_recipe(**given)
    return caught.value


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_itself(name: str) -> None:
    made = Objective.from_recipe(name)
    assert made.name == name
    assert made == RECIPES[name].objective
    assert json.loads(json.dumps(made.describe()))["recipe"] == name
    alone = {"group_size": 1} if made.demonstrations else {}
    made.check(**RUN | {"has_critic": made.advantage.critic} | alone)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"name": "dapo", "aggregation": "seq_mean"}, "dapo+aggregation=seq_mean"),
        ({"name": "dapo", "clip_high": 0.3}, "dapo"),
        ({"name": "dapo", "aggregation": "token_mean", "clip_low": 0.1}, "dapo"),
        ({"name": "grpo", "kl_coef": 0.04}, "grpo"),
        ({"name": "gspo", "kl_coef": 0.04}, "gspo+kl=k3_in_loss"),
        ({"name": "grpo", "sampler_correction": "tis_token"}, "grpo+sampler_correction=tis_token"),
        ({"name": "grpo", "top_entropy": 0.2}, "grpo+top_entropy=on"),
        ({"name": "pl", "ratio": "self"}, "pl+ratio=self"),
        ({"name": "nl", "trust_region": "none"}, "nl+trust_region=none"),
        ({"name": "grpo", "entropy_gamma": 0.1}, "grpo+entropy_signal=gamma"),
        ({"name": "gtpo", "entropy_filter": "negatives"}, "gtpo+entropy_signal=only_negatives"),
        ({"name": "gtpo", "entropy_filter": "none", "entropy_gamma": 0.0}, "gtpo+entropy_signal=off"),
    ],
)
def test_names_tell_what_is_not_the_recipes(given: dict[str, Any], name: str) -> None:
    assert Objective.from_recipe(**given).name == name


def test_replacing_a_part_renames() -> None:
    made = replace(Objective.from_recipe("dapo"), aggregation=SeqMean())
    assert made.name == "dapo+aggregation=seq_mean"


def test_override_keeps_the_rest_of_the_recipe() -> None:
    made = Objective.from_recipe("dapo", clip_high=0.3)
    described, original = made.describe(), Objective.from_recipe("dapo").describe()
    assert {k for k in described if described[k] != original[k]} == {"clip_high"}
    assert described["clip_high"] == 0.3


def test_naming_the_recipes_own_part_keeps_its_numbers() -> None:
    made = Objective.from_recipe("gspo", trust_region="clip")
    assert made == Objective.from_recipe("gspo")


def test_a_new_part_has_its_own_defaults() -> None:
    made = Objective.from_recipe("gspo", trust_region="dcpo", ratio="token")
    assert made.describe()["clip_high"] == 0.2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "dapoo"}, ["unknown recipe 'dapoo'", "did you mean 'dapo'"]),
        ({"name": "grpo", "clip_hig": 0.3}, ["unknown override 'clip_hig'", "did you mean 'clip_high'"]),
        ({"name": "grpo", "aggregation": "token_men"}, ["'token_men'", "did you mean 'token_mean'"]),
        ({"name": "reinforce", "clip_high": 0.3}, ["does not apply to reinforce", "trust_region: clip"]),
        ({"name": "grpo", "sampler_cap": 2.0}, ["sampler_cap", "tis_token"]),
        ({"name": "dapo", "max_tokens": 100}, ["max_tokens", "sum_const"]),
        ({"name": "grpo", "kl_estimator": "k2"}, ["no effect", "kl_coef is 0"]),
        ({"name": "grpo", "kl_placement": "reward"}, ["no effect"]),
        ({"name": "grpo", "label_noise_seed": 3}, ["label_noise is 0"]),
        ({"name": "grpo", "overlong_max": 100}, ["overlong_penalty is off"]),
        ({"name": "grpo", "value_coef": 1.0}, ["no critic"]),
        ({"name": "grpo", "value_clip": 0.2}, ["no critic"]),
        ({"name": "grpo", "ratio": "none"}, ["bounds a ratio"]),
        ({"name": "grpo", "trust_region": "gmpo"}, ["'geometric' goes with gmpo"]),
        ({"name": "gmpo", "top_entropy": 0.2}, ["one term per completion"]),
        ({"name": "ppo", "conflict_overlap": "or"}, ["one advantage per completion"]),
        ({"name": "grpo", "aggregation": "conflict_tokens"}, ["conflict_overlap"]),
        ({"name": "grpo", "label_noise": 1.5}, ["[0, 1]"]),
        ({"name": "grpo", "top_entropy": -0.1}, ["[0, 1]"]),
        ({"name": "grpo", "clip_high": "wide"}, ["'wide', which is no number", "example clip_high: 0."]),
        ({"name": "grpo", "mask_truncated": 1}, ["mask_truncated is 1, which is no truth value"]),
        ({"name": "dr_grpo", "max_tokens": 1.5}, ["whole number"]),
        ({"name": "grpo", "keep_sign": "positive"}, ["did you mean 'positives'"]),
        ({"name": "grpo", "custom_advantage": "no_such_package.f"}, ["cannot be imported"]),
        ({"name": "grpo", "custom_objective": "math.pi", "clip_low": 0.1}, ["a custom objective is whole"]),
    ],
)
def test_refusals_name_the_reason(given: dict[str, Any], words: list[str]) -> None:
    error = refused(**given)
    for word in words:
        assert word in str(error), str(error)
    assert str(error.where).startswith("model.objective.")


@pytest.mark.parametrize(
    ("recipe", "run", "word"),
    [
        ("ppo", {}, "critic"),
        ("vapo", {}, "critic"),
        ("grpo", {"has_critic": True}, "uses no critic"),
        ("grpo", {"group_size": 1}, "group_size is 1"),
        ("dcpo", {"group_size": 1}, "group_size is 1"),
        ("reinforce_rej", {"group_size": 1}, "uniform"),
        ("grpo", {"updates_per_rollout": 0}, "at least 1"),
    ],
)
def test_contradictions_with_the_run(recipe: str, run: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        Objective.from_recipe(recipe).check(**RUN | run)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_may_be_off_policy_without_importance_sampling_and_says_so(name: str) -> None:
    recipe = RECIPES[name].objective
    single = Objective.from_recipe(name)
    if recipe.demonstrations:
        assert single.for_run(100, updates_per_rollout=4).name == name, "its data are on no policy"
        return
    # One number per completion has no form without a ratio.
    changes = {} if recipe.trust_region.per_sequence else {"ratio": "self"}
    made = Objective.from_recipe(name, **changes).for_run(100, updates_per_rollout=4)
    made.check(**RUN | {"updates_per_rollout": 4, "has_critic": made.advantage.critic})
    assert made.name == (f"{name}+no_importance_sampling" if changes else name)
    assert single.for_run(100).name == name


def test_the_settings_of_a_likelihood_loss_have_four_names() -> None:
    """On-policy; off-policy with clip and ratio, without the clip, without both: landscape paper, Fig. 2, 3, 7."""
    forms: list[tuple[dict[str, str], int]] = [
        ({}, 1), ({}, 4), ({"trust_region": "none"}, 4), ({"ratio": "self"}, 4), ({"ratio": "self"}, 1),
    ]  # fmt: skip
    names = [Objective.from_recipe("nl", **changes).for_run(100, updates).name for changes, updates in forms]
    assert names == ["nl", "nl", "nl+trust_region=none", "nl+no_importance_sampling", "nl+ratio=self"]


def test_a_trust_region_that_never_acts() -> None:
    idle = {name for name in RECIPES if Objective.from_recipe(name).for_run(100).trust_region_idles}
    assert {"gspo", "gmpo", "cispo", "dapo", "vapo"} <= idle
    # GRPO's own clip is the usual case, Olmo 3 was published with one update, Lopti takes two passes.
    assert not idle & {"grpo", "olmo3", "lopti", "gtpo", "reinforce"}
    assert not any(Objective.from_recipe(name).for_run(100, 2).trust_region_idles for name in RECIPES)
    own = Objective.from_recipe("grpo", custom_trust_region=f"{HERE}.no_bound").for_run(100)
    assert not own.trust_region_idles, "what a user's own does at ratio 1 is not known"


def test_singleton_groups_by_choice() -> None:
    Objective.from_recipe("grpo", single_sample_advantage="raw").check(**RUN | {"group_size": 1})


@pytest.mark.parametrize(
    ("recipe", "changes", "updates", "needs"),
    [
        ("grpo", {}, 1, set()),
        ("grpo", {}, 4, {"old_logprobs"}),
        ("grpo", {"kl_coef": 0.1}, 1, {"ref_logprobs"}),
        ("grpo", {"sampler_correction": "tis_token"}, 1, set()),
        ("grpo", {"sampler_correction": "mis_token", "sampler_denominator": "kept"}, 1, {"old_logprobs"}),
        ("raft", {}, 1, set()),
        ("raft", {}, 4, {"old_logprobs"}),
        ("grpo", {"ratio": "self"}, 1, set()),
        ("raft", {"sampler_correction": "tis_token"}, 4, {"old_logprobs"}),
        ("rloo", {}, 1, {"old_logprobs", "ref_logprobs"}),
        ("dcpo", {}, 1, set()),
        ("lopti", {}, 1, {"old_logprobs", "ref_logprobs"}),
        ("advantage_reweighting", {"kl_coef": 0.0}, 1, set()),
        ("reinforce_bstar", {}, 1, set()),
        ("reinforce_bstar", {"optimal_baseline_weights": "given"}, 1, {"score_sqnorm"}),
        ("reinforce_bstar", {"optimal_baseline_weights": "logit"}, 1, {"old_logprobs", "sum_squared_probs"}),
        ("ppo", {}, 1, {"values"}),
        ("gtpo", {}, 1, {"entropy"}),
        ("rent", {"kl_coef": 0.0}, 1, {"entropy"}),
        ("dapo", {"top_entropy": 0.2}, 1, {"entropy"}),
        ("rspo", {}, 1, set()),
        ("rspo", {}, 2, {"old_logprobs", "router_logscores_old"}),
    ],
)
def test_requires_only_what_is_needed(recipe: str, changes: dict[str, Any], updates: int, needs: set[str]) -> None:
    assert Objective.from_recipe(recipe, **changes).requires(updates) == needs


def test_loss_requires() -> None:
    assert Objective.from_recipe("grpo").loss_requires() == frozenset()
    assert Objective.from_recipe("psr").loss_requires() == {"entropy"}
    assert Objective.from_recipe("ppo").loss_requires() == {"values"}
    assert Objective.from_recipe("rspo").loss_requires() == {"router_logscores"}
    exp, now = batch(0, groups=2, size=2, width=3)
    made = Objective.from_recipe("psr")
    state = made.new_state()
    plan = made.plan(exp, *made.advantages(exp, state))
    with pytest.raises(UserError, match="needs entropy of the current forward"):
        made.loss(now.logprobs, plan)


def test_run_constants() -> None:
    made = Objective.from_recipe("dr_grpo")
    exp, _ = batch(0, groups=2, size=2, width=3)
    state = made.new_state()
    with pytest.raises(UserError, match="generation limit"):
        made.plan(exp, *made.advantages(exp, state))
    assert made.for_run(256).describe()["max_tokens"] == 256
    assert made.for_run(256).name == "dr_grpo"
    assert Objective.from_recipe("dr_grpo", max_tokens=3000).for_run(256).describe()["max_tokens"] == 3000
    dapo = Objective.from_recipe("dapo")
    with pytest.raises(UserError, match="overlong"):
        dapo.advantages(exp, dapo.new_state())
    assert dapo.for_run(20480).describe()["overlong_max"] == 20480


def test_an_overlong_penalty_on_short_completions_is_said_aloud() -> None:
    made = Objective.from_recipe("dapo").shaping
    assert made.cautions(20480) == []
    (caution,) = made.cautions(3)
    assert "begins after 2 and is -1 at the limit, for right answers too" in caution
    assert Objective.from_recipe("dapo", overlong_max=3).shaping.cautions(3) == [], "asked for"
    assert Objective.from_recipe("grpo").shaping.cautions(3) == []


# ------------------------------------------------------------------------------------------------ configuration


def test_config_is_what_the_parts_say() -> None:
    """The file is written by a script from the parts: one that is out of date would hide a part or a setting."""
    assert objectives_config.TARGET.read_text(encoding="utf-8") == objectives_config.render()
    names = {f.name for f in fields(ObjectiveConfig)} - {"recipe"}
    assert names == known_overrides()
    assert all(getattr(ObjectiveConfig(), name) is None for name in names)


def test_every_setting_has_a_help() -> None:
    assert [s.name for group in settings().values() for s in group.values() if not s.help] == []


def test_a_class_in_the_file_of_its_kind_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Halved(SeqMean):
        kind: ClassVar[str] = "halved"

    monkeypatch.setattr(aggregation, "Halved", Halved, raising=False)
    assert "halved" not in find_parts(Aggregation, aggregation), "somebody else's class is no name"
    monkeypatch.setattr(Halved, "__module__", aggregation.__name__)
    assert find_parts(Aggregation, aggregation)["halved"] == Halved()


def test_config_resolves() -> None:
    assert ObjectiveConfig().resolve() == Objective.from_recipe("grpo")
    given = ObjectiveConfig(recipe="dapo", clip_high=0.3)
    assert given.resolve() == Objective.from_recipe("dapo", clip_high=0.3)
    with pytest.raises(UserError, match="does not apply"):
        ObjectiveConfig(recipe="reinforce", clip_high=0.3).resolve()


def test_config_in_yaml(tmp_path: Any) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=ObjectiveConfig, default=ObjectiveConfig())
    path = tmp_path / "o.yaml"
    path.write_text("recipe: dapo\nclip_high: 0.3\n")
    made = parser.instantiate(parser.parse_args([f"--objective={path}", "--objective.kl_coef=0.01"]))
    assert made.objective.resolve() == Objective.from_recipe("dapo", clip_high=0.3, kl_coef=0.01)
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args(["--objective.recipe=dapoo"])


def test_imports_torch_alone() -> None:
    """Objectives know nothing of Lightning, models or engines."""
    code = (
        "import sys, lit_grpo.objectives; print([m for m in ('lightning', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------ own parts


def double_mean(inputs: AdvantageInputs) -> Tensor:
    """Twice the reward above the mean of the group."""
    groups = inputs.groups
    return 2 * (inputs.rewards - groups.spread(groups.mean(inputs.rewards)))


class Scaled(Estimator):
    """The same, with the factor as an argument."""

    kind = "scaled"

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return double_mean(inputs) * self.factor / 2


def no_bound(inputs: SurrogateInputs) -> Tensor:
    """F = rho A."""
    return inputs.ratio * inputs.advantages


def one_sided(inputs: SurrogateInputs) -> SurrogateOutput:
    """Only the upper clip."""
    high = (inputs.advantages > 0) & (inputs.ratio > 1.1)
    value = torch.where(high, 1.1 * inputs.advantages, inputs.ratio * inputs.advantages)
    return SurrogateOutput(value, torch.zeros_like(high), high, torch.zeros_like(high))


def own_objective(clip: float = 0.2) -> Objective:
    """A whole objective."""
    return Objective.from_recipe("grpo", clip_low=clip, clip_high=clip)


HERE = __name__


def test_own_advantage() -> None:
    exp, now = batch(1, groups=2, size=3, width=4)
    plain = step(Objective.from_recipe("dr_grpo", max_tokens=8), exp, now)[3]
    own = Objective.from_recipe("dr_grpo", max_tokens=8, custom_advantage=f"{HERE}.double_mean")
    assert own.name.startswith("dr_grpo+advantage=custom")
    torch.testing.assert_close(step(own, exp, now)[3], 2 * plain)
    spec = {"class_path": f"{HERE}.Scaled", "init_args": {"factor": 3.0}}
    scaled = ObjectiveConfig(recipe="dr_grpo", max_tokens=8, custom_advantage=spec).resolve()
    torch.testing.assert_close(step(scaled, exp, now)[3], 3 * plain)


def test_own_trust_region() -> None:
    exp, now = batch(1, groups=2, size=3, width=4)
    plain = step(Objective.from_recipe("grpo", trust_region="none"), exp, now)[3]
    own = Objective.from_recipe("grpo", custom_trust_region=f"{HERE}.no_bound")
    torch.testing.assert_close(step(own, exp, now)[3], plain)
    clipped = Objective.from_recipe("grpo", custom_trust_region=f"{HERE}.one_sided")
    wide = Objective.from_recipe("grpo", clip_high=0.1, clip_low=1.0)
    torch.testing.assert_close(step(clipped, exp, now)[3], step(wide, exp, now)[3])


def test_own_objective() -> None:
    made = ObjectiveConfig(
        custom_objective={"class_path": f"{HERE}.own_objective", "init_args": {"clip": 0.1}}
    ).resolve()
    assert made == Objective.from_recipe("grpo", clip_low=0.1, clip_high=0.1)
