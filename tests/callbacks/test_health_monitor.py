"""One diagnosis a time, written down, told to MLflow, and acted on as the configuration says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import Diagnosis, HealthMonitor, Monitor, monitors, stop_reason
from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.callbacks.diagnosis.findings import Evidence, Finding
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.monitors.monitor import REARM
from lit_grpo.errors import UserError
from lit_grpo.tracking import RunLogger
from tests.callbacks.monitors.test_monitors import TROUBLES, make
from tests.callbacks.synthetic import changed, healthy
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer
from tests.waiting import PATIENCE


class At(Monitor):
    """Speaks at given steps."""

    keys = ("reward",)

    def __init__(self, **at: tuple[int, str]) -> None:
        super().__init__()
        self.at = at

    def check(self, step: int, metrics: Mapping[str, float]) -> Any:
        for kind, (when, severity) in self.at.items():
            if step == when:
                yield self.finding(kind, severity, kind, ("reward", 1, 0.5, 1.0), remedies=("mend it",))  # type: ignore[arg-type]


def fit(folder, watcher, count=6, logger=False):
    trainer = make_trainer(logger, [watcher], default_root_dir=str(folder))
    trainer.fit(StandIn(), StandInLoader(count))
    return trainer


def test_a_critical_diagnosis_stops_and_milder_ones_are_written_down(tmp_path):
    watcher = HealthMonitor([At(truncated=(2, "warning"), entropy_high=(4, "critical"), slow=(4, "info"))])
    trainer = fit(tmp_path, watcher)
    reason = stop_reason(trainer)
    assert reason is not None
    assert (reason.step, reason.monitor) == (4, "HealthMonitor")
    assert reason.reason.startswith("entropy_explosion: ")
    lines = read_journal(tmp_path / "findings.jsonl")
    assert [(line["event"], line["step"]) for line in lines] == [
        ("finding", 2),
        ("diagnosis", 2),
        ("finding", 4),
        ("finding", 4),
        ("diagnosis", 4),
    ]
    diagnosis = Diagnosis.from_dict(lines[-1])
    assert diagnosis.name == "entropy_explosion"
    assert [f.kind for f in diagnosis.findings] == ["entropy_high", "truncated", "slow"]
    assert diagnosis.remedies == ("mend it",)
    assert (lines[1]["action"], lines[-1]["action"]) == ("log", "stop")


def test_a_monitor_alone_says_what_is_over_too(tmp_path):
    trainer = make_trainer(False, [At(slow=(2, "info"))], default_root_dir=str(tmp_path))
    trainer.fit(StandIn(), StandInLoader(2 + REARM + 2))
    lines = read_journal(tmp_path / "findings.jsonl")
    assert [(line["event"], line["step"]) for line in lines] == [
        ("finding", 2),
        ("diagnosis", 2),
        ("over", 2 + REARM + 1),
    ]
    assert (lines[0]["diagnosis"], lines[2]["diagnosis"]) == ("slow_down", "slow_down")


def test_the_name_of_a_diagnosis_wins_over_its_severity(tmp_path):
    watcher = HealthMonitor([At(reward_noise=(2, "critical"))], actions={"reward_noise": "log"})
    assert stop_reason(fit(tmp_path, watcher)) is None
    watcher = HealthMonitor([At(truncated=(2, "warning"))], actions={"warning": "stop"})
    reason = stop_reason(fit(tmp_path, watcher))
    assert reason is not None
    assert reason.step == 2


def test_a_milder_finding_does_not_repeat_the_action_of_a_graver_one(tmp_path):
    watcher = HealthMonitor([At(entropy_high=(2, "critical"), slow=(3, "info"))], actions={"critical": "adjust"})
    fit(tmp_path, watcher)
    assert watcher.adjusted == ["entropy_explosion"]
    actions = [line["action"] for line in read_journal(tmp_path / "findings.jsonl") if line["event"] == "diagnosis"]
    assert actions == ["adjust", "log"]


def test_a_milder_finding_is_told_by_itself_while_what_was_told_holds_on(tmp_path):
    fit(tmp_path, HealthMonitor([At(truncated=(2, "warning"), slow=(3, "info"), learning_rate=(4, "warning"))]))
    told = [line for line in read_journal(tmp_path / "findings.jsonl") if line["event"] == "diagnosis"]
    assert [(line["step"], line["diagnosis"], line["severity"]) for line in told[:2]] == [
        (2, "truncation", "warning"),
        (3, "slow_down", "info"),
    ]
    assert "truncated" not in told[1]["explanation"]
    # What is as grave is told together with what holds.
    assert {finding["kind"] for finding in told[2]["findings"]} == {"truncated", "slow", "learning_rate"}
    assert len(told) == 3


def test_the_tag_of_a_diagnosis_that_is_over_says_so(tmp_path, monkeypatch):
    tags: list[dict[str, Any]] = []
    logger = RunLogger(root=str(tmp_path), run_name="r", tracking_uri="none")
    monkeypatch.setattr(logger, "set_tags", lambda new: tags.append(dict(new)))
    watcher = HealthMonitor([At(truncated=(2, "warning"), slow=(3, "info"))])
    fit(tmp_path, watcher, 3 + REARM + 2, logger)
    of_diagnoses = [(t["diagnosis"], t["diagnosis_step"]) for t in tags if "diagnosis" in t]
    assert of_diagnoses[0] == ("truncation", 2)
    assert of_diagnoses[-2:] == [("slow_down", 3 + REARM), ("none", 4 + REARM)]


@pytest.mark.slow
def test_mlflow_gets_tags_status_and_the_journal(tmp_path, mlflow_runs):
    import mlflow

    logger = RunLogger(root=str(mlflow_runs), run_name="r")
    fit(tmp_path, HealthMonitor([At(c_pl=(3, "critical"))]), logger=logger)
    # The end of the run waits for MLflow only as long as it makes progress; a loaded machine may need longer.
    assert logger.flush(PATIENCE)
    client = mlflow.MlflowClient(f"sqlite:///{mlflow_runs}/mlflow.db")
    assert logger.run_id is not None
    run = client.get_run(logger.run_id)
    assert run.data.tags["diagnosis"] == "C_PL"
    assert run.data.tags["diagnosis_step"] == "3"
    assert run.data.tags["stop.callback"] == "HealthMonitor"
    assert run.info.status == "KILLED"
    assert "findings.jsonl" in [a.path for a in client.list_artifacts(logger.run_id)]
    assert (mlflow_runs / "r" / "findings.jsonl").exists()


@pytest.mark.parametrize("number", range(len(TROUBLES)), ids=[f"{n}-{k}-{i}" for i, (n, k, *_) in enumerate(TROUBLES)])
def test_a_monitor_cut_anywhere_goes_on_as_if_it_had_not_been(tmp_path, number):
    name, *_, change = TROUBLES[number]
    run = changed(change, steps=100)
    whole = make(name)
    wanted = [whole.observe(t, metrics) for t, metrics in enumerate(run, 1)]
    for cut in (2, 63, 68):  # at the start, and while the trouble, which begins at 60, is being counted
        before, after = make(name), make(name)
        found = [before.observe(t, metrics) for t, metrics in enumerate(run[: cut - 1], 1)]
        torch.save(before.state_dict(), tmp_path / "state.pt")
        after.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert after.state_dict() == before.state_dict()
        found += [after.observe(t, metrics) for t, metrics in enumerate(run[cut - 1 :], cut)]
        assert found == wanted, f"cut at {cut}"
        assert after.state_dict() == whole.state_dict(), f"cut at {cut}"


def test_all_of_it_survives_a_checkpoint(tmp_path):
    watcher = HealthMonitor()
    for t, metrics in enumerate(healthy(30), 1):
        watcher.observe(t, metrics)
    watcher.targets, watcher.adjusted, watcher.ring.saved = [4], ["C_PL"], [0, 10]
    watcher._changed = [{"recipe": "grpo"}]
    torch.save(watcher.state_dict(), tmp_path / "state.pt")
    again = HealthMonitor()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict() == watcher.state_dict()
    fewer = HealthMonitor([monitors.EntropyMonitor()])
    fewer.load_state_dict(watcher.state_dict())
    assert fewer.monitors[0].state_dict() == watcher.monitors[monitors.__all__.index("EntropyMonitor")].state_dict()


def test_findings_survive_json_also_with_numbers_that_are_none():
    evidence = (Evidence("loss", 1, float("inf"), 2.0), Evidence("entropy", 20, 1.9, 0.6, 0.31))
    found = Finding("M", "c_nl", 212, 200, "critical", evidence, "it → broke", ("mend", "it"))
    assert Finding.from_json(found.to_json()) == found
    json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    with pytest.raises(ValueError, match="onset"):
        Finding("M", "c_nl", 1, 2, "critical", (), "")
    with pytest.raises(ValueError, match="severity"):
        Finding("M", "c_nl", 1, 1, "fatal", (), "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: HealthMonitor(actions={"C_XL": "stop"}),
        lambda: HealthMonitor(actions={"critical": "pray"}),
        lambda: HealthMonitor(remedies={"C_XL": Remedy()}),
        lambda: HealthMonitor(rollbacks=-1),
    ],
)
def test_bad_arguments_are_refused(wrong):
    with pytest.raises(UserError, match="HealthMonitor"):
        wrong()


def test_from_yaml_to_exit_code_3(tmp_path, monkeypatch, capsys):
    from lit_grpo.cli.main import STOPPED, main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tell.py").write_text("import sys; open('told.jsonl', 'a').write(sys.stdin.read() + '\\n')")
    (tmp_path / "config.yaml").write_text(
        """
