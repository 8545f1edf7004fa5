"""Critic settings that contradict themselves, the policy or the run are refused before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.errors import UserError
from lit_grpo.learner.run_checks import check_critic_settings, warmup_rollouts
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.policy import CriticConfig, PolicyConfig, TinyModel
from lit_grpo.policy.critic import check_vocabulary
from lit_grpo.rewards import total_range
from tests import tiny
from tests.paths import ROOT

PPO = ObjectiveConfig(recipe="ppo")


@pytest.mark.parametrize(
    ("settings", "key", "what"),
    [
        ({"backbone": "shared", "tiny": tiny.TINY}, "tiny", "has no model of its own"),
        ({"backbone": "shared", "path": "models/x"}, "path", "has no model of its own"),
        ({"detach": True}, "detach", "shares no backbone"),
        ({"path": "models/x", "tiny": tiny.TINY}, "path", "both"),
        ({"path": "models/nowhere"}, "path", "no model folder"),
        ({"tiny": TinyModel(width=30, heads=4)}, "tiny.width", "cannot be split"),
        ({"bounded": True, "value_low": 1.0, "value_high": 0.0}, "value_low", "is not below"),
        ({"value_high": 2.0}, "bounded", "bound nothing"),
        ({"warmup_rollouts": -1}, "warmup_rollouts", "at least 0"),
        ({"measure_every": -1}, "measure_every", "at least 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm", "above 0"),
    ],
)
def test_contradictions_are_refused_at_once(settings: dict[str, Any], key: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as error:
        tiny.module(objective=PPO, critic=CriticConfig(**settings))
    assert error.value.where == f"model.critic.{key}"


def test_a_critic_of_its_own_must_read_the_policys_tokens() -> None:
    policy = PolicyConfig(tiny=tiny.TINY)
    check_vocabulary(policy, CriticConfig(tiny=TinyModel(width=16, layers=1, heads=2)))
    with pytest.raises(UserError, match=r"'=' has id 11 for the policy and is unknown") as error:
        check_vocabulary(policy, CriticConfig(tiny=TinyModel(alphabet="0123456789+")))
    assert error.value.where == "model.critic.tiny"
    with pytest.raises(UserError, match="has id"):
        check_vocabulary(policy, CriticConfig(tiny=TinyModel(alphabet="+0123456789=")))


def run(critic: CriticConfig, rewards: tuple[float, float] = (0.0, 1.0), **objective: Any) -> None:
    given = Objective.from_recipe(objective.pop("recipe", "ppo"), **objective)
    check_critic_settings(critic, given, rollouts=10, max_new_tokens=100, reward_range=rewards)


def test_a_warm_up_must_leave_rollouts_for_the_policy() -> None:
    run(CriticConfig(warmup_rollouts=9))
    with pytest.raises(UserError, match="no shorter than the run of 10") as error:
        run(CriticConfig(warmup_rollouts=10))
    assert error.value.where == "model.critic.warmup_rollouts"


def test_a_recipe_brings_the_warm_up_it_was_published_with() -> None:
    vapo, ppo = Objective.from_recipe("vapo", length_alpha=1.0), Objective.from_recipe("ppo")
    assert warmup_rollouts(CriticConfig(), vapo) == 50
    assert warmup_rollouts(CriticConfig(warmup_rollouts=0), vapo) == 0
    assert warmup_rollouts(CriticConfig(), ppo) == warmup_rollouts(CriticConfig(), replace(ppo, recipe="own")) == 0
    with pytest.raises(UserError, match=r"50 rollouts \(what vapo was published with\) is no shorter"):
        run(CriticConfig(), recipe="vapo")


def test_bounded_values_must_reach_every_reward() -> None:
    bounded = CriticConfig(bounded=True)
    run(bounded)
    run(bounded, (-math.inf, math.inf))  # rewards that do not say
    for rewards, changes, key in (
        ((0.0, 2.0), {}, "value_high"),
        ((-1.0, 1.0), {}, "value_low"),
        ((0.0, 1.0), {"reward_map": "signed"}, "value_low"),
        ((0.0, 1.0), {"overlong_penalty": True}, "value_low"),
    ):
        with pytest.raises(UserError, match="could not learn them") as error:
            run(bounded, rewards, **changes)
        assert error.value.where == f"model.critic.{key}"
    run(CriticConfig(bounded=True, value_low=-1.0), reward_map="signed")


def test_settings_that_are_hardly_meant_are_said_aloud() -> None:
    with pytest.warns(UserWarning, match="lambda is 0 for every completion of at most 200 tokens"):
        run(CriticConfig(warmup_rollouts=1), recipe="vapo", length_alpha=0.005)
    with pytest.warns(UserWarning, match="warmup_rollouts is 0"):
        run(CriticConfig(warmup_rollouts=0), recipe="vapo")


def test_the_range_of_the_total_reward_is_that_of_the_weighted_sum() -> None:
    class Half(tiny.EvenReward):
        range = (0.0, 0.5)

    class Open(tiny.EvenReward):
        pass

    assert total_range([Half(weight=2.0), Half(weight=-1.0)]) == (-0.5, 1.0)
    assert total_range([Half(), Open()]) == (-math.inf, math.inf)
    assert total_range([Half(), Open(weight=0.0)]) == (0.0, 0.5)


@pytest.mark.parametrize(("recipe", "backbone"), [("ppo", "separate"), ("vapo", "shared")])
def test_the_quickstart_configurations_run_from_the_command_line(
    recipe: str, backbone: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lit_grpo.cli.main import main

    root = ROOT / "configs"
    monkeypatch.chdir(tmp_path)
    small = "model: {critic: {warmup_rollouts: 1}, minibatch_prompts: 1}\n"
    small += "data: {rollouts: 2, prompts_per_rollout: 2, group_size: 2}\n"
    small += "trainer: {logger: false, enable_checkpointing: false, callbacks: [], enable_progress_bar: false}\n"
    (tmp_path / "small.yaml").write_text(small)
    files = [root / "quickstart.yaml", root / f"quickstart/{recipe}.yaml", tmp_path / "small.yaml"]
    arguments = [text for path in files for text in ("--config", str(path))]
    assert main(["fit", *arguments, "--model.critic.backbone", backbone]) == 0
    # What a person may well get wrong ends in one screen, before anything is sampled.
    assert main(["fit", *arguments, "--model.critic.warmup_rollouts", "2"]) == 2
    own = ["--model.objective.length_alpha", "null", "--model.objective.whiten", "null"]
    assert main(["fit", *arguments, "--model.objective.recipe", "grpo", *own]) == 2
