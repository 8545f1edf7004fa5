"""A long run with evaluations and recorded completions, written in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.report.made_up_run import make_run

ERROR = 0.03


def make_rich_run(
    folder: Path, steps: int = 60, *, lr: str = "1.0e-06", say: str = "", rows: list[dict[str, Any]] | None = None
) -> Path:
    """Write the folder; every tenth rollout has an evaluation, and the reward rises from 0 to 1."""
    make_run(folder, steps, planned=steps, findings=False, records=False)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i, line in enumerate(lines):
        reward = i / (steps - 1)
        line |= {"reward": reward, "policy/entropy": 2 - reward, f"reward/{say}": reward}
        line |= {f"reward_errors/timeout_frac/{say}": 0.0}
        if i % 10 == 9:
            line |= {"val/reward": reward / 2, "val/held/reward": reward / 2, "val/held/reward/se": ERROR}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "findings.jsonl").write_text("")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("1.0e-06", lr))
    (folder / "completions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (rows or completion_rows(say=say))))
    return folder


def completion_rows(rollouts: int = 3, groups: int = 2, size: int = 4, say: str = "") -> list[dict[str, Any]]:
    """Make rows as a run records them; the reward of completion ``i`` of a group is ``i / size``."""
    return [
        {"rollout": 10 * r + 1, "id": f"p{g}", "prompt": f"{g}+{r}=? {say}", "answer": str(g + r),
         "completion": f"said {r}-{g}-{i} {say}", "reward": i / size, "correct": i == size - 1, "tokens": 3,
         "truncated": i == 0, "rewards": {"right": i / size, "form": 1.0}}
        for r in range(rollouts) for g in range(groups) for i in range(size)
    ]  # fmt: skip
