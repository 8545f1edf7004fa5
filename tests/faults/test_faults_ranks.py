"""Two ranks that were started each on its own: signalled apart from each other, stopped, killed, broken off."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_in_process

pytestmark = pytest.mark.slow


def strike(folder: str, signals: Any, extra: tuple[str, ...], in_mlflow: bool) -> None:
    """Run in a process of its own, whose forks are the ranks: this one may have threads by now."""
    from scripts.chaos_cases import forked_runs, rank_faults

    forked_runs.preload()
    outcome = rank_faults.strike(Path(folder) / "ranks", signals, extra=extra, in_mlflow=in_mlflow)
    (Path(folder) / "outcome.json").write_text(json.dumps(asdict(outcome) | {"messages": outcome.messages}))


def struck(folder: Path, signals: Any, *extra: str, in_mlflow: bool = False) -> dict[str, Any]:
    assert run_in_process(strike, str(folder), signals, extra, in_mlflow) == 0
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return outcome


TERM, KILL, STOP = 15, 9, 19


@pytest.mark.parametrize(
    "signals", [[(1, TERM, 0.0), (0, TERM, 1.5)], [(1, TERM, 0.0)]], ids=["1.5 s apart", "rank 1 alone"]
)
def test_ranks_that_are_signalled_apart_save_and_end_together(tmp_path, signals):
    outcome = struck(tmp_path, signals)
    assert outcome["codes"] == [143, 143], outcome["text"]
    assert outcome["saved"] == outcome["steps"] > 0
    assert outcome["messages"] == []


def test_a_rank_that_is_killed_is_named_once(tmp_path):
    outcome = struck(tmp_path, [(1, KILL, 0.0)], in_mlflow=True)
    assert outcome["codes"] == [1, -9], outcome["text"]
    (message,) = outcome["messages"]
    assert "rank 1 (process " in message
    assert "has died. The run cannot go on without it and ends." in message
    import sqlite3

    # The run's end is told to MLflow too, though no exception could reach the main thread.
    with sqlite3.connect(next(tmp_path.glob("ranks/runs/mlflow.db"))) as store:
        assert store.execute("select status from runs").fetchall() == [("FAILED",)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_ends_all(tmp_path, rank):
    outcome = struck(tmp_path, [(rank, STOP, 0.0)], "--model.guards.max_rank_silence", "4")
    assert sorted(outcome["codes"]) == [-9, 1], outcome["text"]
    (message,) = outcome["messages"]
    assert f"rank {rank} (process " in message
    assert "has given no sign of life for 4 seconds" in message
