#!/usr/bin/env python
"""Train several methods on GSM8K with a real model on one GPU, and show their held-out curves side by side.

    python scripts/gsm8k_methods.py --at-once 2             # GRPO, Dr. GRPO, DAPO, GTPO and NL: a table and a picture
    python scripts/gsm8k_methods.py --at-once 0             # only show what is recorded
    python scripts/gsm8k_methods.py --only grpo nl -- --model.policy.path models/Qwen2.5-Coder-0.5B-Instruct

Each run is `lit-grpo fit --config configs/gsm8k_qwen.yaml --model.objective '{recipe: METHOD}'` in a process of its
own, with what stands behind `--` as further options. Held-out questions are asked before the first rollout and after
every tenth. A run is written to --out (JSON lines) as soon as it has ended, and what is there with the same options is
not run again: the command can be cut, by --seconds too, and repeated. What --seconds ends is shown as far as it came,
and is run again. Monitors only tell.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import side_by_side  # noqa: E402

METHODS = ("grpo", "dr_grpo", "dapo", "gtpo", "nl")
CURVES = (
    "reward",
    "sampling/reward",
    "policy/entropy",
    "completions/length",
    "completions/truncated_frac",
    "groups/zero_std_frac",
    "optim/grad_norm",
    "time/generate",
    "time/update",
    "memory/peak_gib",
)
"""Metrics that are kept of every rollout."""
EVERY = 10
"""Rollouts between two evaluations, and rollouts that a value at the end is the mean of."""
SHOWN = ("pass@1", "pass@1/se", "greedy", "greedy/se", "length", "truncated_frac")
"""What is kept of an evaluation, by its key below ``val/gsm8k/``."""

CUT = "cut"
"""Status of a run for which the time did not suffice."""
Record = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the command and return 1 if a run failed or is missing, else 0."""
    args = parse(argv)
    wanted = [(method, seed) for seed in args.seeds for method in args.only]
    options = options_of(args)
    written = [r for r in side_by_side.read(args.out) if r["options"] == options]
    # Of several records of one run the last counts, and one that was cut only where no other is: it is put first.
    known = {(r["method"], r["seed"]): r for r in sorted(written, key=lambda r: r["status"] != CUT)}
    todo = [job for job in wanted if job not in known or known[job]["status"] == CUT]
    if args.at_once and todo:
        known |= run_all(todo, options, args)
    found = {job: known[job] for job in wanted if job in known and known[job]["status"] != "error"}
    if found:
        print(table(found))
        draw(found, args.picture)
        print(f"\n{args.picture}", file=sys.stderr)
    missing = [job for job in wanted if job not in found or found[job]["status"] == CUT]
    for method, seed in missing:
        print(f"missing: {method} seed {seed}", file=sys.stderr)
    return 1 if missing else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(METHODS), metavar="METHOD", help="recipes; left out: five")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the card; 0: none")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then end what runs, and start none")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/gsm8k_qwen.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gsm8k_methods/runs.jsonl")
    parser.add_argument("--picture", type=Path, default=ROOT / "runs/gsm8k_methods/curves.png")
    parser.add_argument("more", nargs="*", metavar="-- OPTION", help="further options of lit-grpo fit")
    return parser.parse_args(argv)


def options_of(args: argparse.Namespace) -> list[str]:
    """Return the options that all runs share."""
    return [
        *("--config", os.path.relpath(args.config, ROOT), "--data.rollouts", str(args.rollouts)),
        *("--trainer.val_check_interval", str(min(EVERY, args.rollouts)), "--trainer.num_sanity_val_steps", "-1"),
        *("--trainer.enable_checkpointing", "false", *args.more),
    ]


# --------------------------------------------------------------------------------------------------------- runs


def run_all(
    todo: Sequence[tuple[str, int]], options: list[str], args: argparse.Namespace
) -> dict[tuple[str, int], Record]:
    """Do all runs, some at once, each in a process of its own, and leave out those for which no time is left."""
    until = time.monotonic() + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lock, found = threading.Lock(), {}

    def one(job: tuple[str, int]) -> None:
        left = until - time.monotonic()
        record = run(*job, options, args.out.parent / "fits", left) if left > 0 else None
        if record is None:
            return
        with lock, args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            found[job] = record
            print(line(record), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(one, todo))
    return found


