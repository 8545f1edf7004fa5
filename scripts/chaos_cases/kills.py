"""Runs killed with SIGKILL and resumed, compared to the bit with runs that were not."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from scripts.chaos_cases import kill_results
from scripts.chaos_cases.kill_results import TRACKED
from scripts.chaos_cases.kill_runs import FIRST_SAVED, HERE, Point, import_everything, prepare, serve

ROLLOUTS = 10
PARTS = ("state", "samples", "metrics", "journal", "files")
"""What must be equal to the bit."""

MONITORS = ("EntropyMonitor", "GradientNormMonitor", "LengthMonitor", "RewardMonitor", "RatioMonitor", "SignalMonitor",
            "RewardHackingMonitor", "CollapseDetector")  # fmt: skip


def base() -> dict[str, Any]:
    """Return the configuration that all variants change: a random model of 16 columns, 10 rollouts of 4 x 4."""
    monitors = [{"class_path": f"lit_grpo.callbacks.monitors.{name}"} for name in MONITORS]
    health = {"class_path": "lit_grpo.callbacks.HealthMonitor",
              "init_args": {"actions": {"critical": "log"}, "monitors": monitors}}  # fmt: skip
    return {
        "seed_everything": 3,
        "model": {
            "policy": {"tiny": {"layers": 1, "width": 16, "heads": 2}},
            "objective": {"recipe": "grpo"},
            "optimizer": {"lr": 1.0e-3},
            "guards": {"max_engine_gap": None, "max_ratio_gap": None},
        },
        "data": {
            "prompts": {"class_path": "lit_grpo.data.AdditionPrompts", "init_args": {"digits": 1}},
            "rewards": [{"class_path": f"{HERE}.Even"}],
            "group_size": 4, "prompts_per_rollout": 4, "rollouts": ROLLOUTS, "sampling": {"max_new_tokens": 4},
        },
        "checkpoint": {"every_n_rollouts": FIRST_SAVED},
        "trainer": {
            "accelerator": "cpu",
            "callbacks": [{"class_path": f"{HERE}.Probe"}, health],
            "enable_progress_bar": False,
        },
    }  # fmt: skip


def _rollback(config: dict[str, Any]) -> None:
    health = {"class_path": "lit_grpo.callbacks.HealthMonitor", "init_args": {
        "monitors": [{"class_path": f"{HERE}.Alarm"}], "actions": {"critical": "rollback"}, "checkpoint_every": 2,
        "checkpoints": 2, "remedies": {"learning_rate_too_high": {"lr_scale": 0.5}}}}  # fmt: skip
    config["trainer"]["callbacks"] = [{"class_path": f"{HERE}.Probe"}, {"class_path": f"{HERE}.Kick"}, health]


def _validation(config: dict[str, Any]) -> None:
    prompts = {"class_path": "lit_grpo.data.AdditionPrompts", "init_args": {"digits": 1, "n": 6, "seed": 1}}
    config["data"]["val_prompts"] = prompts
    # Every third too: at 3, 6 and 9 a rollout is validated and saved.
    config["trainer"] |= {"val_check_interval": 3, "check_val_every_n_epoch": None}


def _set(**changes: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, last = path.split("__")
            at = config
            for parent in parents:
                at = at.setdefault(parent, {})
            at[last] = value

    return change


def _all(*changes: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        for one in changes:
            one(config)

    return change


VARIANTS: dict[str, Any] = {
    "grpo": _set(),
    "two updates": _set(model__updates_per_rollout=2, model__minibatch_prompts=2),
    "dapo": _set(model__objective={"recipe": "dapo"}, data__group_size=2),
    "ppo": _set(model__objective={"recipe": "ppo"}),
    "ppo, shared trunk": _set(
        model__objective={"recipe": "ppo"}, model__critic={"backbone": "shared", "warmup_rollouts": 1}
    ),
    "trpo": _set(model__objective={"recipe": "trpo_penalty"}),
    "gtpo": _set(model__objective={"recipe": "gtpo"}),
    "lora": _set(model__policy__lora={"rank": 2, "alpha": 4.0}),
    "refreshed reference": _set(
        model__objective={"recipe": "grpo", "kl_coef": 0.05}, model__reference={"refresh_every": 2}
    ),
    "curriculum": _set(data__curriculum={"above": 0.2, "below": 0.9}),
    "staleness 1": _set(model__max_staleness=1),
    "staleness 1, dapo": _set(model__max_staleness=1, model__objective={"recipe": "dapo"}, data__group_size=2),
    "staleness 1, validation": _all(_set(model__max_staleness=1), _validation),
    "validation": _validation,
    "rollback": _rollback,
    "rollback, validation": _all(_rollback, _validation),
    "rollback, staleness 1": _all(_rollback, _set(model__max_staleness=1)),
    "ddp, 2 ranks": _set(trainer__strategy="ddp", trainer__devices=2),
    "ddp, 2 ranks, staleness 1": _set(trainer__strategy="ddp", trainer__devices=2, model__max_staleness=1),
    "fsdp, 2 ranks": _set(trainer__strategy="fsdp", trainer__devices=2),
}

# Passings count from the start of the run. The first checkpoint is at rollout 3: later passings resume from one.
POINTS: tuple[Point, ...] = (
    ("half:write", 2), ("after:write", 2), ("before:move", 2), ("after:move", 2), ("after:link", 2),
    ("before:remove", 1), ("before:rollout_end", 2), ("after:rollout_end", 2), ("before:generate", 6),
    ("after:generate", 8), ("after:score", 26), ("before:sync", 6), ("after:sync", 7), ("before:step", 5),
    ("after:step", 6), ("before:log", 5), ("after:log", 6), ("half:line", 5), ("before:sent", 2), ("after:sent", 2),
    ("before:train_end", 1),
)  # fmt: skip
VALIDATION: tuple[Point, ...] = (("before:validate", 3), ("after:validate", 2), ("after:evaluated", 2))
ROLLBACK: tuple[Point, ...] = (
    ("after:restore", 1), ("before:restore", 1), ("after:journal", 3), ("before:journal", 3), ("before:ring_remove", 1),
    ("after:ring_remove", 2), *((f"{how}:write", n) for how in ("half", "after") for n in (4, 5, 6, 7, 8)),
    *((f"{how}:{what}", n) for how in ("before", "after") for what in ("move", "link") for n in (3, 4)),
)  # fmt: skip


def points_of(variant: str, kills: int, seed: int) -> list[Point]:
    """Choose where runs of a variant are killed: half at random moments, half at injected points, by the seed."""
    chosen = random.Random(f"{seed} {variant}")
    special = [*(VALIDATION if "validation" in variant else ()), *(ROLLBACK if "rollback" in variant else ())]
    # Shards are not written by the writer of one file.
    general = [p for p in POINTS if "fsdp" not in variant or not p[0].endswith((":write", ":seal"))]
    points = chosen.sample(special, min(len(special), kills // 3))
    points += chosen.sample(general, min(len(general), kills // 2 - len(points) // 2))
    moments = [("time", chosen.randrange(0, 2000)) for _ in range(kills - len(points))]
    return [*points, *moments]


def one_case(root: Path, run: Any, variant: str, number: int, point: Point) -> dict[str, Any]:
    """Kill a run at a point, resume it, and compare it with the unbroken one of its variant."""
    whole = folder_of(root, variant) / "whole"
    case = whole.parent / f"{number:03d}"
    ranks = 2 if "2 ranks" in variant else 1
    prepare(case, configuration(variant), root / "mlflow.db")
    row: dict[str, Any] = {"variant": variant, "number": number, "point": list(point)}
    started = time.monotonic()
    row["killed"] = run(case, point, ranks)
    folder = kill_results.run_folder(case)
    saved = [] if folder is None else sorted((folder / "checkpoints").glob("rollout-*.ckpt"))
    last = None if folder is None else folder / "checkpoints" / "last.ckpt"
    # Between a checkpoint's move and its link the newest is what the message of a run without --ckpt_path names.
    last = last if last is not None and last.is_symlink() else saved[-1] if saved else None
    row["from"] = None if last is None else last.resolve().name
    # Killed before anything was saved: the run begins again, in the same place.
    again = {} if folder is None else {"run_dir": str(folder)}
    row["resumed"] = run(case, None, ranks, **({"ckpt_path": str(last)} if row["from"] is not None else again))
    row["seconds"] = round(time.monotonic() - started, 1)
    row |= kill_results.differences(whole, case)
    return row


def folder_of(root: Path, variant: str) -> Path:
    """Return the folder of a variant's runs."""
    return root / variant.replace(" ", "_").replace(",", "")


