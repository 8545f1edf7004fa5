#!/usr/bin/env python
"""Train PPO and VAPO on the quickstart task, with a critic of its own and with a value head on the policy's trunk.

    python scripts/critic_curves.py --seeds 0 1                        # runs, then a table and a picture
    python scripts/critic_curves.py --only ppo/shared --rollouts 20    # a look
    python scripts/critic_curves.py --jobs 0                           # only draw what is in the file

Each run is `lit-grpo fit --config configs/quickstart.yaml --config configs/quickstart/RECIPE.yaml
--model.critic.trunk TRUNK --seed_everything SEED` without tracking, on one thread. It is written to --out (JSON lines)
as soon as it has ended, and what is there with the same settings is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("ppo/separate", "ppo/shared", "vapo/separate", "vapo/shared")
KEYS = (
    "reward",
    "entropy",
    "loss/value",
    "value/correct",
    "value/incorrect",
    "value/outside",
    "value/outside_incorrect",
    "value/explained_variance",
    "value/explained_variance_after",
)
LAST = 10
"""Rollouts that a final value is the mean of."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    changes = {key: value for key, value in {"rollouts": args.rollouts}.items() if value is not None}
    wanted = [(name, seed) for seed in args.seeds for name in args.only]
    done = read(args.out, changes)
    todo = [job for job in wanted if job not in done]
    if args.jobs and todo:
        done |= run_all(todo, changes, args.jobs, args.out)
    found = {job: done[job] for job in wanted if job in done}
    if not found:
        print(f"nothing to show: {args.out} holds no such run", file=sys.stderr)
        return 1
    print(table(found))
    draw(found, args.picture)
    print(f"\n{args.picture}", file=sys.stderr)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; 0: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=RUNS, metavar="RUN")
    parser.add_argument("--rollouts", type=int, help="instead of those of the configuration")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/critic_curves.jsonl")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/critic_quickstart.png")
    return parser.parse_args(argv)


def settings(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run: the quickstart's, with the recipe's laid over it."""
    import yaml

    recipe, _, trunk = name.partition("/")
    paths = (ROOT / "configs/quickstart.yaml", ROOT / f"configs/quickstart/{recipe}.yaml")
    config: dict[str, Any] = {}
    for path in paths:
        config = merge(config, yaml.safe_load(path.read_text(encoding="utf-8")))
    return merge(config, {"model": {"critic": {"trunk": trunk}}, "data": changes})


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def read(path: Path, changes: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Runs of the same settings that are in the file."""
    if not path.is_file():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    same = [r for r in records if r["name"] in RUNS and r["settings"] == settings(r["name"], changes)]
    return {(record["name"], record["seed"]): record for record in same}


def run_all(
    todo: Sequence[tuple[str, int]], changes: dict[str, Any], jobs: int, out: Path
) -> dict[tuple[str, int], dict[str, Any]]:
    """Train, ``jobs`` runs at a time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {}
    workers = ProcessPoolExecutor(jobs, get_context("spawn"), _end_with_parent, (os.getpid(),))
    with workers as pool, out.open("a", encoding="utf-8") as file:
        futures = [pool.submit(run, name, seed, changes) for name, seed in todo]
        for future in as_completed(futures):
            record = future.result()
            found[record["name"], record["seed"]] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(
                f"{record['name']} seed {record['seed']}: {final(record, 'reward'):.3f}, {record['cpu_s']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return found


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed would otherwise go on for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(name: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """One run, in a worker process: the curve of each key, None where a rollout has no such value."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(ROOT))
    import lightning.pytorch as pl
    import torch

    from lit_grpo import LitGRPO, RolloutDataModule
    from lit_grpo.engines import EngineConfig
    from lit_grpo.rewards import ExactMatch
    from lit_grpo.tasks import AdditionPrompts
    from lit_grpo.types import Sampling

    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    config = settings(name, changes)
    given = config["data"]
    parts = {"prompts": AdditionPrompts(**given["prompts"]["init_args"]), "rewards": [ExactMatch()]}
    parts |= {"sampling": Sampling(**given["sampling"]), "engine": EngineConfig(**given["engine"])}
    data = RolloutDataModule(**(given | parts))
    curves: dict[str, list[float | None]] = {key: [] for key in KEYS}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for key, values in curves.items():
                value = pl_module.step_metrics.get(key)
                values.append(None if value is None else round(float(value), 5))

    started = time.process_time()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Keep()],
    )
    trainer.fit(LitGRPO(**config["model"]), datamodule=data)
    seconds = round(time.process_time() - started, 1)
    return {"name": name, "seed": seed, "settings": config, "cpu_s": seconds, "curves": curves}


# ------------------------------------------------------------------------------------------------------- results


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def around(record: dict[str, Any], key: str, place: int) -> float:
    """Mean of the ``LAST`` rollouts that end with the ``place``-th; NaN where none has the key."""
    values = known(record["curves"][key][max(0, place - LAST) : place])
    return statistics.fmean(values) if values else math.nan


def final(record: dict[str, Any], key: str) -> float:
    return around(record, key, len(record["curves"][key]))


def table(found: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Markdown: at five places of the run, means over seeds of the mean of ten rollouts."""
    columns = {
        "reward": "reward",
        "entropy": "entropy",
        "value/correct": "V correct",
        "value/incorrect": "V incorrect",
        "value/outside": "outside",
        "value/explained_variance": "expl. var.",
        "value/explained_variance_after": "after",
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
                cells.append(text + (spread if key in ("reward", "value/explained_variance") else ""))
            lines.append(f"| `{name}` | {max(1, place - LAST + 1)}-{place} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: dict[tuple[str, int], dict[str, Any]], path: Path) -> None:
    """One column a run: reward; explained variance before the update; values of correct and incorrect answers."""
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
            style = {"linewidth": 1.0, "linestyle": ("-", "--", ":")[seed % 3]}
            curve = {key: [math.nan if v is None else v for v in values] for key, values in record["curves"].items()}
            steps = range(1, len(curve["reward"]) + 1)
            axes[0, column].plot(steps, curve["reward"], color=colours["reward"], **style)
            explained = [max(value, -1.0) for value in curve["value/explained_variance"]]
            axes[1, column].plot(steps, explained, color=colours["explained"], **style)
            for kind in ("correct", "incorrect"):
                axes[2, column].plot(steps, curve[f"value/{kind}"], color=colours[kind], label=kind, **style)
        axes[0, column].set_title(name)
        axes[1, column].axhline(0.0, color="0.7", linewidth=0.6)
        axes[2, column].axhspan(0.0, 1.0, color="0.93", zorder=0)
        axes[2, column].set_xlabel("rollout")
    for row, label in enumerate(("reward", "explained variance (from -1)", "mean value")):
        axes[row, 0].set_ylabel(label)
    handles, labels = axes[2, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes[2, 0].legend(unique.values(), unique.keys(), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    raise SystemExit(main())
