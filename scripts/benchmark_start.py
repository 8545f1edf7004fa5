#!/usr/bin/env python3
"""Where the seconds go between the command and the first rollout: a table of phases, for each engine.

    python scripts/benchmark_start.py --config configs/quickstart.yaml
    python scripts/benchmark_start.py --config my.yaml --engines transformers vllm vllm:2 --cold -- --data.group_size 4
    python scripts/benchmark_start.py --config my.yaml --engines vllm:2 --beside ../before   # another checkout, in turn

Each start is a process of its own, a run of one rollout; starts of all engines (and of the other checkout) take turns,
so that a busy machine is busy for all. Seconds are the median of the starts, with the lowest and the highest. With
``--cold`` the first round finds no compiled code and no measurement of the card; later rounds find what it has left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PHASES = {
    "configuration read": "importing Lightning and the model",
    "imports": "parsing the configuration",
    "run built": "trainer, model and data are built",
    "prompts read": "prompts are made with",
    "model loaded": "the model is loaded",
    "passes compiled": "compiled the learner's passes",
    "engine ready": "the engine was ready",
    "engine checked": "the engine takes over weights",
    "first completion": "the first completion has come",
    "first rollout": "rollout 1/",
}
"""What is reached -> how the line begins that says so, in the order in which a run says them."""
LAST = "first rollout"


class Contestant(NamedTuple):
    """One kind of start."""

    name: str
    checkout: Path
    options: tuple[str, ...]


def contestants(engines: Sequence[str], beside: Path | None) -> list[Contestant]:
    """Return all kinds of starts: each engine, ``NAME`` or ``NAME:PROCESSES``, of this checkout and the other one."""
    found = []
    for engine in engines or [""]:
        name, _, processes = engine.partition(":")
        options = [f"--data.engine.name={name}"] if name else []
        options += [f"--data.engine.processes={processes}"] if processes else []
        for label, checkout in (("", ROOT), *([(f" in {beside.name}", beside)] if beside is not None else [])):
            found.append(Contestant((engine or "as configured") + label, checkout, tuple(options)))
    return found


def start(command: list[str], environment: dict[str, str], folder: str) -> dict[str, float]:
    """Run a command until its first rollout, and return the seconds after which it said each thing."""
    begun, reached = time.perf_counter(), dict[str, float]()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        for name, beginning in PHASES.items():
            if beginning in line:
                reached.setdefault(name, time.perf_counter() - begun)
        if LAST in reached:
            break
    process.kill()
    process.wait()
    if LAST not in reached:
        raise SystemExit("".join(said[-20:]) + "\nthe run ended before its first rollout")
    return reached


def table(name: str, starts: Sequence[dict[str, float]]) -> str:
    """Return a table in Markdown: when each phase has ended, and how long it took from the end of the one before."""
    lines = [f"| {name}, {len(starts)} starts | takes, s | lowest-highest | ends after, s |", "|---|---|---|---|"]
    took: dict[str, list[float]] = {}
    for one in starts:
        before = 0.0
        # In the order of this start: what goes on beside something else may end before or after it.
        for phase, seconds in sorted(one.items(), key=lambda item: item[1]):
            took.setdefault(phase, []).append(seconds - before)
            before = seconds
    ends = {phase: statistics.median(one[phase] for one in starts if phase in one) for phase in took}
    for phase, end in sorted(ends.items(), key=lambda item: item[1]):
        each = took[phase]
        lines.append(f"| {phase} | {statistics.median(each):.1f} | {min(each):.1f}-{max(each):.1f} | {end:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configuration of `lit-grpo fit`")
    parser.add_argument("--starts", type=int, default=3, help="of each engine")
    parser.add_argument("--cold", action="store_true", help="begin without compiled code and measurements")
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME[:PROCESSES]", help="instead of the file's")
    parser.add_argument("--beside", type=Path, help="folder of another checkout that takes turns with this one")
    parser.add_argument("options", nargs="*", help="more options of `lit-grpo fit`, behind --")
    args = parser.parse_args()
    kinds = contestants(args.engines, args.beside.resolve() if args.beside is not None else None)
    times: dict[str, list[dict[str, float]]] = {kind.name: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "LIT_GRPO_LOG": "debug"}
        if args.cold:
            environment |= {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"), "XDG_CACHE_HOME": folder}
        command = [sys.executable, "-m", "lit_grpo", "fit", "--config", str(Path(args.config).resolve())]
        command += ["--trainer.default_root_dir", folder, "--data.rollouts", "1"]
        for number in range(1, args.starts + 1):
            for kind in kinds:
                path = os.pathsep.join(filter(None, [str(kind.checkout), os.environ.get("PYTHONPATH")]))
                reached = start(
                    [*command, *kind.options, *args.options], environment | {"PYTHONPATH": path}, str(Path.cwd())
                )
                times[kind.name].append(reached)
                print(f"{kind.name}, start {number}: {reached[LAST]:.1f} s", file=sys.stderr, flush=True)
    for name, starts in times.items():
        print(f"\n{table(name, starts)}", flush=True)


if __name__ == "__main__":
    main()
