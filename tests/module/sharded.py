"""Runs on two processes and on one, shared by the tests of sharded training."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lit_grpo.fsdp import FSDP2Strategy
from lit_grpo.types import Rollout
from tests import tiny

WORLD = 2


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
    """A run; ``strategy`` is ``fsdp``, ``ddp`` or ``auto``."""
    recorder = Unequal()
    path = changes.pop("ckpt_path", None)
    trainer = tiny.trainer(
        devices=ranks,
        strategy=FSDP2Strategy() if strategy == "fsdp" else strategy,
        callbacks=[recorder, *callbacks],
        **changes,
    )
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return recorder


def _worker(rank: int, port: int, folder: str, job: Callable[[int, str], Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
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
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)  # spawned processes import the job by its name
    mp.spawn(_worker, args=(port, str(folder), job), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
