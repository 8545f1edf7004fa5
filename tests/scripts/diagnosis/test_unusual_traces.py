"""Recorded unusual runs: what is said of the sick ones is true of them, and no healthy one is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.diagnosis.recording import read_trace
from scripts.diagnosis.unusual_cases import CASES, COUNTS
from scripts.unusual_runs import line, said

TRACES = sorted((Path(__file__).parent / "unusual_traces").glob("*.json.gz"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.split("_seed")[0])
def test_what_is_said_is_true(path: Path) -> None:
    trace = read_trace(path)
    case, diagnoses = CASES[trace["name"]], said(trace)
    alarms = [d for d in diagnoses if d.severity != "info" and d.name not in COUNTS]
    assert line(trace, diagnoses, words=True).startswith("SICK" if case.sick else "well")
    assert {d.name for d in alarms} <= case.true, line(trace, diagnoses, words=True)
    if case.sick:
        assert [d for d in diagnoses if d.name in case.true]
    else:
        assert not [d for d in diagnoses if d.severity == "critical"]


def test_both_kinds_are_there_and_small() -> None:
    names = {read_trace(path)["name"] for path in TRACES}
    assert {"harder_at_once", "harder_slowly", "verifier_0", "verifier_part", "top_p", "clip_tiny"} <= names
    assert all(path.stat().st_size < 20_000 for path in TRACES)
