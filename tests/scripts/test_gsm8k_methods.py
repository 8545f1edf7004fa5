"""Methods side by side on GSM8K: whole runs on a tiny model, written once; what is shown is what the runs logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import gsm8k_methods
from tests.paths import ROOT

CONFIG = """
model:
  policy: {tiny: {layers: 1, width: 16, heads: 2}}
  objective: {recipe: grpo}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1}}
  val: {gsm8k: {path: PATH, greedy: true}}
  rewards: [{class_path: lit_grpo.rewards.ExactMatch}]
  group_size: 2
  prompts_per_rollout: 2
  sampling: {max_new_tokens: 3}
  eval_sampling: {temperature: 1.0, max_new_tokens: 3}
trainer:
  accelerator: cpu
  check_val_every_n_epoch: null
"""


@pytest.mark.slow
def test_a_run_is_made_once_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(3)))
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.replace("PATH", str(questions)))
    command = ["--config", str(config), "--only", "grpo", "--rollouts", "2", "--out", str(tmp_path / "runs.jsonl")]
    command += ["--picture", str(tmp_path / "curves.png")]
    assert gsm8k_methods.main(command) == 0
    (record,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert list(record["held_out"]) == ["0", "2"]
    assert set(record["held_out"]["0"]) == set(gsm8k_methods.SHOWN)
    assert len(record["curves"]["reward"]) == 2
    assert record["step_seconds"] > 0
    first = capsys.readouterr().out
    assert "| grpo, seed 0 |" in first
    # Shown again without a run; another method, or another option, is another run.
    assert gsm8k_methods.main([*command, "--at-once", "0"]) == 0
    assert capsys.readouterr().out == first
    assert gsm8k_methods.main([*command, "--only", "nl", "--at-once", "0"]) == 1
    assert gsm8k_methods.main([*command, "--rollouts", "3", "--at-once", "0"]) == 1
    assert "missing: grpo seed 0" in capsys.readouterr().err
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1


def test_a_run_that_fails_is_named_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", str(tmp_path / "none.yaml"), "--only", "grpo", "--out", str(tmp_path / "runs.jsonl")]
    assert gsm8k_methods.main(command) == 1
    said = capsys.readouterr().err
    assert "exit code 2" in said
    assert "missing: grpo seed 0" in said


@pytest.mark.slow
def test_what_the_time_did_not_suffice_for_is_shown_as_far_as_it_came_and_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = tmp_path / "c.yaml", tmp_path / "runs.jsonl"
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config.write_text(CONFIG.replace("PATH", str(tmp_path / "q.jsonl")))
    command = ["--config", str(config), "--only", "grpo", "--rollouts", "100000", "--out", str(out)]
    command += ["--picture", str(tmp_path / "curves.png"), "--seconds", "1000"]
    wait = gsm8k_methods.subprocess.Popen.wait

    def until_it_trains(process: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        while not any("reward" in path.read_text() for path in out.parent.glob("fits/*/metrics.jsonl")):
            assert process.poll() is None
            gsm8k_methods.time.sleep(0.1)
        raise gsm8k_methods.subprocess.TimeoutExpired("fit", timeout)

    monkeypatch.setattr(gsm8k_methods.subprocess.Popen, "wait", until_it_trains)
    assert gsm8k_methods.main(command) == 1
    (cut,) = map(json.loads, out.read_text().splitlines())
    assert cut["status"] == "cut"
    shown = capsys.readouterr()
    assert f"| grpo, seed 0 (cut at {gsm8k_methods.rollouts(cut)}) |" in shown.out
    assert "missing: grpo seed 0" in shown.err
    # A run that came to its end counts, wherever it stands in the file.
    whole = json.dumps(cut | {"status": "done"})
    out.write_text(whole + "\n" + json.dumps(cut) + "\n")
    assert gsm8k_methods.main([*command, "--at-once", "0"]) == 0
    assert "cut at" not in capsys.readouterr().out


def record(method: str, greedy: dict[int, float], **changes: Any) -> dict[str, Any]:
    held = {str(step): {"pass@1": value - 0.02, "pass@1/se": 0.02, "greedy": value, "greedy/se": 0.024}
            for step, value in greedy.items()}  # fmt: skip
    curves = {"reward": [0.1] * 10 + [0.3] * 10, "policy/entropy": [0.5] * 20, "completions/length": [200.0] * 20}
    return {"method": method, "seed": 0, "status": "done", "seconds": 9.0, "held_out": held, "step_seconds": 3.25,
            "curves": curves, "alarms": [[7, "C_NL", "critical"]]} | changes  # fmt: skip


def test_the_table_says_what_was_measured(tmp_path: Path) -> None:
    found = {
        ("grpo", 0): record("grpo", {0: 0.2, 10: 0.25, 20: 0.3}, alarms=[]),
        ("nl", 0): record("nl", {0: 0.2, 10: 0.1}, status="stopped", step_seconds=None),
    }
    found["grpo", 0]["curves"]["sampling/reward"] = [0.2] * 20
    text = gsm8k_methods.table(found)
    assert "| grpo, seed 0 | 20.0 ± 2.4 | 25.0 ± 2.4 | 30.0 ± 2.4 |" in text
    assert "| nl, seed 0 | 18.0 ± 2.0 | 8.0 ± 2.0 | - |" in text
    # Dynamic sampling drops the groups that are all right or wrong: the reward is that of all that was sampled.
    assert "| grpo, seed 0 | 0.200 | 0.500 | 200 | - | 3.25 | - |" in text
    assert "| nl, seed 0 (stopped) | 0.300 | 0.500 | 200 | - | - | C_NL at 7 |" in text
    gsm8k_methods.draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_usual_command_reads_the_shipped_configuration() -> None:
    args = gsm8k_methods.parse(["--", "--model.policy.path", "models/mine"])
    assert args.config == ROOT / "configs/gsm8k_qwen.yaml"
    assert gsm8k_methods.options_of(args)[-2:] == ["--model.policy.path", "models/mine"]
    assert tuple(args.only) == ("grpo", "dr_grpo", "dapo", "gtpo", "nl")
