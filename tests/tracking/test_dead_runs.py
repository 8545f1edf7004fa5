"""Runs whose process died are ended in MLflow by the next run with the same root, and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.run.lock import LOCK_FILE, FolderLock
from lit_grpo.tracking.dead_runs import close_dead_runs
from lit_grpo.tracking.run_note import RUN_FILE

STORE = "sqlite:///mlflow.db"


class Store:
    """Stands in for MLflow: knows runs by identity, and notes which were ended, as what and why."""

    def __init__(self, error: Exception | None = None, known: dict[str, str] | None = None) -> None:
        self.error, self.known = error, known or {}
        self.ended: list[tuple[str, str, str | None]] = []

    def find(self, identity: str) -> str | None:
        return self.known.get(identity)

    def close_dead(self, run_id: str, status: str, reason: str | None) -> None:
        if self.error is not None:
            raise self.error
        self.ended.append((run_id, status, reason))


class Queue(list[Any]):
    """Stands in for the sender."""

    def put(self, job: Any) -> None:
        self.append(job)


def dead(root: Path, name: str, **note: Any) -> Path:
    """Make the folder of a run whose process died."""
    folder = root / name
    folder.mkdir()
    (folder / LOCK_FILE).write_text("{}")
    (folder / RUN_FILE).write_text(json.dumps({"tracking_uri": STORE} | note))
    return folder


def jobs(root: Path) -> Queue:
    queue = Queue()
    close_dead_runs(root, root / "own", STORE, queue)  # type: ignore[arg-type]
    return queue


def closed(root: Path, store: Store) -> list[tuple[str, str, str | None]]:
    for job in jobs(root):
        job(store)
    return store.ended


def test_only_those_of_this_store_and_root_that_are_not_ones_own(tmp_path: Path) -> None:
    folder = dead(tmp_path, "mine", run_id="a")
    dead(tmp_path, "own", run_id="b")
    dead(tmp_path, "elsewhere", run_id="c", tracking_uri="http://server")
    ended = dead(tmp_path, "ended", run_id="d")
    (ended / LOCK_FILE).unlink()
    assert closed(tmp_path, Store()) == [("a", "FAILED", "its process died without a word")]
    assert not (folder / LOCK_FILE).exists()
    assert not jobs(tmp_path), "it is known to be ended now"
    assert not FolderLock(folder).held


def test_an_end_that_was_noted_and_never_sent_is_the_one_that_is_sent(tmp_path: Path) -> None:
    dead(tmp_path, "mine", run_id="a", ended="FINISHED")
    assert closed(tmp_path, Store()) == [("a", "FINISHED", None)]


def test_a_run_whose_id_was_never_noted_is_looked_for(tmp_path: Path) -> None:
    dead(tmp_path, "found", run_id=None, identity="made once")
    dead(tmp_path, "unknown", run_id=None, identity="never made")
    dead(tmp_path, "nameless")
    assert closed(tmp_path, Store(known={"made once": "a"})) == [("a", "FAILED", "its process died without a word")]
    assert not list(tmp_path.glob(f"*/{LOCK_FILE}"))


def test_one_that_somebody_continues_is_left_alone(tmp_path: Path) -> None:
    lock = FolderLock(dead(tmp_path, "mine", run_id="a"))
    queue = jobs(tmp_path)
    assert queue
    lock.take()
    store = Store()
    queue[0](store)
    assert not store.ended
    assert lock.held
    lock.release()


def test_where_mlflow_cannot_be_reached_the_mark_stays_for_the_next_try(tmp_path: Path) -> None:
    folder = dead(tmp_path, "mine", run_id="a")
    (job,) = jobs(tmp_path)
    with pytest.raises(ConnectionError):
        job(Store(ConnectionError("refused")))
    assert (folder / LOCK_FILE).exists()
    store = Store()
    job(store)
    assert [run for run, *_ in store.ended] == ["a"]
    assert not (folder / LOCK_FILE).exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dead(tmp_path, "mine", run_id="a")

    def refused(path: Any, *args: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    (job,), store = jobs(tmp_path), Store()
    monkeypatch.setattr(os, "open", refused)
    job(store)
    monkeypatch.undo()
    assert not store.ended
    assert (folder / LOCK_FILE).exists()
