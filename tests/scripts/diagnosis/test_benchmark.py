"""The benchmark from end to end, on a model that has hardly been taught and runs of a few rollouts."""

from __future__ import annotations

import json

import pytest

from lit_grpo.objectives import ObjectiveConfig
from scripts import diagnosis_benchmark
from scripts.diagnosis.cases import CASES
from scripts.diagnosis_benchmark import main
from scripts.warm_start_two_form_addition import warm_start


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    warm_start(folder / "two_form_addition", steps=5)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_objective_of_every_case_exists(case):
    ObjectiveConfig(recipe=case.recipe, **case.objective).resolve()


@pytest.mark.slow
def test_runs_end_to_end(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis_benchmark, "fingerprint", lambda: "this code")  # it may be edited meanwhile
    common = ["--models", str(models), "--jobs", "1", "--parts", "diagnosis", "--rollouts", "2"]
    common += ["--out", str(tmp_path / "runs.jsonl"), "--only", "healthy_grpo_slow", "shuffled_groups"]
    result = tmp_path / "result.json"
    assert main([*common, "--json", str(result), "--record", str(tmp_path / "traces")]) == 0
    written = json.loads(result.read_text())
    assert {"recall", "right_class", "rollback_saved", "false_stops"} <= set(written["summary"])
    assert written["summary"]["false_stops"] == 0
    runs = {run["name"]: run for run in written["runs"]}
    assert {name: run["steps"] for name, run in runs.items()} == {"healthy_grpo_slow": 2, "shuffled_groups": 2}
    caught = runs["shuffled_groups"]
    assert caught["right"]
    assert (caught["diagnosis"], caught["onset"], caught["step"]) == ("plumbing_groups", 1, 1)
    assert "| shuffled_groups 0 | plumbing_groups | plumbing_groups" in capsys.readouterr().out

    # What has ended is not run again, and a recorded run replays to the same.
    lines = (tmp_path / "runs.jsonl").read_text()
    assert main([*common, "--json", str(result)]) == 0
    assert (tmp_path / "runs.jsonl").read_text() == lines
    assert main(["--replay", str(tmp_path / "traces"), "--json", str(result)]) == 0
    again = {run["name"]: run for run in json.loads(result.read_text())["runs"]}
    for name, run in runs.items():
        assert again[name]["all"] == run["all"]
