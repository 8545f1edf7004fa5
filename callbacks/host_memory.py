"""Page-locked main memory, into which a GPU copies without the processor, and which is made while training goes on."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_Form = tuple[torch.Size, torch.dtype]
_SMALL = 2**20
"""Bytes below which torch's own memory does: it takes no time, and is handed out in powers of two."""


class HostMemory:
    """Page-locked buffers for the tensors of a GPU, kept from one checkpoint to the next.

    A copy into memory that is not locked goes in pieces, while everything waits. To get locked memory takes long, once:
    a training step beside which torch's own (``pin_memory``) was made waited 7 to 10 s for the driver, with the 7.6 GB
    of a model of 0.6 billion parameters and its optimizer on an H200. The system's part of it, to find free pages and
    to clear them, needs no driver: here pages are got first, by writing into them, and locked when they are there.
    """

    def __init__(self) -> None:
        self._free: defaultdict[_Form, list[Tensor]] = defaultdict(list)
        self._closed = False
        self._locked: list[Tensor] = []
        self._unlocked = False
        # A process that ends gives all memory back, and may have no driver any more to ask.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer of the shape and number format of a tensor, whose content is undefined.

        Memory that the driver does not lock, under a limit say, is taken all the same: copying into it takes longer.

        Raises:
            MemoryError: there is not enough memory.
            RuntimeError: torch's own, for a tensor of less than a mebibyte.
        """
        free = self._free[like.shape, like.dtype]
        return free.pop() if free else self._new(like.shape, like.dtype)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Let buffers be taken again; after :meth:`close` they are not kept."""
        for buffer in () if self._closed else buffers:
            self._free[buffer.shape, buffer.dtype].append(buffer)

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Make a buffer for each tensor that lies on a GPU, in a thread, so that nobody has to wait for them.

        Where memory does not suffice it stops; who takes a buffer then is told.
        """
        # By where they lie: tied weights are copied once.
        found = {tensor.data_ptr(): tensor for tensor in tensors if tensor.is_cuda}
        forms = [(tensor.shape, tensor.dtype) for tensor in found.values()]
        if forms:
            threading.Thread(target=self._make, args=(forms,), name="checkpoint-memory", daemon=True).start()

    def close(self) -> None:
        """Make no more buffers, and keep none. Nothing may be copied into those that were taken any longer."""
        self._closed = True
        self._free.clear()
        _unlock(self._locked)

    def _make(self, forms: Sequence[_Form]) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):
            for shape, dtype in forms:
                if self._closed:
                    return
                self._free[shape, dtype].append(self._new(shape, dtype))

    def _new(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        if size < _SMALL:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        # Whole pages that are nobody else's: a page can be locked once.
        try:
            pages = mmap.mmap(-1, size)
        except OSError as error:
            raise MemoryError(f"{size} bytes of main memory: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Where the system has large pages there are far fewer to lock; where not, small ones do.
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(pages, dtype=torch.uint8)
        raw[:: mmap.PAGESIZE] = 0
        if _lock(raw):
            self._locked.append(raw)
        elif not self._unlocked:
            self._unlocked = True
            log.warning("The driver locks no main memory (`ulimit -l`?): copies for checkpoints take longer.")
        if self._closed:
            _unlock(self._locked)
        return raw.view(dtype).view(shape)


def _lock(raw: Tensor) -> bool:
    """Lock the pages of a tensor; False where the driver does not."""
    if int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.numel(), 0)) == 0:
        return True
    _forget_error()
    return False


def _forget_error() -> None:
    """Take the error of a refusal from CUDA, which keeps it for whoever launches a kernel next in this thread."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)


def _unlock(locked: list[Tensor]) -> None:
    # Without a look whether one is left: the thread that makes buffers may be giving back its last one too.
    with contextlib.suppress(IndexError):
        while True:
            # Taken first, since there may be no driver to ask where none is left; and held, since its pages go with it.
            raw = locked.pop()
            torch.cuda.cudart().cudaHostUnregister(raw.data_ptr())