def run(method: str, seed: int, options: list[str], folder: Path, seconds: float) -> Record | None:
    """Train one method with one seed; None where it did not come to a rollout in time."""
    # A folder of its own for each try: the run refuses one that another has left something in.
    place = folder / f"{method}-seed{seed}-{time.strftime('%H%M%S')}"
    command = [sys.executable, "-m", "lit_grpo", "fit", *options, "--model.objective", f"{{recipe: {method}}}"]
    command += ["--seed_everything", str(seed), "--trainer.logger.run_dir", str(place)]
    command += ["--trainer.logger.tracking_uri", "none"]
    place.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code: int | None = None
    screen = place.with_suffix(".txt")
    with screen.open("w", encoding="utf-8") as file:
        # Killed by SIGTERM, so that it takes its engines along.
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(None if math.isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    named = {"method": method, "seed": seed, "options": options, "seconds": round(time.monotonic() - began, 1)}
    # It was ended for want of time; a code below 0 would be a signal of somebody else's.
    if code is None:
        came = read_run(place) if (place / "metrics.jsonl").is_file() else {}
        return named | {"status": CUT} | came if came.get("curves") else None
    # 3: a guard has stopped it, which is a result too.
    if code not in (0, 3):
        reason = screen.read_text(encoding="utf-8", errors="replace").strip()[-400:]
        return named | {"status": "error", "reason": f"exit code {code}: {reason}"}
    return named | {"status": "done" if code == 0 else "stopped"} | read_run(place)


def read_run(folder: Path) -> Record:
    """Read what is kept of a run from its folder."""
    from lit_grpo.tracking import read_metrics

    steps: dict[int, dict[str, Any]] = {}
    for row in read_metrics(folder):
        steps.setdefault(int(row["step"]), {}).update(row)
    trained = [steps[step] for step in sorted(steps) if step > 0]
    clock = [row["wall_time"] for row in trained]
    held_out = {
        step: {key: row[f"val/gsm8k/{key}"] for key in SHOWN if f"val/gsm8k/{key}" in row}
        for step, row in sorted(steps.items())
        if "val/gsm8k/pass@1" in row
    }
    journal = folder / "findings.jsonl"
    events = [json.loads(one) for one in journal.read_text().splitlines()] if journal.exists() else []
    return {
        "curves": {key: [row.get(key) for row in trained] for key in CURVES if any(key in row for row in trained)},
        "held_out": {str(step): values for step, values in held_out.items()},
        # Between two rollouts there may be an evaluation, which the median does not see.
        "step_seconds": statistics.median(b - a for a, b in pairwise(clock)) if clock[1:] else None,
        "alarms": [[e["step"], e["diagnosis"], e["severity"]] for e in events
                   if e["event"] == "diagnosis" and e["severity"] != "info"],
    }  # fmt: skip


def line(record: Record) -> str:
    """Return the line that is shown when a run ends."""
    said = record.get("reason") or ", ".join(f"{step}: {v['pass@1']:.3f}" for step, v in record["held_out"].items())
    return f"{record['method']} seed {record['seed']}: {record['status']} in {record['seconds']:.0f} s, {said}"


# ------------------------------------------------------------------------------------------------------ results


def rollouts(record: Record) -> int:
    """Return how many rollouts a run was trained on."""
    return max(map(len, record["curves"].values()), default=0)


def last(record: Record, key: str) -> float:
    """Mean of the last rollouts that have a metric."""
    values = [value for value in record["curves"].get(key, ()) if value is not None and math.isfinite(value)]
    return statistics.fmean(values[-EVERY:]) if values else math.nan


def table(found: dict[tuple[str, int], Record]) -> str:
    """Write one row a run, in Markdown: held-out accuracy by rollout, and the run's last rollouts."""
    steps = sorted({int(step) for record in found.values() for step in record["held_out"]})
    lines = []
    for key, title in (("greedy", "greedy, %"), ("pass@1", "pass@1, %")):
        lines += [f"| {title} after rollout | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
        for (method, seed), record in found.items():
            cells = [_percent(record["held_out"].get(str(step), {}), key) for step in steps]
            lines.append(f"| {method}, seed {seed} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| last rollouts | reward | entropy | tokens | cut | step, s | first alarm |", "|---" * 7 + "|"]
    for (method, seed), record in found.items():
        alarm = next((f"{name} at {step}" for step, name, _ in record["alarms"]), "-")
        keys = ("sampling/reward" if "sampling/reward" in record["curves"] else "reward", "policy/entropy")
        cells = [_number(last(record, key), ".3f") for key in keys]
        cells += [_number(last(record, "completions/length"), ".0f")]
        cells += [_number(last(record, "completions/truncated_frac"), ".0%")]
        cells += ["-" if record["step_seconds"] is None else f"{record['step_seconds']:.2f}", alarm]
        ended = {"done": "", CUT: f" (cut at {rollouts(record)})"}.get(record["status"], " (stopped)")
        lines.append(f"| {method}, seed {seed}{ended} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float, how: str) -> str:
    return "-" if math.isnan(value) else format(value, how)


def _percent(values: dict[str, float], key: str) -> str:
    if key not in values:
        return "-"
    error = values.get(f"{key}/se", math.nan)
    return f"{100 * values[key]:.1f}" + (f" ± {100 * error:.1f}" if error > 0 else "")


def draw(found: dict[tuple[str, int], Record], path: Path) -> None:
    """Draw the held-out accuracy with its standard error, and reward, entropy and length by rollout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for place, ((method, seed), record) in enumerate(found.items()):
        style = {"color": f"C{list(dict.fromkeys(m for m, _ in found)).index(method)}", "label": f"{method}, {seed}"}
        steps = [int(step) for step in record["held_out"]]
        kept = [(step, v) for step, v in zip(steps, record["held_out"].values(), strict=True) if "greedy" in v]
        # Moved apart a little, or the bars of several would hide one another.
        axes[0, 0].errorbar([step + 0.2 * place for step, _ in kept], [v["greedy"] for _, v in kept],
                            [v.get("greedy/se", math.nan) for _, v in kept], capsize=2, **style)  # fmt: skip
        reward = "sampling/reward" if "sampling/reward" in record["curves"] else "reward"
        for axis, key in ((axes[0, 1], reward), (axes[1, 0], "policy/entropy"), (axes[1, 1], "completions/length")):
            values = [math.nan if value is None else value for value in record["curves"].get(key, ())]
            axis.plot(range(1, len(values) + 1), values, linewidth=1.0, **style)
    titles = ("held out, greedy", "training reward", "entropy, nats", "tokens a completion")
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
        axis.set_xlabel("rollout", fontsize=8)
    axes[0, 0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
