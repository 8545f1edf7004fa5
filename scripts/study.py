#!/usr/bin/env python
"""Try the claims of the papers behind the methods: train what each needs, and say whether it is supported here.

    python scripts/study.py --list                        # the claims, their sources, how many runs and how long
    python scripts/study.py --claim cl_delays --jobs 2    # one claim: its runs, and its verdict
    python scripts/study.py --jobs 2                      # all of them
    python scripts/study.py --plot                        # train nothing: write docs/study.md from the runs there are

A run is `lit-grpo fit` with a task's file of configs/study and an arm's upon it, on one thread. It is written to --out
(JSON lines) as soon as it has ended, and what is there with the same configuration is not run again, so the command can
be cut and repeated; claims share runs. Run folders lie in runs/study/fits, for `lit-grpo report RUN RUN ...`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import side_by_side  # noqa: E402
from scripts.study_cases.claims import CLAIMS, Claim, find  # noqa: E402
from scripts.study_cases.page import RECORDED, collect, judge, minutes_of, publish, read  # noqa: E402
from scripts.study_cases.results import NOT_RUN, seeds_for  # noqa: E402
from scripts.study_cases.runs import prepare, run, settings_of  # noqa: E402

Job = tuple[str, int]


def main(argv: list[str] | None = None) -> int:
    """Run the command and return 1 if a run failed, else 0."""
    args = parse(argv)
    claims = [find(name) for name in args.claim]
    if args.list:
        print(listing(claims, read(ROOT / "docs" / RECORDED)))
        return 0
    wanted = jobs_of(claims)
    done = recorded_runs(args.out, wanted, args.rollouts)
    todo = [job for job in wanted if job not in done]
    if args.jobs and todo and not args.plot:
        for task in dict.fromkeys(arm.partition("/")[0] for arm, _ in todo):
            prepare(task, args.models)
        folder = args.out.absolute().parent / "fits"
        work = [(arm, seed, args.rollouts, folder, args.models, args.mlflow) for arm, seed in todo]
        ended = side_by_side.run_all(run, work, args.jobs, args.out, line)
        done |= {(record["arm"], record["seed"]): record for record in ended if record["status"] != "error"}
    recorded = collect(list(done.values()), calculate(claims))
    for claim in claims:
        print(verdict(claim, recorded))
    if args.plot:
        print(f"\n{publish(recorded, args.docs)}")
        return 0
    return 1 if args.jobs and any(job not in done for job in wanted) else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = [claim.name for claim in CLAIMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", nargs="+", default=names, choices=names, metavar="NAME", help="left out: all")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="runs at once; 0: none")
    parser.add_argument("--list", action="store_true", help="print the claims and end")
    parser.add_argument("--plot", action="store_true", help="train nothing; write page, figures and recorded runs")
    parser.add_argument("--rollouts", type=int, help="length of each run in place of its task's, for a look")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/study/runs.jsonl")
    parser.add_argument("--mlflow", default="none", metavar="URI", help="MLflow store that gets the runs too")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "models", help="folder of the models that runs begin from"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where --plot writes")
    args = parser.parse_args(argv)
    if args.plot and len(args.claim) < len(names):
        parser.error("--plot writes the page of all claims: leave --claim out")
    args.models = args.models.absolute()
    return args


def jobs_of(claims: Sequence[Claim]) -> list[Job]:
    """List the runs of some claims, each once, all seeds of an arm together."""
    return list(dict.fromkeys((arm, seed) for claim in claims for arm in claim.needed for seed in claim.seeds))


def recorded_runs(path: Path, wanted: Sequence[Job], rollouts: int | None) -> dict[Job, dict[str, Any]]:
    """Read those of the wanted runs that are there with their present configuration."""
    settings = {arm: settings_of(arm, rollouts) for arm in dict.fromkeys(arm for arm, _ in wanted)}
    return {
        (record["arm"], record["seed"]): record
        for record in side_by_side.read(path)
        if (record["arm"], record["seed"]) in set(wanted) and record["settings"] == settings[record["arm"]]
    }


def calculate(claims: Sequence[Claim]) -> dict[str, Any]:
    """Do the calculations of those claims that need no training."""
    if not any(claim.exact for claim in claims):
        return {}
    from scripts.study_cases.exact import EXACT

    return {claim.name: EXACT[claim.name]() for claim in claims if claim.exact}


def line(record: dict[str, Any]) -> str:
    """Return the line that is shown when a run ends."""
    reason = f" {record['reason']}" if record["reason"] else ""
    return f"{record['arm']} seed {record['seed']}: {record['status']}{reason}, {record['seconds']:.0f} s"


def listing(claims: Sequence[Claim], recorded: dict[str, Any]) -> str:
    """Write one line a claim: name, how many runs it needs, how long they take, source; and a line on all together.

    Args:
        claims: that are listed.
        recorded: runs by which the time is told.
    """
    rows = []
    for claim in claims:
        runs, minutes = len(claim.needed) * len(claim.seeds), minutes_of(claim, recorded)
        needs = (claim.untestable and "cannot be tested here") or (f"{runs} runs" if runs else "calculated")
        takes = "" if not runs else "not recorded" if minutes is None else f"{minutes:.1f} min"
        rows.append(f"{claim.name:<38} {needs:<22} {takes:<13} {claim.source}")
    wanted = set(jobs_of(claims))
    seconds = [run["seconds"] for run in recorded["runs"] if (run["arm"], run["seed"]) in wanted]
    rows.append(
        f"{len(claims)} claims, {len(wanted)} runs; the {len(seconds)} recorded ones take {sum(seconds) / 60:.0f} "
        "minutes of one core. Times are of one core, and of a claim by itself: claims share runs."
    )
    return "\n".join(rows)


def verdict(claim: Claim, recorded: dict[str, Any]) -> str:
    """Write the verdict on a claim, with a line for each part."""
    said, parts = judge(claim, recorded)
    missing = " (runs are missing)" if said == NOT_RUN else ""
    agreeing = "" if not parts else ", {} of {} seeds for it".format(*seeds_for(parts))
    lines = [f"{claim.name}: {said}{agreeing}{missing}"]
    lines += [f"    {part.says}: {part.found()}, has to be {part.bound}" for part in parts]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
