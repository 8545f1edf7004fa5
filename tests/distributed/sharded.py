"""Runs on two processes and on one, shared by the tests of sharded training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.types import Rollout
from tests import tiny


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


def head(module: Any) -> torch.Tensor:
    """The weights of the value head, or of a critic of its own, whole, as one vector."""
    module.reshard()
    parameters = (module.critic or module.policy.value_head).parameters()
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in parameters])
