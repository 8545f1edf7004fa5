"""A copy of a checkpoint in main memory, which can be written while training changes what it was made from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lit_grpo.callbacks.host_memory import HostMemory


class HostCopy:
    """Copies of tensors as they are at one moment. Several checkpoints of that moment share them.

    Args:
        memory: where copies of a GPU's tensors go.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._copies: dict[Any, Tensor] = {}
        """The copy of each tensor, by where that lies in memory."""
        self._sources: list[Tensor] = []
        """The tensors themselves: as long as they are there, no other tensor comes to lie where one of them does."""
        self._buffers: list[Tensor] = []

    def of(self, content: Any) -> Any:
        """Return nested dictionaries and lists with a copy in the place of every tensor, and of everything else.

        Tensors that are one, as tied weights are, stay one.
        """
        on_gpu = False
        copies: dict[int, Tensor] = {}
        for tensor in _tensors(content):
            on_gpu |= tensor.is_cuda
            copies[id(tensor)] = self._copy(tensor)
        if on_gpu:
            # The copies were only begun.
            torch.cuda.synchronize()
        # What is no tensor is copied as well: callbacks go on writing into lists that they gave to the checkpoint.
        memo: dict[int, Any] = dict(copies)
        return copy.deepcopy(content, memo)

    def release(self) -> None:
        """Give the buffers back, once everything is written."""
        self._memory.give_back(self._buffers)
        self._copies, self._sources, self._buffers = {}, [], []

    def _copy(self, tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):
            # Shards, and moments in 8 bits, are classes around plain tensors; not all of them can be cloned.
            names, context = tensor.__tensor_flatten__()
            parts = ((name, getattr(tensor, name)) for name in names)
            inner = {name: self._copy(part) if isinstance(part, Tensor) else part for name, part in parts}
            kind: Any = type(tensor)
            whole: Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
            return whole
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
            return tensor.detach().clone()
        key = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._copies:
            self._copies[key] = self._copy_of_plain(tensor.detach())
            self._sources.append(tensor)
        return self._copies[key]

    def _copy_of_plain(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        buffer = self._memory.take(tensor)
        self._buffers.append(buffer)
        return buffer.copy_(tensor, non_blocking=True)


def plain_tensors(content: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of which nested dictionaries and lists consist, also those inside of shards."""
    for tensor in _tensors(content):
        yield from _parts(tensor)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):
                yield from _parts(part)
    elif tensor.layout == torch.strided and tensor.numel():
        yield tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
