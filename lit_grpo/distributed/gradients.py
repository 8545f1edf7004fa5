"""Gradients of several ranks: exchanged once for each optimizer step, not in each backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from lightning.pytorch.strategies import DDPStrategy, Strategy

BUCKET_ELEMENTS = 16 * 1024**2
"""Gradient elements that are exchanged in one collective."""


@dataclass(frozen=True)
class GradientExchange:
    """Exchange of gradients under DDP. Other strategies need none: FSDP2 sums shards in its backward pass."""

    ddp: DDPStrategy | None = None
    """The strategy whose exchange in backward passes is replaced; None: gradients are not exchanged here."""
    world_size: int = 1
    """Number of ranks."""

    @classmethod
    def of(cls, strategy: Strategy, world_size: int) -> GradientExchange:
        """Return the exchange that a strategy needs."""
        return cls(strategy if isinstance(strategy, DDPStrategy) else None, world_size)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Keep DDP from exchanging gradients in a backward pass."""
        # Ranks may have different numbers of completions to learn from, even none, and DDP would wait for a backward
        # pass that never comes.
        return nullcontext() if self.ddp is None else self.ddp.block_backward_sync()

    @torch.no_grad()
    def average(self, weights: Sequence[torch.Tensor]) -> None:
        """Replace the gradient of each weight by its mean over ranks; a missing one counts as 0."""
        if self.ddp is None or self.world_size == 1:
            return
        bucket: list[torch.Tensor] = []
        elements = 0
        for count, weight in enumerate(weights, 1):
            # A rank that had nothing to learn from joins in with zeros: the others would wait for it.
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            bucket.append(weight.grad)
            elements += weight.grad.numel()
            # One collective has one number format.
            if count == len(weights) or elements >= BUCKET_ELEMENTS or weights[count].dtype != weight.dtype:
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                torch.distributed.all_reduce(flat)
                flat /= self.world_size
                for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(mean.view_as(gradient))
                bucket, elements = [], 0
