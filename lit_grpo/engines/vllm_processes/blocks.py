"""Weights handed from process to process block by block: on one card through CUDA IPC, without a host copy.

On CPU the buffer is a file in shared memory.

The sender packs tensors into a buffer that all receivers have opened, and waits until each of them has taken
its copy before it packs the next ones. One buffer is opened once in each sync, where a handle for every weight would
cost each receiver an open and a close of the memory behind it. Nothing that the learner allocates is ever held open.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.engines.base import EngineError, NamedWeights

BLOCK_BYTES = 2**28
"""Size of the buffer; it grows to hold a larger weight."""
_ALIGNMENT = 256
_DEVICE = 6
"""Place of the device's number among the arguments that rebuild a tensor from its handle."""


Handle = tuple[str | None, tuple[Any, ...]]
"""The UUID of the card where a buffer lies, None for a file, and what it is opened with."""


class Entry(NamedTuple):
    """Where in the buffer a weight lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """In bytes."""

    def of(self, buffer: Tensor) -> Tensor:
        """Return the weight as a view of the buffer, a 1-d tensor of bytes."""
        return buffer[self.start : self.end].view(self.dtype).view(self.shape)

    @property
    def end(self) -> int:
        """In bytes, the first that is not its own."""
        return self.start + self.dtype.itemsize * math.prod(self.shape)


def used(buffer: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Return the part of a buffer in which weights lie."""
    return buffer[: max((entry.end for entry in entries), default=0)]


class Buffer:
    """Memory that a process lets others open.

    Args:
        size: in bytes.
        device: where it lies.
        folder: of the file, on CPU.
    """

    def __init__(self, size: int, device: torch.device, folder: Path) -> None:
        self._file: str | None = None
        if device.type == "cuda":
            with _plain_segments():
                self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self._file = str(folder / f"block-{secrets.token_hex(6)}")
            self.bytes = torch.from_file(self._file, shared=True, size=size, dtype=torch.uint8)

    def handle(self) -> Handle:
        """Return what one receiver opens it with; on a card every receiver needs a handle of its own."""
        if self._file is not None:
            return None, (self._file, len(self.bytes))
        from torch.multiprocessing.reductions import reduce_tensor

        return _uuid(self.bytes.device.index), reduce_tensor(self.bytes)[1]

    def close(self) -> None:
        """Let go of the memory and remove the file; whoever has opened it keeps the memory. Safe to call twice."""
        self.bytes = self.bytes.new_empty(0)
        if self._file is not None:
            Path(self._file).unlink(missing_ok=True)


class Block(NamedTuple):
    """Weights that lie in the buffer at once."""

    buffer: Buffer
    entries: list[Entry]


def packed(
    weights: NamedWeights, device: torch.device, folder: Path, block_bytes: int | None = None
) -> Iterator[Block]:
    """Yield the weights in blocks. Asking for the next block allows the buffer to be written again.

    Args:
        weights: (name, tensor) on any device, in any format; their formats are kept.
        device: where the buffer lies.
        folder: of files, on CPU.
        block_bytes: size of the buffer; None: :data:`BLOCK_BYTES`.
    """
    buffer = Buffer(BLOCK_BYTES if block_bytes is None else block_bytes, device, folder)
    try:
        entries, end = list[Entry](), 0
        for name, given in weights:
            tensor = given.detach()
            if end + tensor.nbytes > len(buffer.bytes):
                if entries:
                    yield Block(buffer, entries)
                entries, end = [], 0
                if tensor.nbytes > len(buffer.bytes):
                    # Its memory is given back before more is asked for, here; who has opened it may hold it still.
                    buffer.close()
                    buffer = Buffer(tensor.nbytes, device, folder)
            entry = Entry(name, tensor.dtype, tuple(tensor.shape), end)
            entry.of(buffer.bytes).copy_(tensor)
            entries.append(entry)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if entries:
            yield Block(buffer, entries)
    finally:
        buffer.close()


def opened(handle: Handle) -> Tensor:
    """Return the buffer behind a handle of another process, on the card where it lies.

    Raises:
        EngineError: this process does not see that card.
    """
    card, details = handle
    if card is None:
        return torch.from_file(details[0], shared=True, size=details[1], dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments: list[Any] = list(details)
    arguments[_DEVICE] = number_of(card)
    buffer: Tensor = rebuild_cuda_tensor(*arguments)
    return buffer


def number_of(card: str) -> int:
    """Return the number that a card has in this process, which may see others than the one that named it.

    Raises:
        EngineError: this process does not see the card.
    """
    known = [_uuid(number) for number in range(torch.cuda.device_count())]
    if card not in known:
        raise EngineError(f"the weights lie on the card {card}, and this process sees {', '.join(known) or 'none'}")
    return known.index(card)


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def settle(device: torch.device) -> None:
    """Wait until the card has written or read what it was told to; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate inside in memory that any process may open, where torch was told to use segments that grow."""
    # Opening those takes rights over the sender that many systems give to debuggers alone.
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" not in settings.lower():
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