def configuration(variant: str) -> dict[str, Any]:
    """Return the whole configuration of a variant."""
    config = base()
    VARIANTS[variant](config)
    return config


def all_cases(job: tuple[Path, str, list[tuple[int, Point]]]) -> None:
    """Run the unbroken run of a variant, unless it is there, and its kills; results go to ``results.jsonl``."""
    root, variant, points = job
    whole = folder_of(root, variant) / "whole"

    def cases(run: Any) -> None:
        if not (whole / "done").exists():
            prepare(whole, configuration(variant), root / "mlflow.db")
            codes = run(whole, None, 2 if "2 ranks" in variant else 1)
            if any(codes):
                raise SystemExit(f"the unbroken run of {variant!r} ended with {codes}; see {whole}/log.0.txt")
            (whole / "done").touch()
        for number, point in points:
            row = one_case(root, run, variant, number, point)
            with (root / "results.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            wrong = {part: row[part] for part in (*PARTS, "mlflow") if row[part]}
            state = "equal" if not wrong and not any(row["resumed"]) else f"NOT equal {row['resumed']} {wrong}"
            print(f"{variant} {row['point']} {row['seconds']} s from {row['from']}: {state}", flush=True)

    config = folder_of(root, variant) / "c.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(configuration(variant)))
    serve(config, cases)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table in Markdown: kills that were equal in each part, by variant."""
    parts = [*PARTS, *TRACKED]
    head = " | ".join([*PARTS, "all of these", "MLflow: no gap, no other value", "no point twice"])
    lines = [f"| variant | kills | resumed from a checkpoint | {head} |", "|---" * (len(parts) + 4) + "|"]
    variants = [*dict.fromkeys(row["variant"] for row in rows)]
    for variant in [*variants, "all"]:
        of = [row for row in rows if variant in (row["variant"], "all") and -9 in row["killed"]]
        ended = [row for row in of if not any(row["resumed"])]
        equal = {part: str(sum(not row[part] for row in ended)) for part in parts}
        whole = str(sum(not any(row[part] for part in PARTS) for row in ended))
        resumed = sum(row["from"] is not None for row in of)
        cells = [*(equal[part] for part in PARTS), whole, *(equal[part] for part in TRACKED)]
        lines.append(f"| {variant} | {len(of)} | {resumed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos.py kills", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("chaos-kills"), help="folder of runs and results; goes on there"
    )
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--kills", type=int, default=11, help="kills of each variant")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of points and moments")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args(argv)
    root = options.out.absolute()
    results = root / "results.jsonl"
    import_everything(root / "mlflow.db")
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    known = {(row["variant"], row["number"]) for row in done}
    jobs = []
    for variant in options.variants:
        numbered = [(n + 1000 * options.seed, p) for n, p in enumerate(points_of(variant, options.kills, options.seed))]
        left = [(number, point) for number, point in numbered if (variant, number) not in known]
        if left:
            jobs.append((root, variant, left))
    # A process for each variant, which reads its configuration once and forks its runs.
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, maxtasksperchild=1) as pool:
        for _ in pool.imap_unordered(all_cases, jobs, chunksize=1):
            pass
    done = [json.loads(line) for line in results.read_text().splitlines()]
    print(table(done))
    failed = [row for row in done if any(row["resumed"]) or any(row[part] for part in PARTS)]
    print(f"{len(failed)} of {len(done)} were not equal" if failed else f"all {len(done)} were equal")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
