"""Sums and maxima over the ranks of a run, and Python values of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from lightning.pytorch.strategies import Strategy
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class RankReduction:
    """Exchange of small tensors and values between the ranks of a run; every rank must call it alike."""

    strategy: Strategy
    """Lightning's strategy, whose collectives are used."""
    device: torch.device | str
    """Device of this rank. NCCL reduces tensors on the GPU alone, and the sums of metrics are CPU tensors."""
    world_size: int = 1
    """Number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over ranks, on the device of the tensor."""
        return self._reduce(tensor, "sum")

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over ranks, on the device of the tensor."""
        return self._reduce(tensor, "max")

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1

    @property
    def sum_or_none(self) -> Callable[[Tensor], Tensor] | None:
        """:meth:`sum`; None where there is one rank, so that nothing is copied to a device and back."""
        return self.sum if self.several else None

    @property
    def max_or_none(self) -> Callable[[Tensor], Tensor] | None:
        """:meth:`max`; None where there is one rank."""
        return self.max if self.several else None

    def gather(self, value: T) -> list[T]:
        """Return the Python values of all ranks, in the order of the ranks."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        reduced = self.strategy.reduce(tensor.to(self.device), reduce_op=operation)
        return cast(Tensor, reduced).to(tensor.device)
