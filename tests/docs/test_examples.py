"""The examples of docs/examples run, learn where they say so, and stay short."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))
PAGE = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")


def main_of(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "docs/examples"))
    return __import__(name).main


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_its_place_on_the_page(path: Path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) < 60
    assert f"examples/{path.name}" in PAGE


def test_the_objectives_alone_learn(monkeypatch, tmp_path):
    assert main_of("plain_loop", monkeypatch, tmp_path)() > 2.5


@pytest.mark.parametrize("recipe", ["dr_grpo", "gspo", "cispo"])
def test_the_plain_loop_takes_other_recipes(recipe, monkeypatch, tmp_path):
    assert main_of("plain_loop", monkeypatch, tmp_path)(recipe=recipe) > 2.5


def test_an_own_loss_trains(monkeypatch, tmp_path):
    module = main_of("own_loss", monkeypatch, tmp_path)()
    assert module.objective.name == "grpo+advantage=custom+trust_region=custom"
    assert module.optimizer_steps > 0


def test_an_own_loss_is_what_it_says(monkeypatch, tmp_path):
    import torch

    from lit_grpo.objectives import Objective
    from lit_grpo.types import Experience

    main_of("own_loss", monkeypatch, tmp_path)
    own = Objective.from_recipe("grpo", custom_advantage="own_loss.leave_one_out")
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0])
    lengths = torch.ones(4, dtype=torch.int64)
    group, cut = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
    advantages, _ = own.advantages(Experience(lengths, group, rewards, cut), own.new_state())
    others = [(3.0 - r) / 3 for r in rewards.tolist()]
    assert advantages.flatten().tolist() == pytest.approx(
        [r - o for r, o in zip(rewards.tolist(), others, strict=True)]
    )


def test_an_own_engine_agrees_with_the_learner(monkeypatch, tmp_path):
    module = main_of("own_engine", monkeypatch, tmp_path)()
    assert module.step_metrics["sampler_mismatch/logprob_abs_diff"] < 1e-5


def test_an_own_module_learns_from_the_rollouts(monkeypatch, tmp_path):
    module = main_of("own_module", monkeypatch, tmp_path)(rollouts=3)
    assert module.policy_version == 3


def test_an_own_callback_stops_the_run(monkeypatch, tmp_path):
    trainer = main_of("own_trainer", monkeypatch, tmp_path)(rollouts=8, bar=0.0)
    assert trainer.global_step == 5


def test_each_example_is_a_program_too(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs/examples/own_engine.py"), run_name="__main__")
    assert "nats" in capsys.readouterr().out


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    pytest.importorskip("optuna", reason="the sweep needs optuna: pip install 'lit-grpo[sweep]' (.ci/run installs it)")
    return main_of("sweep_optuna", monkeypatch, tmp_path)


def test_a_sweep_has_its_trials_below_it_and_one_page(sweep, tmp_path):
    from mlflow import MlflowClient

    study = sweep(trials=2, rollouts=2)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("sweep")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"sweep", "trial-0", "trial-1"}
    parent = runs["sweep"]
    assert parent.info.status == "FINISHED"
    assert float(parent.data.params["lr"]) == study.best_params["lr"]
    assert parent.data.metrics["reward"] == study.best_value
    for trial in study.trials:
        child = runs[f"trial-{trial.number}"]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert float(child.data.params["model.optimizer.lr"]) == trial.params["lr"]
        assert child.data.metrics["reward"] == trial.value
    page = (tmp_path / "runs" / "sweep" / "report.html").read_text()
    # The settings in which the trials differ, told from what runs of a program leave.
    for expected in ("trial-0", "trial-1", "model.optimizer.lr", str(study.trials[0].params["lr"])):
        assert expected in page


def test_a_trial_that_is_given_up_ends_early_and_says_so(sweep, tmp_path, monkeypatch):
    import optuna
    from mlflow import MlflowClient

    class Never(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1 and trial.last_step == 1

    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda **_: Never())
    study = sweep(trials=2, rollouts=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert len(study.trials[1].intermediate_values) == 1
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (cut,) = [run for run in runs if run.info.run_name == "trial-1"]
    assert (cut.info.status, cut.data.tags["stop.reason"]) == ("KILLED", "Optuna pruned the trial")
