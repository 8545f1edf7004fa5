"""A run of 2,000 rollouts with all monitors: memory, step time and files, and what of it grows."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from scripts.chaos_cases.forked_runs import CONFIG, preload, start

EVERY = 20
"""Rollouts between two samples."""
SETTLED = 100
"""Rollouts after which nothing may grow any more."""
MEMORY_LIMIT = 1.0
"""MiB that the resident memory may grow by in 100 rollouts."""
SLOWER_LIMIT = 1.15
"""Step time of the last quarter over that of the second."""
ADDED = """\
checkpoint: {every_n_rollouts: 50}
"""


class Sampler(Callback):
    """Callback that writes memory, processor time, threads, open files and file sizes to ``samples.jsonl``."""

    def __init__(self) -> None:
        self._cpu, self._wall = 0.0, 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        if done % EVERY:
            return
        cpu, wall = time.process_time(), time.monotonic()
        folder = Path(trainer.log_dir)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        checkpoint = folder / "checkpoints" / "last.ckpt"
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sample = {
            "rollout": done,
            "rss": pages * os.sysconf("SC_PAGE_SIZE"),
            "cpu": (cpu - self._cpu) / EVERY,
            "wall": (wall - self._wall) / EVERY,
            "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
            "open_files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "metrics": sizes.get("metrics.jsonl", 0),
            "findings": sizes.get("findings.jsonl", 0),
            "store": (folder.parent / "mlflow.db").stat().st_size,
            "checkpoint": checkpoint.stat().st_size if checkpoint.exists() else 0,
            "folder": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        }
        with Path("samples.jsonl").open("a") as file:
            file.write(json.dumps(sample) + "\n")
        self._cpu, self._wall = time.process_time(), time.monotonic()


def slope(samples: list[dict[str, Any]], key: str) -> float:
    """Return by how much a value grows in 100 rollouts, by least squares."""
    xs = [sample["rollout"] / 100 for sample in samples]
    ys = [sample[key] for sample in samples]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def quarter(samples: list[dict[str, Any]], key: str, number: int) -> float:
    """Return the median of a value in one quarter of the samples, from 0."""
    size = len(samples) // 4
    values = sorted(sample[key] for sample in samples[number * size : (number + 1) * size])
    return float(values[len(values) // 2])


def judge(samples: list[dict[str, Any]]) -> tuple[list[tuple[str, ...]], bool]:
    """Make the rows of the table, and say whether nothing grows that should not."""
    late = [sample for sample in samples if sample["rollout"] > SETTLED]
    first, last = late[0], late[-1]
    mib = 2**20
    memory = slope(late, "rss") / mib
    slower = quarter(late, "cpu", 3) / quarter(late, "cpu", 1)
    # What a rollout adds to the files must not grow either.
    half = len(late) // 2
    per_rollout = [slope(part, "metrics") / 100 for part in (late[:half], late[half:])]
    rows = [
        ("resident memory, MiB", f"{first['rss'] / mib:.1f}", f"{last['rss'] / mib:.1f}", f"{memory:+.2f}"),
        (
            "processor time a rollout, s",
            f"{quarter(late, 'cpu', 0):.3f}",
            f"{quarter(late, 'cpu', 3):.3f}",
            f"{slope(late, 'cpu'):+.4f}",
        ),
        ("threads", str(first["threads"]), str(last["threads"]), f"{slope(late, 'threads'):+.2f}"),
        ("open files", str(first["open_files"]), str(last["open_files"]), f"{slope(late, 'open_files'):+.2f}"),
        *(
            (f"{name}, MB", f"{first[key] / 1e6:.2f}", f"{last[key] / 1e6:.2f}", f"{slope(late, key) / 1e6:+.3f}")
            for name, key in (
                ("metrics.jsonl", "metrics"),
                ("findings.jsonl", "findings"),
                ("mlflow.db", "store"),
                ("newest checkpoint", "checkpoint"),
                ("folder of the run", "folder"),
            )
        ),
        ("bytes a rollout in metrics.jsonl", f"{per_rollout[0]:.0f}", f"{per_rollout[1]:.0f}", ""),
    ]
    flat_files = per_rollout[1] <= 1.05 * per_rollout[0]
    flat_handles = last["threads"] <= first["threads"] + 2 and last["open_files"] <= first["open_files"] + 4
    return rows, memory < MEMORY_LIMIT and slower < SLOWER_LIMIT and flat_files and flat_handles


def draw(samples: list[dict[str, Any]], path: Path) -> None:
    """Draw memory, processor time and files over the rollouts."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 2.6), layout="constrained")
    x = [sample["rollout"] for sample in samples]
    panels = (
        ("resident memory, MiB", {"": [s["rss"] / 2**20 for s in samples]}),
        ("processor time a rollout, s", {"": [s["cpu"] for s in samples]}),
        ("files, MB", {name: [s[key] / 1e6 for s in samples] for name, key in
                       (("metrics.jsonl", "metrics"), ("mlflow.db", "store"), ("newest checkpoint", "checkpoint"))}),
    )  # fmt: skip
    for axis, (title, curves) in zip(axes, panels, strict=True):
        for name, values in curves.items():
            axis.plot(x, values, linewidth=1, label=name or None)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("rollout", fontsize=8)
        if len(curves) > 1:
            axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=90)


def main(argv: list[str]) -> int:
    """Run, print the table, and return 1 if something grows."""
    parser = argparse.ArgumentParser(prog="chaos.py long", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where to run; default: a new folder in the temporary one")
    parser.add_argument("--figure", type=Path, help="write the curves here as PNG")
    options = parser.parse_args(argv)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="long-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIG.replace("rollouts: 12", f"rollouts: {options.rollouts}").replace(
        "checkpoint: {every_n_rollouts: 3}\n", ADDED
    )
    text = text.replace(
        "data:\n", "data:\n  val_prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1}}\n"
    )
    text += "    - {class_path: lit_grpo.callbacks.FlightRecorder}\n"
    text += "    - {class_path: scripts.chaos_cases.long_run.Sampler}\n  val_check_interval: 250\n"
    (folder / "a.yaml").write_text(text)
    preload()
    run = start(["fit", "--config", "a.yaml"], folder)
    code = run.wait(options.rollouts * 10.0)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    rows, flat = judge(samples)
    print(f"| over {options.rollouts} rollouts (exit code {code}) | after {SETTLED} | at the end | in 100 rollouts |")
    print("|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if options.figure is not None:
        draw(samples, options.figure)
    print(f"folder: {folder}")
    return 0 if flat and code == 0 else 1
