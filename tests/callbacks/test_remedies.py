"""Remedies are computed from the present objective, tried at set-up, and never end the run that they are to save."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest

from lit_grpo.callbacks import HealthMonitor
from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig
from tests import tiny
from tests.callbacks.test_health_monitor import At

EVERY = ("C_PL", "C_NL", "TN_PL", "TN_NL", "advantage_inverted", "entropy_collapse", "entropy_explosion")
KIND = {"entropy_collapse": "entropy_low", "entropy_explosion": "entropy_high"}


def fit(folder: Any, watcher: HealthMonitor, rollouts: int = 4, **changes: Any) -> tuple[Any, Any]:
    module = tiny.module(guards={"max_engine_gap": None, "max_ratio_gap": None}, **changes)
    trainer = tiny.trainer(callbacks=[watcher], default_root_dir=str(folder))
    trainer.fit(module, datamodule=tiny.data(rollouts=rollouts))
    return module, trainer


class Once(At):
    """Speaks once in a fit, also where the run goes back to before it spoke."""

    def check(self, step: int, metrics: Mapping[str, float]) -> Any:
        found = list(super().check(step, metrics))
        if found:
            self.at = {}
        yield from found


def ill(diagnosis: str, action: str, **settings: Any) -> HealthMonitor:
    kind = KIND.get(diagnosis, diagnosis.lower())
    return HealthMonitor(
        [Once(**{kind: (2, "critical")})], actions={"critical": action}, checkpoint_every=1, **settings
    )


@pytest.mark.parametrize("action", ["adjust", "rollback"])
@pytest.mark.parametrize("diagnosis", EVERY)
@pytest.mark.parametrize(
    "settings",
    [
        {"objective": ObjectiveConfig(recipe="dapo", overlong_penalty=False), "updates_per_rollout": 2},
        {"objective": ObjectiveConfig(recipe="ppo"), "critic": CriticConfig()},
        {"objective": ObjectiveConfig(recipe="gtpo")},
    ],
    ids=["dapo", "ppo", "gtpo"],
)
@pytest.mark.slow
def test_no_remedy_ends_a_run_or_takes_a_safeguard(tmp_path, settings, diagnosis, action):
    """Under a critic the remedy, recipe grpo, ended the run; from dapo it took all that dapo is."""
    watcher = ill(diagnosis, action)
    before = settings["objective"].resolve()
    module, trainer = fit(tmp_path, watcher, **settings)
    assert module.policy_version == 4
    assert not trainer.should_stop
    then = module.objective
    assert (then.filters, then.aggregation.kind) == (before.filters, before.aggregation.kind)
    assert (then.sampler, then.advantage, then.shaping.overlong_penalty) == (before.sampler, before.advantage, False)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * tiny.module().optimizer_config.lr)


def test_what_is_lacking_arrives(tmp_path):
    watcher = ill("C_NL", "adjust")
    module, _ = fit(tmp_path, watcher, objective=ObjectiveConfig(recipe="nl", mask_truncated=True))
    assert module.objective.filters.keep_sign == "all"
    assert module.objective.filters.mask_truncated
    assert module.objective.advantage.kind == "group_std"
    event = next(line for line in read_journal(tmp_path / "findings.jsonl") if line["event"] == "adjust")
    assert event["remedy"]["objective"] == {"keep_sign": "all", "advantage": "group_std"}
    assert "adds" not in event["remedy"], "what was done is written down, not what was meant"


def test_settings_of_a_part_that_is_replaced_are_given_up(tmp_path):
    own = ObjectiveConfig(recipe="cl", negative_weight=-0.5)
    module, _ = fit(tmp_path, ill("C_NL", "adjust"), objective=own)
    assert module.objective.name == "cl+advantage=group_std"
    assert module.objective_config.negative_weight is None


def test_a_remedy_of_your_own_that_does_not_fit_is_refused_before_a_model_is_loaded(tmp_path):
    watcher = ill("C_NL", "adjust", remedies={"C_NL": Remedy(0.5, {"kl_coef": 0.1})})
    module = tiny.module()
    with pytest.raises(UserError, match=r"remedy of C_NL does not fit this run: grpo.* needs a reference model"):
        tiny.trainer(callbacks=[watcher], default_root_dir=str(tmp_path)).fit(module, datamodule=tiny.data(rollouts=1))
    assert module.policy is None
    typo = ill("C_NL", "rollback", remedies={"C_NL": {"objective": {"clip_hihg": 0.3}}})
    with pytest.raises(UserError, match="unknown override 'clip_hihg'"):
        fit(tmp_path, typo)


def test_a_remedy_that_no_action_asks_for_is_not_tried(tmp_path):
    wrong = {"C_NL": Remedy(0.5, {"kl_coef": 0.1})}
    fit(tmp_path, HealthMonitor([At()], actions={"critical": "stop"}, remedies=wrong), rollouts=1)
    fit(tmp_path, HealthMonitor([At()], actions={"truncation": "adjust"}, remedies=wrong), rollouts=1)


def test_a_declared_remedy_that_does_not_fit_is_a_lower_rate_and_said_in_one_line(tmp_path, caplog, monkeypatch):
    watcher = ill("C_NL", "adjust")
    watcher.remedies |= {"C_NL": Remedy(0.25, {"kl_coef": 0.1}), "C_PL": Remedy(0.25, {"kl_coef": 0.1})}
    module, trainer = fit(tmp_path, watcher)
    said = [r.getMessage() for r in caplog.records if "HealthMonitor: after" in r.getMessage()]
    assert len(said) == 1
    assert "after C_PL, C_NL the learning rate would be lowered" in said[0]
    assert module.objective.name == "grpo"
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25 * module.optimizer_config.lr)
    event = next(line for line in read_journal(tmp_path / "findings.jsonl") if line["event"] == "adjust")
    assert "needs a reference model" in event["instead"]


def test_a_trial_leaves_nothing_behind(caplog):
    module = tiny.module(objective=ObjectiveConfig(recipe="rent"), updates_per_rollout=2)
    module.connect(tiny.context(4))
    before = dict(vars(module))
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.simplefilter("error")
        caplog.clear()
        assert module.can_change_objective({"recipe": "gtpo"}) is None
        refused = module.can_change_objective({"recipe": "ppo"})
        assert caplog.records == []
    assert refused is not None
    assert "critic" in refused.what
    assert vars(module) == before
    assert module.can_change_objective({"kl_coef": 0.5}) is None, "rent makes a reference model, once the fit begins"


def test_another_project_gets_a_lower_rate():
    class Plain(pl.LightningModule):
        pass

    assert Remedy(0.5, adds="both_signs").fitted(Plain()) == (Remedy(0.5), "")
    assert Remedy(1.0, {"clip_high": 0.3}).fitted(Plain()) == (Remedy(0.5), "")
    assert Remedy(0.1).fitted(Plain()) == (Remedy(0.1), "")


def test_bad_remedies_are_refused():
    with pytest.raises(UserError, match=r"'luck' is no safeguard[\s\S]*exploration, both_signs"):
        Remedy(adds="luck")
    assert Remedy(1.0, adds="exploration").fitted(tiny.module())[0] == Remedy(0.5), "nothing is lacking"
