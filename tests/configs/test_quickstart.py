"""What the README promises of its first command: a model of random weights learns to add."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from lit_grpo.cli.main import main
from tests.paths import ROOT


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path, monkeypatch):
    """Half of the quickstart's rollouts bring the reward over 0.6 (0.73 when this was written, 0.98 after all 240)."""
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--data.rollouts", "120"]) == 0
    (lines,) = tmp_path.rglob("metrics.jsonl")
    rewards = [step["reward"] for step in map(json.loads, lines.read_text().splitlines()) if "reward" in step]
    assert len(rewards) == 120
    assert fmean(rewards[-20:]) > 0.6
