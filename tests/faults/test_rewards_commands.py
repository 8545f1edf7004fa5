"""Commands around rewards: nothing is overwritten, and a reward that leaves ends nothing in silence."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_grpo.cli.main import FAILED, main
from lit_grpo.rewards import Reward

LINES = '{"prediction": "4", "answer": "4"}\n'
FIT: dict[str, Any] = {
    "model": {"policy": {"tiny": {"layers": 1, "width": 16, "heads": 2}}},
    "data": {
        "prompts": {"class_path": "lit_grpo.data.AdditionPrompts"},
        "group_size": 4,
        "prompts_per_rollout": 2,
        "rollouts": 2,
        "sampling": {"max_new_tokens": 2},
    },
    "trainer": {"logger": False, "enable_checkpointing": False},
}


class Leaves(Reward):
    def score(self, batch):
        sys.exit(3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(LINES)
    (tmp_path / "reward.yaml").write_text("rewards: [{class_path: lit_grpo.rewards.NumericReward}]\n")
    (tmp_path / "link").symlink_to("in.jsonl")
    os.link(tmp_path / "in.jsonl", tmp_path / "hard")
    return tmp_path


@pytest.mark.parametrize("output", ["in.jsonl", "./in.jsonl", "link", "hard", "reward.yaml"])
def test_verdicts_do_not_overwrite_what_is_read(folder, capsys, output):
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert main(["score", "--input", "in.jsonl", "--config", "reward.yaml", "--output", output]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_other_files_are_written(folder):
    (folder / "old").write_text("old verdicts")
    for output in ("old", "new", os.devnull):
        assert main(["score", "--input", "in.jsonl", "--config", "reward.yaml", "--output", output]) == 0
    assert json.loads((folder / "old").read_text())["correct"] is True


@pytest.mark.slow
def test_a_reward_that_leaves_fails_the_run_and_says_so(folder, capsys):
    FIT["data"]["rewards"] = [{"class_path": "tests.faults.test_rewards_commands.Leaves"}]
    Path("run.yaml").write_text(yaml.safe_dump(FIT))
    assert main(["fit", "--config", "run.yaml"]) == FAILED
    err = capsys.readouterr().err
    assert "reward 'leaves' raised SystemExit: 3" in err
    assert "data.on_reward_error: zero" in err
    assert "Traceback" not in err
    assert main(["fit", "--config", "run.yaml", "--data.on_reward_error", "zero"]) == 0
