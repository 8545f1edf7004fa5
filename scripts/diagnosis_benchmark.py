#!/usr/bin/env python
"""Train many short runs with known outcome, healthy ones and sabotaged ones, and see what the monitors say of them.

    python scripts/diagnosis_benchmark.py --seeds tuning --jobs 16 --json runs/diagnosis.json
    python scripts/diagnosis_benchmark.py --seeds heldout --only nl pl healthy_grpo  # a look
    python scripts/diagnosis_benchmark.py --record traces                       # also each run's metrics, to replay
    python scripts/diagnosis_benchmark.py --replay traces                       # the monitors on them, in seconds
    python scripts/diagnosis_benchmark.py --bench 2 --setting char_tags --record traces  # the second benchmark's runs
    python scripts/diagnosis_benchmark.py --bench 2 --replay tests/scripts/diagnosis/second_traces  # judged, in seconds

All runs are the task two_form_addition, one thread each, many side by side. A run is written to --out (JSON lines) when
it has ended, and what is there is not run again: the command can be cut and repeated. Sabotages are made from outside
(scripts/diagnosis/sabotage.py); monitors see what every callback sees, with their default thresholds.

A run with something wrong begins to be wrong (onset) with the sabotage; where recipe or reward lead it astray by and
by, when its true share of right answers last was near its best before it lost a fifth of it. It is judged by its first
critical diagnosis, on which it would be stopped, or else by its first warning. docs/diagnosis.md has the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import side_by_side  # noqa: E402

if TYPE_CHECKING:
    from scripts.diagnosis.cases import Job


def main(argv: list[str] | None = None) -> int:
    if second := arguments_of_second(sys.argv[1:] if argv is None else argv):
        from scripts.diagnosis.recording import main as record_second

        return record_second(second)
    args = parse(argv)
    from scripts.diagnosis.cases import plan
    from scripts.diagnosis.scoring import summary
    from scripts.diagnosis.table import report

    if args.replay:
        found = [replay(path) for path in sorted(args.replay.glob("*.json"))]
        runs = [run for run in found if args.only is None or run["name"] in args.only]
    else:
        jobs = [job for seeds in args.seeds for job in plan(seeds, args.only, tuple(args.parts))]
        runs = run_all(jobs, args)
    sets = {seeds: [run for run in runs if run["seeds"] == seeds] for seeds in dict.fromkeys(r["seeds"] for r in runs)}
    for seeds, of_set in sets.items():
        print(f"\n## Seeds: {seeds}\n\n{report(of_set, summary(of_set))}")
    if args.json:
        result: dict[str, Any] = {"summary": summary(runs), "runs": runs}
        if len(sets) > 1:
            result["sets"] = {seeds: summary(of_set) for seeds, of_set in sets.items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(run["status"] == "error" for run in runs) else 0


def arguments_of_second(argv: list[str]) -> list[str] | None:
    """Return the arguments after ``--bench 2``, which begins the command line of the second benchmark; else None."""
    return argv[2:] if argv[:2] == ["--bench", "2"] else None


def parse(argv: list[str] | None) -> argparse.Namespace:
    from scripts.diagnosis.cases import CASES, PARTS, SEEDS

    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", default=["tuning"], choices=tuple(SEEDS))
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="runs side by side; 1: in this process"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"of {', '.join(names)}")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rollouts", type=int, help="in place of each case's own length")
    parser.add_argument("--json", type=Path, help="write summary and runs here")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write each run's metrics here, step by step")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="train nothing: run the monitors over recorded runs")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where warm-started models are or are put")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/diagnosis_benchmark.jsonl")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------------- many runs


def run_all(jobs: Sequence[Job], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all jobs side by side, and write each down when it ends. The results are in the order of ``jobs``."""
    make_models({job.name for job in jobs}, args.models)
    settings = {"rollouts": args.rollouts, "code": fingerprint()}
    done = {job_of(record): record for record in side_by_side.read(args.out) if record.pop("settings") == settings}
    todo = [(job, args.models, args.rollouts, args.record) for job in jobs if job not in done]
    for record in side_by_side.run_all(run, todo, args.jobs, args.out, line, {"settings": settings}):
        del record["settings"]
        done[job_of(record)] = record
    return [done[job] for job in jobs]


