"""scripts/get_smollm2, as far as it goes without fetching anything; CI runs the whole of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.waiting import PATIENCE

SCRIPT = ROOT / "scripts" / "get_smollm2"


def run(output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--output", output], capture_output=True, text=True, timeout=PATIENCE
    )


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    result = run(tmp_path)
    assert result.returncode == 0
    assert "is there already" in result.stdout
    assert [(p.name, p.read_text()) for p in sorted(tmp_path.iterdir())] == [
        ("config.json", "mine"),
        ("model.safetensors", "mine"),
    ]


def test_a_folder_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    result = run(tmp_path)
    assert result.returncode == 2
    assert "no finished model folder" in result.stderr
    assert f"rm -r {tmp_path}" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine"
