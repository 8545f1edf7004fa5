"""The recorded runs of the second benchmark are judged by the monitors as they are now; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.diagnosis.second_scoring import replay, report, summary

TRACES = sorted((Path(__file__).parent / "second_traces").glob("*.json.gz"))


@pytest.fixture(scope="module")
def runs():
    return [replay(path) for path in TRACES]


@pytest.mark.parametrize("half", ["tuning", "heldout", "fresh", "unseen"])
def test_sick_runs_are_named_and_healthy_ones_left_alone(runs, half):
    of_half = [run for run in runs if run["half"] == half]
    found = summary(of_half)
    assert found["sick"] >= 15
    assert found["healthy"] >= 8
    assert found["false_stops"] == 0, report(of_half)
    assert found["recall"] >= 0.95, report(of_half)
    assert found["right"] >= 0.9, report(of_half)
    assert found["in_time"] >= 0.9, report(of_half)


def test_there_are_enough_of_them_and_a_real_model_is_among_them(runs):
    found = summary(runs)
    assert found["healthy"] >= 24
    assert found["runs_with_untrue_warnings"] <= found["healthy"] / 10
    assert found["sick"] + found["unharmed"] >= 40
    assert len({run["name"].split("__")[1] for run in runs if run["state"] == "sick"}) >= 12
    assert sum(run["name"].startswith("qwen") for run in runs) >= 15


def test_rollbacks_save_the_real_model():
    ended = [json.loads(path.read_text()) for path in (Path(__file__).parent / "second_rollbacks").glob("*.json")]
    collapsed = [run for run in ended if run["collapsed"]]
    assert len(collapsed) >= 10
    assert sum(run["saved"] for run in collapsed) >= 0.8 * len(collapsed)