def make_models(names: set[str], folder: Path) -> None:
    """Warm-start the models that the cases begin from, unless they are there."""
    from scripts.diagnosis.cases import MODELS, find
    from scripts.warm_start_two_form_addition import warm_start

    for model in sorted({find(name).model for name in names}):
        if not (folder / model / "config.json").exists():
            warm_start(folder / model, **MODELS[model])


def fingerprint() -> str:
    """Hash the code that decides what a run does and what is said of it.

    A changed threshold makes old results void.
    """
    digest = hashlib.sha256()
    for folder in (ROOT / "lit_grpo", ROOT / "callbacks", ROOT / "scripts/diagnosis"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def job_of(record: dict[str, Any]) -> Job:
    from scripts.diagnosis.cases import Job

    return Job(record["part"], record["name"], record["seed"], record["seeds"])


def line(record: dict[str, Any]) -> str:
    """Write the line that is shown when a run has ended."""
    what = record["reason"] if record["status"] == "error" else record.get("diagnosis", record.get("rollbacks"))
    return f"{record['part']} {record['name']} {record['seed']}: {what}, {record['cpu_seconds']:.0f} s"


# ------------------------------------------------------------------------------------------------------- one run


def run(job: Job, models: Path, rollouts: int | None, record: Path | None) -> dict[str, Any]:
    """Train one run and judge it, in a worker process."""
    from scripts.diagnosis.cases import find
    from scripts.diagnosis.scoring import judge, judge_rollback
    from scripts.diagnosis.training import train

    with tempfile.TemporaryDirectory() as folder:
        done = train(job, models, Path(folder), rollouts=rollouts)
    case = find(job.name)
    out = {**job._asdict(), "recipe": case.recipe, "optim/lr": case.lr, "steps": len(done["steps"])}
    out |= {key: done[key] for key in ("status", "reason", "traceback", "cpu_seconds") if key in done}
    start = case.make().start
    if job.part == "rollback":
        out |= judge_rollback(done["correct"], done["events"])
    else:
        out |= judge(case, done["correct"], start, [e for e in done["events"] if e["event"] == "diagnosis"])
        if record is not None:
            write_trace(record / f"{job.name}_seed{job.seed}.json", job, start, done)
    return out


def write_trace(path: Path, job: Job, start: int, done: dict[str, Any]) -> None:
    """Write each step's metrics with six digits, and what the monitors do not know."""
    from scripts.diagnosis.cases import find
    from scripts.diagnosis.scoring import onset_of, reward_fall

    case, correct = find(job.name), done["correct"]
    fall = reward_fall(correct)
    trace = {
        "name": f"{job.name}_seed{job.seed}",
        "sabotage": None if case.healthy else job.name,
        "recipe": case.recipe,
        "seed": job.seed,
        "seeds": job.seeds,
        "optim/lr": case.lr,
        "onset": onset_of(case, correct, start),
        "lost": None if fall is None or case.healthy else fall.lost,
        "right": sorted(case.right),
        "status": done["status"],
        "reason": done["reason"],
        "correct": [round(value, 4) for value in correct],
        "steps": [{key: float(f"{value:.6g}") for key, value in step.items()} for step in done["steps"]],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")


def replay(path: Path) -> dict[str, Any]:
    """Judge what the monitors, as they are now, say of a recorded run."""
    from scripts.diagnosis.cases import find
    from scripts.diagnosis.scoring import judge
    from scripts.diagnosis.training import health_monitor

    trace = json.loads(path.read_text(encoding="utf-8"))
    name = trace["name"].rsplit("_seed", 1)[0]
    case, monitor = find(name), health_monitor("diagnosis")
    said = [monitor.observe(step, metrics)[1] for step, metrics in enumerate(trace["steps"], 1)]
    out = {"part": "diagnosis", "name": name, "seed": trace["seed"], "seeds": trace.get("seeds", "tuning")}
    out |= {"status": trace["status"], "reason": trace["reason"], "steps": len(trace["steps"]), "cpu_seconds": 0.0}
    return out | judge(case, trace["correct"], case.make().start, [d.to_dict() for d in said if d is not None])


if __name__ == "__main__":
    raise SystemExit(main())
