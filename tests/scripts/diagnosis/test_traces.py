"""Recorded runs of the benchmark, seed 0, are judged as before by all monitors.

Nothing is trained, so a changed threshold shows here at once. Each file is a trace of ``scripts/diagnosis_benchmark.py
--record``, turned into columns (null: not logged in that rollout), four digits, with the metrics that some monitor
reads, times and memory left out. ``groups/zero_advantage_frac`` was not logged when they were recorded; it follows
from the recipe and the other columns: groups of equal rewards for GRPO, solved ones for NL, unsolved ones for PL, none
for CL and PPO.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.callbacks import HealthMonitor
from scripts.diagnosis.cases import find
from scripts.diagnosis.scoring import judge

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))


def verdict(trace: dict[str, Any]) -> dict[str, Any]:
    columns, monitor = trace["columns"], HealthMonitor()
    rollouts = len(trace["correct"])
    said = []
    for k in range(rollouts):
        metrics = {key: values[k] for key, values in columns.items() if values[k] is not None}
        said.append(monitor.observe(k + 1, metrics)[1])
    case = find(trace["name"].rsplit("_seed", 1)[0])
    return judge(case, trace["correct"], case.make().start, [d.to_dict() for d in said if d is not None])


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_recorded_run_is_named_in_time_or_left_alone(path):
    trace = json.loads(path.read_text(encoding="utf-8"))
    found = verdict(trace)
    assert (found["onset"], found["lost"]) == (trace["onset"], trace["lost"])
    assert found["false_alarms"] == 0
    assert found["right"] == found["in_time"] == (trace["sabotage"] is not None), found["all"]


def test_healthy_runs_and_collapses_are_among_them():
    names = {path.stem for path in TRACES}
    assert {"healthy_grpo", "healthy_ppo", "nl", "pl", "cl", "learning_rate", "paid_length"} <= names
