"""Runs on two processes and on one, shared by the tests of sharded training."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.types import Rollout
from tests import tiny
from tests.paths import ROOT

WORLD = 2
LIMIT = 600
"""Seconds after which two ranks wait for each other in vain; many times what any test here needs."""

# One process imports these once; the ranks of all tests are forks of it.
multiprocessing.set_forkserver_preload(["lit_grpo.module", "lightning.pytorch", "transformers", "peft"])


class Unequal(tiny.Recorder):
    """Also counts the micro-batches of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.micro_batches: list[int] = []
        self.lengths: list[list[int]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        cut = pl_module.micro_batches

        def counted(batch: Rollout, rows: torch.Tensor) -> Any:
            parts = list(cut(batch, rows))
            self.micro_batches.append(len(parts))
            return iter(parts)

        pl_module.micro_batches = counted

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.lengths.append([len(c.token_ids) for c in batch.completions])


def fit(module: Any, data: Any, *, ranks: int, strategy: str, callbacks: Any = (), **changes: Any) -> Unequal:
    """A run; ``strategy`` is ``fsdp``, ``ddp``, ``auto`` or Lightning's own ``model parallel``."""
    recorder = Unequal()
    path, weights_only = changes.pop("ckpt_path", None), changes.pop("weights_only", None)
    made: Any = strategy
    if strategy == "fsdp":
        made = FSDP2Strategy()
    elif strategy == "model parallel":
        made = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = tiny.trainer(devices=ranks, strategy=made, callbacks=[recorder, *callbacks], **changes)
    source = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(module, **source, ckpt_path=path, weights_only=weights_only)
    return recorder


def _worker(rank: int, port: int, folder: str, job: Callable[[int, str], Any], environment: dict[str, str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.clear()  # what it was when the first of all ranks began: the run's seed may have been set since
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.save(job(rank, folder), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def enter(rank: int) -> None:
    """Before every Trainer: Lightning takes its variables away at the end of a run."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(WORLD))


def on_two_ranks(job: Callable[[int, str], Any], folder: Path) -> list[Any]:
    """What ``job(rank, folder)`` gave on each rank. It is a function of a module that can be imported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(ROOT)
    if root not in sys.path:
        sys.path.insert(0, root)  # new processes import the job by its name
    context = mp.start_processes(
        _worker, args=(port, str(folder), job, dict(os.environ)), nprocs=WORLD, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + LIMIT
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise AssertionError(f"after {LIMIT} seconds the ranks still wait for each other")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def head(module: Any) -> torch.Tensor:
    """The weights of the value head, or of a critic of its own, whole, as one vector."""
    module.reshard()
    parameters = (module.critic or module.policy.value_head).parameters()
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in parameters])
