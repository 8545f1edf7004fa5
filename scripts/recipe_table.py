#!/usr/bin/env python
"""Train every recipe on the quickstart task, with the same budget and several seeds, and print a Markdown table.

    python scripts/recipe_table.py --jobs 16                      # all recipes, seeds 0 1 2
    python scripts/recipe_table.py --only grpo dapo --rollouts 20 # a look
    python scripts/recipe_table.py --jobs 0                       # only print what is in the file

Each run has one thread; many run side by side. A run is written to --out (JSON lines) as soon as it has ended, and
what is there with the same settings is not run again, so the command can be cut and repeated. Needs only torch,
lightning and transformers.

What is the same for all: the task (single-digit addition from random weights, exact match), model, learning rate and
schedule of configs/quickstart.yaml, prompts and samples of a rollout, one optimizer step a rollout (methods of two
passes take two), and the coefficient of an entropy bonus, which methods without one need on this task to find that
answers may have two digits. ``--entropy-coef own`` leaves each recipe its own, mostly none. Losses that are sums and
not means (reinforce, rloo, imle, dcpo, ...) make the same coefficient weigh less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE, RECIPES = ROOT / "configs/quickstart.yaml", ROOT / "configs/recipes"
LAST = 10
"""Rollouts that a final value is the mean of."""
DEFINITIONS = f"""\
final: mean reward of all completions sampled in the last {LAST} rollouts (those that dynamic sampling dropped too).
best: highest mean of any {LAST} rollouts in a row. greedy: exact matches of all problems at temperature 0, at the end.
entropy (nats), length (tokens), gradient norm (before clipping): means of the last {LAST} rollouts.
collapsed: final is below half of best and best above 0.1, or entropy is below 0.01 while final is below 0.5, or the run
ended because loss or gradient was not finite. ended early: no group with unequal rewards was left, or too many steps
were not finite.
Values are means over seeds, in brackets the smallest and largest."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    settings = {
        "rollouts": args.rollouts,
        "prompts": args.prompts,
        "group_size": args.group_size,
        "entropy_coef": args.entropy_coef,
    }
    wanted = [(recipe, seed) for seed in args.seeds for recipe in args.only]  # a whole seed first
    done = read(args.out, settings)
    todo = [job for job in wanted if job not in done]
    if args.jobs and todo:
        done |= run_all(todo, settings, args.jobs, args.out)
    print(table({job: done[job] for job in wanted if job in done}, settings))
    missing = [job for job in wanted if done.get(job, {}).get("status", "error") == "error"]
    for recipe, seed in missing:
        reason = done.get((recipe, seed), {}).get("reason", "not run")
        print(f"missing: {recipe} seed {seed}: {reason}", file=sys.stderr)
    return 1 if missing else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    # Supervised fine-tuning samples nothing and has no reward to compare.
    names = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "sft")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="runs side by side")
    parser.add_argument("--rollouts", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=32, help="of each rollout")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="RECIPE")
    parser.add_argument("--entropy-coef", default="0.03", help="of the bonus that all get; 'own': the recipe's own")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/recipe_table.jsonl")
    return parser.parse_args(argv)


