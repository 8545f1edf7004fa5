#!/usr/bin/env python
"""Train PPO and VAPO on the quickstart task, with a critic of its own and with a value head on the policy's backbone.

    python scripts/critic_curves.py --jobs 12                          # runs, then a table and a picture
    python scripts/critic_curves.py --only ppo/shared --rollouts 20    # a look
    python scripts/critic_curves.py --jobs 0                           # only draw what is in the file

Each run is `lit-grpo fit --config configs/quickstart.yaml --config configs/quickstart/RECIPE.yaml
--model.critic.backbone TRUNK --seed_everything SEED` without tracking, on one thread. It is written to --out (JSON
lines) as soon as it has ended, and what is there with the same settings is not run again.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import side_by_side  # noqa: E402

RUNS = ("ppo/separate", "ppo/shared", "vapo/separate", "vapo/shared")
KEYS = (
    "reward",
    "policy/entropy",
    "loss/value",
    "critic/value_correct",
    "critic/value_incorrect",
    "critic/value_outside_frac",
    "critic/value_outside_incorrect_frac",
    "critic/explained_variance",
    "critic/explained_variance_after",
)
LAST = 10
"""Number of last rollouts that a final value is the mean of."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    changes = {key: value for key, value in {"rollouts": args.rollouts}.items() if value is not None}
    wanted = [(name, seed) for seed in args.seeds for name in args.only]
    known = [record for record in side_by_side.read(args.out) if record["name"] in RUNS]
    done = by_job([record for record in known if record["settings"] == settings(record["name"], changes)])
    todo = [(name, seed, changes) for name, seed in wanted if (name, seed) not in done]
    if args.jobs and todo:
        done |= by_job(side_by_side.run_all(run, todo, args.jobs, args.out, line))
    failed = [done[job] for job in wanted if job in done and done[job]["status"] != "done"]
    for record in failed:
        print(f"missing: {line(record)}", file=sys.stderr)
    found = {job: done[job] for job in wanted if job in done and done[job] not in failed}
    if not found:
        print(f"nothing to show: {args.out} holds no such run", file=sys.stderr)
        return 1
    print(table(found))
    draw(found, args.picture)
    print(f"\n{args.picture}", file=sys.stderr)
    return 1 if failed else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="runs side by side; 0: none"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS, metavar="RUN")
    parser.add_argument("--rollouts", type=int, help="instead of those of the configuration")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/critic_curves.jsonl")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/critic_quickstart.png")
    return parser.parse_args(argv)


def settings(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Give the configuration of a run: the quickstart's, with the recipe's laid over it."""
    recipe, _, backbone = name.partition("/")
    config = side_by_side.load(ROOT / "configs/quickstart.yaml", ROOT / f"configs/quickstart/{recipe}.yaml")
    return side_by_side.merge(config, {"model": {"critic": {"backbone": backbone}}, "data": changes})


def by_job(records: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(record["name"], record["seed"]): record for record in records}


def run(name: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Train one run in a worker process: the curve of each key, None where a rollout has no such value."""
    config = settings(name, changes)
    named = {"name": name, "seed": seed, "settings": config}
    return named | side_by_side.attempt(lambda: side_by_side.fit(config, seed, KEYS)[2])


def line(record: dict[str, Any]) -> str:
    """Give the line that is shown when a run ends."""
    what = f"{final(record, 'reward'):.3f}" if record["status"] == "done" else record["reason"]
    return f"{record['name']} seed {record['seed']}: {what}, {record['seconds']:.0f} s"


# ------------------------------------------------------------------------------------------------------- results


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def around(record: dict[str, Any], key: str, place: int) -> float:
    """Give the mean of the ``LAST`` rollouts that end with the ``place``-th; NaN where none has the key."""
    values = known(record["curves"][key][max(0, place - LAST) : place])
    return statistics.fmean(values) if values else math.nan


def final(record: dict[str, Any], key: str) -> float:
    return around(record, key, len(record["curves"][key]))


def table(found: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Write Markdown: at five places of the run, means over seeds of the mean of ten rollouts."""
    columns = {
        "reward": "reward",
        "policy/entropy": "policy/entropy",
        "critic/value_correct": "V correct",
        "critic/value_incorrect": "V incorrect",
        "critic/value_outside_frac": "outside",
        "critic/explained_variance": "expl. var.",
        "critic/explained_variance_after": "after",
    }
    lines = ["| run | rollouts | " + " | ".join(columns.values()) + " |", "|" + "---|" * (len(columns) + 2)]
    for name in dict.fromkeys(name for name, _ in found):
        runs = [record for (other, _), record in found.items() if other == name]
        length = len(runs[0]["curves"]["reward"])
        for place in sorted({max(1, length * k // 5) for k in range(1, 6)}):
            cells = []
            for key in columns:
                values = known([around(record, key, place) for record in runs])
                text = f"{statistics.fmean(values):.3f}" if values else "-"
                spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
                cells.append(text + (spread if key in ("reward", "critic/explained_variance") else ""))
            lines.append(f"| `{name}` | {max(1, place - LAST + 1)}-{place} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: dict[tuple[str, int], dict[str, Any]], path: Path) -> None:
    """Draw one column a run: reward; explained variance before the update; values of correct and incorrect answers.

    Thick: mean of the last ``LAST`` rollouts, a line style for each seed. Thin: each rollout.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for name, _ in found))
    figure = Figure(figsize=(3.1 * len(names), 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, len(names), sharex=True, sharey="row", squeeze=False)
    colours = {"correct": "#1b7837", "incorrect": "#b2182b", "reward": "#2166ac", "explained": "#762a83"}
    for column, name in enumerate(names):
        for (other, seed), record in found.items():
            if other != name:
                continue
            curves = record["curves"]
            rows = [(0, "reward", "reward"), (1, "critic/explained_variance", "explained")]
            rows += [(2, f"critic/value_{kind}", kind) for kind in ("correct", "incorrect")]
            for row, key, label in rows:
                low = -1.0 if row == 1 else -math.inf
                raw = [math.nan if value is None else max(value, low) for value in curves[key]]
                steps = range(1, len(raw) + 1)
                mean = [max(around(record, key, place), low) for place in steps]
                style = {"color": colours[label], "linewidth": 1.2, "linestyle": ("-", "--", ":")[seed % 3]}
                axes[row, column].plot(steps, raw, color=colours[label], linewidth=0.6, alpha=0.2)
                axes[row, column].plot(steps, mean, label=label, **style)
        axes[0, column].set_title(name)
        axes[1, column].axhline(0.0, color="0.7", linewidth=0.6)
        axes[2, column].axhspan(0.0, 1.0, color="0.93", zorder=0)
        axes[2, column].set_xlabel("rollout")
    for row, label in enumerate(("reward", "explained variance (from -1)", "mean value")):
        axes[row, 0].set_ylabel(label)
    handles, labels = axes[2, 0].get_legend_handles_labels()
    unique = dict(zip(labels[::-1], handles[::-1], strict=True))  # of the first seed
    axes[2, 0].legend(unique.values(), unique.keys(), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    raise SystemExit(main())
