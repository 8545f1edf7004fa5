"""Runs of the program in processes that are forked from this one, which has imported it: ready in milliseconds."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.rewards import Reward

CONFIG = """\
seed_everything: 3
model:
  policy:
    tiny: {layers: 1, width: 16, heads: 2}
  optimizer: {lr: 1.0e-3}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards:
    - {class_path: scripts.chaos_cases.forked_runs.Even}
  group_size: 4
  prompts_per_rollout: 4
  rollouts: 12
  sampling: {max_new_tokens: 3}
checkpoint: {every_n_rollouts: 3}
trainer:
  accelerator: cpu
  enable_progress_bar: false
  callbacks:
    - {class_path: lit_grpo.callbacks.HealthMonitor, init_args: {actions: {critical: log}}}
"""
"""A run of twelve rollouts of a random model, with a checkpoint every third."""


def preload() -> None:
    """Import what a run needs, so that its processes need not."""
    import mlflow.tracking  # noqa: F401
    import torch

    import lit_grpo.callbacks
    import lit_grpo.cli.lightning_cli  # noqa: F401

    torch.set_num_threads(1)


class Even(Reward):
    """Reward of 1 where the ids sum to an even number, true of half of a random model's answers."""

    def score(self, batch: Any) -> Any:
        return [float(sum(item.completion.token_ids) % 2 == 0) for item in batch]

    def final_answers(self, batch: Any) -> Any:
        return [item.text for item in batch]


@dataclass
class Run:
    """A run under way or over.

    Attributes:
        pid: its process.
        output: file with its standard output and error.
        started: when it was started, by the monotonic clock.
        code: exit code, negative where a signal ended it; None while it is under way.
    """

    pid: int
    output: Path
    started: float
    code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the run is under way."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; a run that has none by then is killed, and the code is None."""
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                return None
            time.sleep(0.02)
        return self.code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, and take note of the end if it is SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                _, status = os.waitpid(self.pid, 0)
                self.code = -9 if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def start(
    argv: Sequence[str],
    folder: Path,
    prepare: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    name: str = "out",
) -> Run:
    """Begin ``lit-grpo ARGV`` in ``folder``.

    Args:
        argv: arguments of the command line.
        folder: its current folder.
        prepare: called in the new process first, to plant a fault.
        environment: variables beside those of this process.
        name: beginning of the name of the file with what it prints.
    """
    number = sum(1 for _ in folder.glob(f"{name}-*.txt"))
    output = folder / f"{name}-{number}.txt"
    sys.stdout.flush()
    sys.stderr.flush()
    output.touch()
    pid = os.fork()
    if pid:
        return Run(pid, output, time.monotonic())
    code = 70
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(folder)
        os.environ.update(environment or {})
        prepare()
        from lit_grpo.cli.main import main

        code = main(list(argv))
        sys.stdout.flush()
        sys.stderr.flush()
        # As the interpreter does at its end.
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    finally:
        os._exit(code)
    raise AssertionError("not reached")


def kill_self_at(owner: object, name: str, count: int, *, before: Callable[..., None] | None = None) -> None:
    """Let this process die of SIGKILL in the ``count``-th call of a function.

    Args:
        owner: module or class that has it.
        name: its name.
        count: which call, from 1.
        before: called with the arguments instead of the function; None: the function itself is called first.
    """
    original = getattr(owner, name)
    calls = 0

    def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls != count:
            return original(*args, **kwargs)
        if before is None:
            original(*args, **kwargs)
        else:
            before(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    setattr(owner, name, wrapped)
