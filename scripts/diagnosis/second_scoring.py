"""Judge what the monitors say of the second benchmark's recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lit_grpo.callbacks import Diagnosis, HealthMonitor
from lit_grpo.callbacks.monitors.facts import facts_of
from lit_grpo.objectives.objective import Objective
from scripts.diagnosis.recording import read_trace
from scripts.diagnosis.scoring import judge, reward_fall
from scripts.diagnosis.second_cases import CASES, SecondCase

COUNTS = frozenset({"truncation", "no_signal", "none_right", "solved", "small_batch"})
"""Warnings that state an exact count, such as that most completions were cut: they are true of healthy runs too, so
they are no false alarms, and no detection of anything else."""


def said_of(objective: Mapping[str, Any], steps: Sequence[dict[str, float]]) -> list[Diagnosis]:
    """Show the metrics of a recorded run to all monitors with their defaults, and return what they diagnose.

    Args:
        objective: the run's objective, as its configuration has it.
        steps: metrics of each rollout.
    """
    settings, monitor = dict(objective), HealthMonitor()
    facts = facts_of(SimpleNamespace(objective=Objective.from_recipe(settings.pop("recipe"), **settings)))
    for one in monitor.monitors:
        one.facts = facts
    said = [monitor.observe(step, metrics)[1] for step, metrics in enumerate(steps, 1)]
    return [diagnosis for diagnosis in said if diagnosis is not None]


def replay(path: Path) -> dict[str, Any]:
    """Show a recorded run to the monitors, and judge what they say.

    Returns:
        What :func:`scripts.diagnosis.scoring.judge` returns, ``name``, ``seed``, ``half`` and ``state``: ``healthy``,
        ``sick``, or ``unharmed`` for a sabotage that did no harm in this run, which neither counts.
    """
    trace = read_trace(path)
    case = CASES[trace["name"]]
    alarms = [diagnosis.to_dict() for diagnosis in said_of(trace["facts"]["objective"], trace["metrics"])]
    alarms = [a for a in alarms if a["severity"] == "critical" or a["diagnosis"] not in COUNTS - case.right]
    found = judge(case, trace["correct"], trace["start"], alarms, twin_of(path, case, trace["seed"]))
    unharmed = not case.healthy and case.onset == "reward" and found["onset"] is None
    state = "healthy" if case.healthy else "unharmed" if unharmed else "sick"
    return {"name": trace["name"], "seed": trace["seed"], "half": trace["seeds"], "state": state, **found}


def twin_of(path: Path, case: SecondCase, seed: int) -> list[float] | None:
    """Return the share of right answers of the healthy run on the same questions, where a run is judged beside it.

    That is where the healthy run itself loses a fifth of its best by the rule for a run alone: there the rule measures
    the difficulty of each rollout's questions, and would call every run of that seed collapsed.
    """
    twin = path.with_name(f"{case.setting}__grpo_seed{seed}.json.gz")
    if twin == path or not twin.exists():
        return None
    correct = [float(share) for share in read_trace(twin)["correct"]]
    return None if reward_fall(correct) is None else correct


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up judged runs: shares of the sick ones (None where there is none), counts of the healthy ones."""
    sick = [run for run in runs if run["state"] == "sick"]
    healthy = [run for run in runs if run["state"] == "healthy"]
    fell = [run for run in sick if run["lost"] is not None]

    def share(of: Sequence[Mapping[str, Any]], key: str) -> float | None:
        return sum(bool(run[key]) for run in of) / len(of) if of else None

    return {
        "sick": len(sick),
        "healthy": len(healthy),
        "unharmed": len(runs) - len(sick) - len(healthy),
        "recall": share(sick, "detected"),
        "right": share(sick, "right"),
        "fell": len(fell),
        "in_time": share(fell, "in_time"),
        "false_stops": sum(run["false_stop"] for run in healthy),
        "runs_with_untrue_warnings": sum(run["false_alarms"] > 0 for run in healthy),
    }


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Write one line a run as a Markdown table."""
    lines = [
        "| run | seed | is | called | alarm | onset | a fifth lost |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        right = "healthy" if run["state"] == "healthy" else " or ".join(run["expected"])
        right += " (unharmed)" if run["state"] == "unharmed" else ""
        called = "-" if run["diagnosis"] is None else f"{run['diagnosis']} ({run['severity']}, {run['verdict_step']})"
        if run["state"] == "healthy" and run["all"]:
            called = ", ".join(f"{name} ({severity}, {step})" for step, name, severity in run["all"])
        cells = [run["name"], run["seed"], right, called, run["step"], run["onset"], run["lost"]]
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)