def read(path: Path, settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Runs that ended with these settings; a line cut by a crash and runs that failed are left out."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["settings"] == settings and record["status"] != "error":
            found[record["recipe"], record["seed"]] = record
    return found


def run_all(
    todo: list[tuple[str, int]], settings: dict[str, Any], jobs: int, out: Path
) -> dict[tuple[str, int], dict[str, Any]]:
    """Run them side by side; each is written when it ends."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before the workers start
    out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    started = time.monotonic()
    with (
        ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn"), _end_with_parent, (os.getpid(),)) as pool,
        out.open("a", encoding="utf-8") as file,
    ):
        if file.tell() and not out.read_text(encoding="utf-8").endswith("\n"):
            file.write("\n")  # a line cut by a crash
        futures = {pool.submit(run, recipe, seed, settings): (recipe, seed) for recipe, seed in todo}
        for future in as_completed(futures):
            recipe, seed = futures[future]
            record = found[recipe, seed] = future.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            what = f"final {record['final']:.3f}" if "final" in record else record["reason"]
            print(
                f"{time.monotonic() - started:6.0f} s  {len(found):3d}/{len(todo)}  {recipe} seed {seed}: "
                f"{record['status']}, {what}, {record['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return found


def _end_with_parent(parent: int) -> None:
    """A worker whose parent was killed would otherwise wait for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ------------------------------------------------------------------------------------------------------- one run


def run(recipe: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one recipe, in a worker process."""
    started = time.process_time()  # of its one thread: does not depend on what else the machine does
    record: dict[str, Any] = {"recipe": recipe, "seed": seed, "settings": settings}
    try:
        record |= train(recipe, seed, settings)
    except Exception as error:  # one recipe that fails must not end the others
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        record |= {"status": "error", "reason": reason, "trace": traceback.format_exc()}
    return record | {"seconds": round(time.process_time() - started, 1)}


def train(recipe: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Curves and final values of one run."""
    sys.path.insert(0, str(ROOT))
    _quiet()
    import lightning.pytorch as pl
    import torch

    from lit_grpo.errors import StopRun

    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    module, data = build(recipe, settings)
    curves: dict[str, list[float]] = {key: [] for key in ("reward", "entropy", "length", "grad_norm")}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            metrics = pl_module.step_metrics
            for key, values in curves.items():
                # Of a rollout of mixed groups alone the mean says nothing; a step that is left out has no norm.
                value = metrics.get("sampling/reward", metrics["reward"]) if key == "reward" else metrics.get(key)
                if value is not None:
                    values.append(round(float(value), 5))

    out: dict[str, Any] = {"status": "done", "reason": ""}
    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    plain |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    try:
        pl.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[Keep()], **plain).fit(module, datamodule=data)
    except StopRun as stop:
        out |= {"status": "stopped", "reason": str(stop)}
    (scores,) = pl.Trainer(**plain).validate(module, datamodule=data, verbose=False)
    out |= {"name": module.objective.name, "greedy": scores["val/reward"], "done_rollouts": len(curves["reward"])}
    out |= {key: _mean(values[-LAST:]) for key, values in curves.items() if key != "reward"}
    rewards = curves["reward"]
    windows = [_mean(rewards[i : i + LAST]) for i in range(max(1, len(rewards) - LAST + 1))]
    out |= {"final": windows[-1], "best": max(windows), "rewards": rewards, "entropies": curves["entropy"]}
    return out | {"collapsed": collapsed(out)}


def build(recipe: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The module and data of the quickstart with the recipe's file on top."""
    import yaml

    from lit_grpo import LitGRPO, RolloutDataModule
    from lit_grpo.engines import EngineConfig
    from lit_grpo.rewards import ExactMatch
    from lit_grpo.tasks import AdditionPrompts
    from lit_grpo.types import Sampling

    base = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    config = merge(base, yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")))
    model = config["model"]
    if settings["entropy_coef"] != "own":
        model["objective"]["entropy_coef"] = float(settings["entropy_coef"])
    prompts = AdditionPrompts(**config["data"]["prompts"]["init_args"])
    data = RolloutDataModule(
        prompts=prompts,
        val_prompts=prompts,
        rewards=[ExactMatch()],
        group_size=settings["group_size"],
        prompts_per_rollout=settings["prompts"],
        rollouts=settings["rollouts"],
        sampling=Sampling(**config["data"]["sampling"]),
        engine=EngineConfig(**config["data"]["engine"]),
    )
    return LitGRPO(**model), data


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def collapsed(values: dict[str, Any]) -> bool:
    """See ``DEFINITIONS``."""
    fell = values["best"] > 0.1 and values["final"] < 0.5 * values["best"]
    stuck = values["entropy"] < 0.01 and values["final"] < 0.5
    return fell or stuck or "not finite" in values["reason"]


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _quiet() -> None:
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


# ------------------------------------------------------------------------------------------------------- table


def table(done: dict[tuple[str, int], dict[str, Any]], settings: dict[str, Any]) -> str:
    """Markdown, best recipe first."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "lightning"))
    rows = []
    for recipe in dict.fromkeys(recipe for recipe, _ in done):
        runs = [record for (name, _), record in done.items() if name == recipe and record["status"] != "error"]
        if not runs:
            continue
        cells = [_span(runs, "final", 3), _span(runs, "best", 3), _span(runs, "greedy", 2), _span(runs, "entropy", 3)]
        cells += [_span(runs, "length", 2), _span(runs, "grad_norm", 3)]
        cells.append(f"{sum(r['collapsed'] for r in runs)} of {len(runs)}")
        early = [str(r["done_rollouts"]) for r in runs if r["status"] == "stopped"]
        cells.append("at " + ", ".join(early) if early else "-")
        cells.append(f"{_mean([r['seconds'] for r in runs]):.0f}")
        rows.append((-_mean([r["final"] for r in runs]), f"| `{recipe}` | " + " | ".join(cells) + " |"))
    bonus = settings["entropy_coef"]
    bonus = "each recipe's own entropy coefficient" if bonus == "own" else f"entropy_coef {bonus} for all"
    head = ["recipe", "final", "best", "greedy", "entropy", "length", "grad norm", "collapsed", "ended early", "CPU s"]
    return "\n".join(
        [
            f"Quickstart task, {settings['rollouts']} rollouts of {settings['prompts']} x {settings['group_size']}, "
            f"{bonus}, seeds {', '.join(map(str, sorted({seed for _, seed in done})))}; one thread of "
            f"{platform.machine()}, {versions}.",
            "",
            DEFINITIONS,
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|" * len(head),
            *(text for _, text in sorted(rows)),
        ]
    )


def _span(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [run[key] for run in runs]
    mean = f"{_mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    raise SystemExit(main())
