"""A run folder as a fit leaves it, written in milliseconds: healthy for 20 steps, then a collapse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from lit_grpo.run import flight

ONSET, SEEN, END = 20, 26, 30
WORDS = {0: "The", 1: " answer", 2: " is", 3: " 7", 4: "\n", 5: "<eos>"}
CONFIG = """\
trainer: {callbacks: [{class_path: lit_grpo.callbacks.EntropyMonitor, init_args: {}}]}
model: {policy: {path: models/some}, optimizer: {lr: 1.0e-06}}
data: {rollouts: %d, group_size: 2, prompts_per_rollout: 2}
"""


def make_run(
    folder: Path,
    steps: int = END,
    *,
    planned: int = END,
    findings: bool = True,
    records: bool = True,
    say: str = "The answer is 7",
) -> Path:
    """Write the folder; ``say`` is what the model said everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "wall_time": 0.0, **metrics(step)}) + "\n")
    (folder / "config.yaml").write_text(CONFIG % planned)
    (folder / "objective.json").write_text('{"name": "nl"}')
    (folder / "run.json").write_text('{"started": "2026-11-28T03:00:00+00:00", "tags": {}}')
    if findings:
        (folder / "findings.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events()))
    if records:
        (folder / flight.FOLDER).mkdir(exist_ok=True)
        with (folder / flight.FOLDER / flight.TOKENS_FILE).open("w") as file:
            file.writelines(json.dumps([i, text]) + "\n" for i, text in {**WORDS, 6: say}.items())
        for step in (1, 9, 17, *range(19, steps + 1)):
            if step <= steps:
                write_record(folder / flight.FOLDER, step, say)
    return folder


def metrics(step: int) -> dict[str, float]:
    bad = max(0, step - ONSET)
    return {
        "reward": max(0.0, 0.2 + 0.02 * step - 0.1 * bad),
        "reward/right": max(0.0, 0.2 + 0.02 * step - 0.1 * bad),
        "reward/format": min(1.0, 0.5 + 0.02 * step),
        "reward/std": 0.4,
        "reward_errors/timeout_frac/right": 0.0,
        "reward_errors/timeout_frac/format": 0.0,
        "policy/entropy": 0.4 + 0.2 * bad,
        "completions/length": 10.0 + 5 * bad,
        "completions/correct_length": 9.0 if bad < 5 else math.nan,
        "completions/incorrect_length": 11.0 + 6 * bad,
        "optim/grad_norm": math.inf if step == END else 1.0 + 10.0 * bad,
        "completions/truncated_frac": min(1.0, 0.1 * bad),
        "groups/zero_advantage_frac": 0.25,
        "policy/clip_frac/low": 0.0,
        "time/tokens_per_second": 1234.0,
        "time/sync": 0.1,
        "time/generate": 2.0 + 0.2 * bad,
        "time/reward": 0.05,
        "time/update": 1.0,
    }


def events() -> list[dict[str, Any]]:
    finding = {
        "monitor": "CollapseDetector", "kind": "c_nl", "step": SEEN, "onset": ONSET, "severity": "critical",
        "evidence": [
            {"metric": "policy/entropy", "window": 20, "value": 1.6, "threshold": 0.8, "before": 0.4},
            {"metric": "optim/grad_norm", "window": 1, "value": "inf", "threshold": 5.0, "before": None},
        ],
        "explanation": "entropy and length have exploded",
        "remedies": ["halve the learning rate", "clip the ratio"],
    }  # fmt: skip
    early = {"event": "diagnosis", "diagnosis": "conflict", "step": 5, "onset": 5, "severity": "warning",
             "explanation": "right and wrong fight", "remedies": [], "findings": [], "action": "log"}  # fmt: skip
    return [
        early,
        {"event": "finding", **finding},
        {"event": "diagnosis", "diagnosis": "C_NL", "step": SEEN, "onset": ONSET, "severity": "critical",
         "explanation": "C_NL collapse, began at step 20; entropy 0.4 → 1.6", "remedies": finding["remedies"],
         "findings": [finding], "action": "rollback"},
        {"event": "rollback", "step": SEEN, "target": 18, "remedy": "halve the learning rate"},
    ]  # fmt: skip


def write_record(folder: Path, step: int, say: str, unfinished: bool = False) -> None:
    """Two prompts of two completions each; the last token of the first is missing from the loss."""
    lengths = [6, 3, 2, 1]
    count = sum(lengths)
    mask = torch.ones(count, dtype=torch.bool)
    mask[5] = False
    tensors = {
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "tokens": torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 5, 3, 5, 5], dtype=torch.int32),
        "sampler_logprobs": torch.linspace(-0.01, -3, count),
        "learner_logprobs": torch.linspace(-0.01, -3, count),
        "entropy": torch.tensor([0.01, 0.1, 0.5, 1.0, 2.0, 0.0, *[0.2] * 6]),
        "advantages": torch.tensor([1.0] * 6 + [-1.0] * 3 + [0.3] * 2 + [0.0]),
        "mask": mask,
        "reward": torch.tensor([1.0, 0.0, 0.5, 0.0] if step < ONSET else [0.0] * 4),
        "reward/right": torch.tensor([1.0, 0.0, 0.5, 0.0]),
        "truncated": torch.tensor([False, True, False, False]),
        "policy_version": torch.full((4,), step - 1, dtype=torch.int32),
        "prompt_lengths": torch.tensor([1, 1], dtype=torch.int32),
        "prompt_tokens": torch.tensor([0, 0], dtype=torch.int32),
    }
    rollout = {
        "step": step, "group_size": 2, "temperature": 1.0, "unfinished": unfinished, "wall_time": 0.0,
        "prompts": [{"id": f"p{g}", "question": f"{g}+7=? {say}", "answer": "7"} for g in range(2)],
        "texts": ["The answer is 7\n", say + say, "7", ""],
    }  # fmt: skip
    flight.write_step(flight.step_file(folder, step), tensors, rollout)
