"""Two ranks that were started each on its own, as torchrun does, of which one is signalled, stopped or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.utils.ports import free_port
from scripts.chaos_cases.forked_runs import CONFIG, Run, start

ROLLOUTS = 400
"""Too many to be over before the fault."""
LIMIT = 60.0
"""Seconds within which all ranks must have ended."""


@dataclass
class Outcome:
    """What became of the ranks.

    Attributes:
        codes: exit code of each; None: it had not ended.
        seconds: from the first signal to the end of the last rank.
        text: what they have printed.
        steps: steps in metrics.jsonl.
        saved: rollouts trained on in the newest checkpoint; 0: there is none.
    """

    codes: list[int | None]
    seconds: float
    text: str
    steps: int
    saved: int

    @property
    def messages(self) -> list[str]:
        """The lines that name a rank."""
        return [line for line in self.text.splitlines() if line.startswith("lit-grpo: rank")]


def start_ranks(
    folder: Path, *, strategy: str = "ddp", rollouts: int = ROLLOUTS, extra: tuple[str, ...] = ()
) -> list[Run]:
    """Start two ranks of a run, with the variables that torchrun sets."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.yaml").write_text(CONFIG.replace("rollouts: 12", f"rollouts: {rollouts}"))
    port = str(free_port())
    words = ["fit", "--config", "a.yaml", "--trainer.devices", "2", "--trainer.strategy", strategy, *extra]
    ranks = []
    for rank in range(2):
        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "chaos",
        }  # fmt: skip
        ranks.append(start(words, folder, environment=environment, name=f"rank{rank}"))
    return ranks


def wait_for_steps(folder: Path, steps: int, ranks: list[Run], seconds: float = 120.0) -> None:
    """Wait until metrics.jsonl has so many lines.

    Raises:
        RuntimeError: a rank ended before, or it took too long.
    """
    end = time.monotonic() + seconds
    while steps_of(folder) < steps:
        if any(rank.poll() is not None for rank in ranks) or time.monotonic() > end:
            text = "\n".join(rank.text for rank in ranks)
            for rank in ranks:
                rank.kill()
            raise RuntimeError(f"the ranks did not get to step {steps}:\n{text}")
        time.sleep(0.05)


def steps_of(folder: Path) -> int:
    """Count the lines of the run's metrics.jsonl."""
    return sum(path.read_text().count("\n") for path in folder.glob("runs/*/metrics.jsonl"))


def saved_of(folder: Path) -> int:
    """Return the rollouts trained on in the newest checkpoint."""
    names = [path.resolve().name for path in folder.glob("runs/*/checkpoints/last.ckpt")]
    return int(names[0].removeprefix("rollout-").removesuffix(".ckpt")) if names else 0


def strike(folder: Path, signals: list[tuple[int, int, float]], *, in_mlflow: bool = False, **settings: Any) -> Outcome:
    """Start two ranks and send signals to them.

    Args:
        folder: folder of the run.
        signals: rank, signal, and the seconds before it since the last one.
        in_mlflow: whether to wait until MLflow, which is told from a thread, knows the run.
        settings: see :func:`start_ranks`.
    """
    ranks = start_ranks(folder, **settings)
    wait_for_steps(folder, 4, ranks)
    began = time.monotonic()
    while in_mlflow and not _known_to_mlflow(folder) and time.monotonic() - began < LIMIT:
        time.sleep(0.05)
    began = time.monotonic()
    for rank, number, pause in signals:
        time.sleep(pause)
        if ranks[rank].poll() is None:
            os.kill(ranks[rank].pid, number)
    while time.monotonic() - began < LIMIT and any(one.poll() is None for one in ranks):
        time.sleep(0.05)
    seconds = time.monotonic() - began
    codes = [one.poll() for one in ranks]
    for one in ranks:
        if one.code is None:
            os.kill(one.pid, signal.SIGCONT)
            one.kill()
    return Outcome(codes, seconds, "\n".join(one.text for one in ranks), steps_of(folder), saved_of(folder))


def _known_to_mlflow(folder: Path) -> bool:
    for store in folder.glob("runs/mlflow.db"):
        # While it is being made there is no such table, or it is locked.
        with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(store) as connection:
            return connection.execute("select count(*) from runs").fetchone()[0] > 0
    return False


TERM, KILL, STOP = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP
SIGNALLED = {
    "SIGTERM to both ranks at once": [(0, TERM, 0.0), (1, TERM, 0.0)],
    "SIGTERM to both, 50 ms apart": [(0, TERM, 0.0), (1, TERM, 0.05)],
    "SIGTERM to both, 1.5 s apart": [(1, TERM, 0.0), (0, TERM, 1.5)],
    "SIGTERM to rank 1 alone": [(1, TERM, 0.0)],
    "SIGTERM to rank 0 alone": [(0, TERM, 0.0)],
}
LOST = {
    "rank 1 killed": (1, KILL),
    "rank 0 killed": (0, KILL),
    "rank 1 stopped": (1, STOP),
    "rank 0 stopped": (0, STOP),
}
