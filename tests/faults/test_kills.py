"""Runs killed with SIGKILL at a few points and resumed: equal to the bit; scripts/chaos.py kills has the many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow


def test_killed_and_resumed_is_equal_to_unbroken(tmp_path: Path) -> None:
    names = ["staleness 1, validation", "rollback, validation"]
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "kills", "--out", str(tmp_path), "--kills", "3",
               "--jobs", "2", "--variants", *names]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * len(names)
    assert {row["variant"] for row in rows} == set(names)
    # A comparison of runs that were not killed, or that began anew, would show nothing. A fast machine may be done
    # before a moment on the clock.
    injected = [row for row in rows if row["point"][0] != "time"]
    assert len(injected) >= 4
    assert all(row["killed"] == [-9] for row in injected), injected
    assert sum(row["from"] is not None for row in injected) >= 3, injected