model:
  policy: {tiny: {alphabet: "0123456789+=", layers: 1, width: 16, heads: 2}}
  optimizer: {lr: 1.0e-3}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1}}
  rewards: [{class_path: lit_grpo.rewards.ExactMatch}]
  group_size: 2
  prompts_per_rollout: 2
  rollouts: 4
  sampling: {max_new_tokens: 3}
trainer:
  logger: {class_path: lit_grpo.tracking.RunLogger, init_args: {run_name: r}}
  callbacks:
    - class_path: lit_grpo.callbacks.HealthMonitor
      init_args:
        monitors:
          - {class_path: lit_grpo.callbacks.LengthMonitor, init_args: {truncation_once: 0.01}}
        actions: {truncation: stop}
        remedies: {C_NL: {lr_scale: 0.3, adds: both_signs}}
        notify: {command: "python3 tell.py", severity: warning, on_end: true, timeout: 180}
"""
    )
    assert main(["fit", "--config", "config.yaml"]) == STOPPED == 3
    assert "truncation: completions hit the length limit" in capsys.readouterr().err
    assert json.loads((tmp_path / "runs/r/run.json").read_text())["tags"]["diagnosis"] == "truncation"
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [(m["event"], m["diagnosis"], m["run"], m["action"]) for m in told] == [
        ("diagnosis", "truncation", "r", "stop"),
        ("end", "truncation", "r", None),
    ]
    assert "✖ stopped: truncation" in (tmp_path / "runs/r/report.html").read_text()
