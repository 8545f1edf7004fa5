"""Weights handed from process to process on one card, through CUDA IPC, block by block and without a host copy.

The sender packs tensors into a buffer on the card that all receivers have opened, and waits until each of them has taken
its copy before it packs the next ones. One buffer is opened once in each sync, where a handle for every weight would
cost each receiver an open and a close of the memory behind it (in torch about 0.1 ms and a reference count in a file of
shared memory), and memory that is reused while a receiver still reads it is not possible.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.engines.base import NamedWeights

BLOCK_BYTES = 2**28
"""Size of the buffer; it grows to hold a larger weight."""
_ALIGNMENT = 256
_DEVICE = 6
"""Place of the device's number among the arguments that rebuild a tensor from its handle."""


class Entry(NamedTuple):
    """Where in the buffer a weight lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """In bytes."""

    def of(self, buffer: Tensor) -> Tensor:
        """Return the weight as a view of the buffer, a 1-d tensor of bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


class Block(NamedTuple):
    """Weights that lie in the buffer at once."""

    buffer: Tensor
    entries: list[Entry]


def packed(weights: NamedWeights, device: torch.device, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the weights in blocks. Asking for the next block allows the buffer to be written again.

    Args:
        weights: (name, tensor) on any device, in any format; their formats are kept.
        device: where the buffer lies.
        block_bytes: size of the buffer.
    """
    buffer, entries, end = _buffer(block_bytes, device), list[Entry](), 0
    for name, given in weights:
        tensor = given.detach()
        if end + tensor.nbytes > len(buffer):
            if entries:
                yield Block(buffer, entries)
            entries, end = [], 0
            if tensor.nbytes > len(buffer):
                # The old one is given back first: both need not fit.
                del buffer
                buffer = _buffer(tensor.nbytes, device)
        entry = Entry(name, tensor.dtype, tuple(tensor.shape), end)
        entry.of(buffer).copy_(tensor)
        entries.append(entry)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if entries:
        yield Block(buffer, entries)


def handle(buffer: Tensor) -> tuple[Any, ...]:
    """Return what one receiver opens the buffer with; every receiver needs a handle of its own."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)[1]  # type: ignore[no-any-return]


def opened(arguments: tuple[Any, ...]) -> Tensor:
    """Return the buffer behind a handle of another process, on this process's only card."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    # The card has another number in a process that sees more of them.
    return rebuild_cuda_tensor(*arguments[:_DEVICE], torch.cuda.current_device(), *arguments[_DEVICE + 1 :])  # type: ignore[no-any-return]


def _buffer(size: int, device: torch.device) -> Tensor:
    with _plain_segments(device):
        return torch.empty(size, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def _plain_segments(device: torch.device) -> Iterator[None]:
    """Allocate inside in memory that any process may open, where torch was told to use segments that grow."""
    # Opening those takes rights over the sender that many systems give to debuggers alone.
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if device.type != "cuda" or "expandable_segments:true" not in settings.lower():
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
