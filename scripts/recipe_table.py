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
import os
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import side_by_side  # noqa: E402

BASE, RECIPES = ROOT / "configs/quickstart.yaml", ROOT / "configs/recipes"
LAST = 10
"""Number of last rollouts that a final value is the mean of."""
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
    found = [record for record in side_by_side.read(args.out) if record["settings"] == settings]
    done = by_job(found)
    todo = [(recipe, seed, settings) for recipe, seed in wanted if (recipe, seed) not in done]
    if args.jobs and todo:
        done |= by_job(side_by_side.run_all(run, todo, args.jobs, args.out, line))
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


def by_job(records: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(record["recipe"], record["seed"]): record for record in records}


def line(record: dict[str, Any]) -> str:
    """Give the line that is shown when a run ends."""
    what = f"final {record['final']:.3f}" if "final" in record else record["reason"]
    return f"{record['recipe']} seed {record['seed']}: {record['status']}, {what}, {record['seconds']:.0f} s"


# ------------------------------------------------------------------------------------------------------- one run


def run(recipe: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one recipe, in a worker process."""
    named = {"recipe": recipe, "seed": seed, "settings": settings}
    return named | side_by_side.attempt(lambda: train(recipe, seed, settings))


def train(recipe: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Give curves and final values of one run."""
    import lightning.pytorch as pl

    curves = ("reward", "sampling/reward", "policy/entropy", "completions/length", "optim/grad_norm")
    module, data, out = side_by_side.fit(config_of(recipe, settings), seed, curves)
    kept = out.pop("curves")
    # Of a rollout of mixed groups alone the mean says nothing; a step that is left out has no norm.
    rewards = [own if all_ is None else all_ for own, all_ in zip(kept["reward"], kept["sampling/reward"], strict=True)]
    (scores,) = pl.Trainer(**side_by_side.PLAIN).validate(module, datamodule=data, verbose=False)
    out |= {"name": module.objective.name, "greedy": scores["val/reward"], "done_rollouts": len(rewards)}
    for key in ("policy/entropy", "completions/length", "optim/grad_norm"):
        out[key] = _mean([value for value in kept[key] if value is not None][-LAST:])
    windows = [_mean(rewards[i : i + LAST]) for i in range(max(1, len(rewards) - LAST + 1))]
    out |= {"final": windows[-1], "best": max(windows), "rewards": rewards}
    out["entropies"] = [value for value in kept["policy/entropy"] if value is not None]
    return out | {"collapsed": collapsed(out)}


def config_of(recipe: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Give the quickstart's configuration with the recipe's file on top, evaluated on the training problems."""
    config = side_by_side.load(BASE, RECIPES / f"{recipe}.yaml")
    if settings["entropy_coef"] != "own":
        config["model"]["objective"]["entropy_coef"] = float(settings["entropy_coef"])
    # The same budget for all: the published 50 rollouts of value pretraining would take a third of VAPO's.
    if recipe == "vapo":
        config["model"]["critic"] = {"warmup_rollouts": 0}
    shape = {"group_size": settings["group_size"], "prompts_per_rollout": settings["prompts"]}
    config["data"] |= shape | {"rollouts": settings["rollouts"], "val_prompts": config["data"]["prompts"]}
    return config


def collapsed(values: dict[str, Any]) -> bool:
    """Compute the columns that ``DEFINITIONS`` describes."""
    fell = values["best"] > 0.1 and values["final"] < 0.5 * values["best"]
    stuck = values["policy/entropy"] < 0.01 and values["final"] < 0.5
    return fell or stuck or "not finite" in values.get("reason", "")


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


# ------------------------------------------------------------------------------------------------------- table


def table(done: dict[tuple[str, int], dict[str, Any]], settings: dict[str, Any]) -> str:
    """Write the table in Markdown, best recipe first."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "lightning"))
    rows = []
    for recipe in dict.fromkeys(recipe for recipe, _ in done):
        runs = [record for (name, _), record in done.items() if name == recipe and record["status"] != "error"]
        if not runs:
            continue
        cells = [
            _span(runs, "final", 3),
            _span(runs, "best", 3),
            _span(runs, "greedy", 2),
            _span(runs, "policy/entropy", 3),
        ]
        cells += [_span(runs, "completions/length", 2), _span(runs, "optim/grad_norm", 3)]
        cells.append(f"{sum(r['collapsed'] for r in runs)} of {len(runs)}")
        early = [str(r["done_rollouts"]) for r in runs if r["status"] == "stopped"]
        cells.append("at " + ", ".join(early) if early else "-")
        cells.append(f"{_mean([r['seconds'] for r in runs]):.0f}")
        rows.append((-_mean([r["final"] for r in runs]), f"| `{recipe}` | " + " | ".join(cells) + " |"))
    bonus = settings["entropy_coef"]
    bonus = "each recipe's own entropy coefficient" if bonus == "own" else f"entropy_coef {bonus} for all"
    head = [
        "recipe",
        "final",
        "best",
        "greedy",
        "policy/entropy",
        "completions/length",
        "grad norm",
        "collapsed",
        "ended early",
        "CPU s",
    ]
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
