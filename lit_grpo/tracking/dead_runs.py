"""Runs whose process died without a word: the next run with the same root ends them in MLflow."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lit_grpo.run.lock import LOCK_FILE, FolderLock
from lit_grpo.tracking.run_note import read_note
from lit_grpo.tracking.sender import Sender, Target


def close_dead_runs(root: Path, own: Path, store: str, sender: Sender) -> None:
    """Queue the end, in MLflow, of runs with the same root whose process died, and which nobody continues.

    Args:
        root: folder of all runs.
        own: folder of the run that asks.
        store: address of the MLflow store, as notes hold it; runs of other stores stay as they are.
        sender: sends to that store.
    """
    for file in root.glob(f"*/{LOCK_FILE}"):
        if file.parent != own and read_note(file.parent).get("tracking_uri") == store:
            sender.put(partial(_close_dead_run, file.parent))


def _close_dead_run(folder: Path, target: Target) -> None:
    """End the MLflow run of a folder whose process is dead, unless somebody continues it."""
    lock = FolderLock(folder)
    try:
        if lock.try_take() is not None:
            return
    except OSError:
        # Somebody else's folder; its run stays as it is.
        return
    try:
        note = read_note(folder)
        status, reason = note.get("ended"), None
        if status is None:
            status, reason = "FAILED", "its process died without a word"
        run_id = note.get("run_id") or (target.find(note["identity"]) if note.get("identity") else None)
        if run_id is not None:
            target.close_dead(run_id, status, reason)
    except BaseException:
        lock.release(leave_file=True)
        raise
    lock.release()
