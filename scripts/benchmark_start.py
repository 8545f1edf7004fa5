#!/usr/bin/env python3
"""Seconds from the command to what a run says first: prompts, model, compiled passes, engine, first rollout.

    python scripts/benchmark_start.py --config configs/quickstart.yaml
    python scripts/benchmark_start.py --config my.yaml --cold -- --model.policy.path models/SmolLM2-135M-Instruct

Each start is a process of its own, a run of one rollout. With ``--cold`` the first one finds no compiled code; the
others find what it has left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARKS = {
    "prompts": "prompts are made with",
    "passes compiled": "compiled the learner's passes",
    "engine checked": "the engine takes over weights",
    "first rollout": "rollout 1/",
}
"""What is reached -> how the line begins that says so."""


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
        for name, beginning in MARKS.items():
            if beginning in line:
                reached.setdefault(name, time.perf_counter() - begun)
        if "first rollout" in reached:
            break
    process.kill()
    process.wait()
    if "first rollout" not in reached:
        raise SystemExit("".join(said[-20:]) + "\nthe run ended before its first rollout")
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configuration of `lit-grpo fit`")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="begin without compiled code")
    parser.add_argument("options", nargs="*", help="more options of `lit-grpo fit`, behind --")
    args = parser.parse_args()
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if args.cold:
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        command = [sys.executable, "-m", "lit_grpo", "fit", "--config", str(Path(args.config).resolve())]
        command += ["--trainer.default_root_dir", folder, "--data.rollouts", "1", *args.options]
        for number in range(1, args.starts + 1):
            times = start(command, environment, str(Path.cwd()))
            print(
                f"start {number}: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
