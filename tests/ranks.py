"""Jobs in processes of their own, alone or as the ranks of a group, forked from one server a session.

The server imports Lightning, Transformers and this package once; a fork of it is ready in milliseconds, where a new
interpreter pays 5 to 30 seconds of imports. Every job still gets a clean process: no state of another test is in it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_grpo.utils.ports import free_port
from tests.paths import ROOT

WORLD = 2
LIMIT = 600
"""Seconds after which two ranks wait for each other in vain; many times what any test here needs."""

multiprocessing.set_forkserver_preload(["lit_grpo.module", "lightning.pytorch", "transformers", "peft"])


def run_in_process(job: Callable[..., None], *args: Any, new_interpreter: bool = False) -> int:
    """Call ``job(*args)`` in a process of its own; its exit code, negative where a signal ended it.

    ``job`` is a function of a module that can be imported. ``new_interpreter`` imports everything again, at a cost of
    seconds, and so gives the process another hash seed than the server's.
    """
    method = "spawn" if new_interpreter else "forkserver"
    (code,) = _run([(_alone, (job, args, dict(os.environ)))], method)
    return code


def on_two_ranks(job: Callable[[int, str], Any], folder: Path) -> list[Any]:
    """What ``job(rank, folder)`` gave on each rank. It is a function of a module that can be imported."""
    return on_ranks(WORLD, job, folder)


def on_ranks(count: int, job: Callable[[int, str], Any], folder: Path) -> list[Any]:
    """What ``job(rank, folder)`` gave on each of so many ranks. It is a function of a module that can be imported."""
    port = free_port()
    # Importing a model touches the cards, and a fork of a process that has touched them can use none.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    codes = _run([(_rank, (rank, port, str(folder), job, dict(os.environ))) for rank in range(count)], method)
    assert codes == [0] * count, f"the ranks ended with {codes}; their errors are above"
    # The tests' own files, so any type may be in them.
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def enter(rank: int, count: int = WORLD) -> None:
    """Before every Trainer: Lightning takes its variables away at the end of a run."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(count))


def _run(jobs: list[tuple[Callable[..., None], tuple[Any, ...]]], method: str = "forkserver") -> list[int]:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # new processes import the job by its name
    context: Any = multiprocessing.get_context(method)
    processes = [context.Process(target=target, args=args) for target, args in jobs]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    try:
        # A rank that fails leaves the others waiting for it: they are ended with it.
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode not in (None, 0) for process in processes):
                break
            assert time.monotonic() < end, f"after {LIMIT} seconds the processes still wait for each other"
            next(process for process in processes if process.exitcode is None).join(0.1)
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert None not in codes
    return [code for code in codes if code is not None]


def _prepare(environment: dict[str, str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The server keeps the environment of its start; the test may have changed its own since.
    os.environ.clear()
    os.environ.update(environment)


def _alone(job: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    _prepare(environment)
    job(*args)


def _rank(rank: int, port: int, folder: str, job: Callable[[int, str], Any], environment: dict[str, str]) -> None:
    _prepare(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.save(job(rank, folder), f"{folder}/{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
