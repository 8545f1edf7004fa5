"""Between two steps nobody waits for the disk, which beside a checkpoint of gigabytes takes seconds."""

from __future__ import annotations

import json
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.callbacks import FlightRecorder, HealthMonitor
from lit_grpo.tracking import CompletionTable
from lit_grpo.utils import files
from tests import tiny


def test_no_step_waits_for_the_disk_whatever_is_found_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    sync = files._sync

    def watched(path: Path) -> None:
        stack = traceback.extract_stack()
        in_loop = any(frame.filename.endswith("training_epoch_loop.py") for frame in stack)
        if in_loop and threading.current_thread() is threading.main_thread():
            waited.append(" < ".join(frame.name for frame in stack[-6:]))
        sync(path)

    monkeypatch.setattr(files, "_sync", watched)
    callbacks: list[Any] = [HealthMonitor(), FlightRecorder(), CompletionTable(every=1)]
    trainer = tiny.trainer(default_root_dir=str(tmp_path), callbacks=callbacks)
    trainer.fit(tiny.module(), tiny.data(rollouts=4))
    found = [json.loads(line) for line in (tmp_path / "findings.jsonl").read_text().splitlines()]
    # Every completion is cut, which is a diagnosis, and so tags of the run.
    assert "truncation" in {one.get("diagnosis") for one in found}
    assert json.loads((tmp_path / "run.json").read_text())["tags"]
    assert waited == []
