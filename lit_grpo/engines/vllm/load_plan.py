"""The copies by which weights come into vLLM's model, noted during one load and made again in the next ones.

vLLM's loaders find out anew for every weight which layer it belongs to and which part of a fused tensor it fills. On a
card that search in Python is nearly all of a sync. What it comes to is a list of copies that is the same in every sync
of a model: it is noted once, from what torch is told to do, whatever model and whatever version of vLLM tells it.

A load is repeated only where it was nothing but such copies. A loader that computes (a factor, another format on the
way), reads a value back, or leaves a part of a parameter alone runs again in every sync.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_grpo.engines.base import NamedWeights

_aten = torch.ops.aten
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)

Part = tuple[torch.Size, tuple[int, ...], int]
"""Shape, strides, and distance from the weight's first element, of a part of it."""
Span = tuple[int, int]
"""First address of a tensor's memory, and the first behind it."""


@dataclass
class PlannedWeight:
    """How a weight comes, and where its parts go."""

    shape: torch.Size
    dtype: torch.dtype
    copies: list[tuple[Tensor, Part | None]] = field(default_factory=list)
    """(where to, which part); None: all of it."""
    parameters: set[str] = field(default_factory=set)
    """Names of the model's parameters that it goes into."""

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a weight comes in the form in which it was noted."""
        return tensor.shape == self.shape and tensor.dtype == self.dtype and tensor.is_contiguous()

    def copy(self, tensor: Tensor) -> None:
        """Copy a weight of that form to where its parts go."""
        for target, part in self.copies:
            if part is None:
                target.copy_(tensor)
            else:
                shape, stride, distance = part
                target.copy_(tensor.as_strided(shape, stride, tensor.storage_offset() + distance))


class LoadPlan:
    """What a load into one model comes to; empty until :meth:`take` was given one that can be repeated."""

    def __init__(self) -> None:
        self._weights: Mapping[str, PlannedWeight] = {}
        self._fills: Sequence[tuple[Tensor, float]] = ()
        self._held: list[tuple[nn.Module, str, Tensor, int]] = []
        self.useless = False
        """Whether a load was noted that cannot be repeated, so that none need be noted again."""

    def take(self, notes: LoadNotes, model: nn.Module) -> None:
        """Take over what was noted of a load into ``model`` that has succeeded, if it can be repeated."""
        if not notes.repeatable(model):
            self.useless = True
            return
        self._weights, self._fills = notes.weights, notes.fills
        self._held = [
            (module, name, tensor, tensor.data_ptr())
            for module in model.modules()
            for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
            if tensor is not None
        ]

    def holds(self) -> bool:
        """Return whether there is a plan, and every tensor of its model is still where it was."""
        return bool(self._held) and all(
            (module._parameters.get(name) is tensor or module._buffers.get(name) is tensor)
            and tensor.data_ptr() == address
            for module, name, tensor, address in self._held
        )

    def repeat(self, stream: NamedWeights, loaded: set[str]) -> Iterator[tuple[str, Tensor]] | None:
        """Copy weights to where they went before, up to the first that is unknown or comes in another form.

        Args:
            stream: the weights.
            loaded: takes the names of the parameters that they went into.

        Returns:
            That weight and the rest of the stream; None where all were copied.
        """
        for target, value in self._fills:
            target.fill_(value)
        weights = iter(stream)
        for name, tensor in weights:
            known = self._weights.get(name)
            if known is None or not known.fits(tensor):
                return itertools.chain([(name, tensor)], weights)
            known.copy(tensor)
            loaded |= known.parameters
        return None

    def missing(self, came: Mapping[str, int]) -> list[str]:
        """Return the names of the weights that a load needs besides those that ``came``."""
        return sorted(self._weights.keys() - came.keys())


class LoadNotes(TorchDispatchMode):
    """Notes what torch is told to do with a model's tensors and with the weights that come for them.

    Args:
        model: vLLM's model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        own = itertools.chain(model.parameters(), model.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own if tensor.numel()}
        self._came: dict[int, tuple[StorageWeakRef, list[tuple[str, Span]]]] = {}
        """What lies in the memory that begins at an address, for as long as anybody holds it."""
        self._listening = self._exact = True
        self.weights: dict[str, PlannedWeight] = {}
        self.fills: list[tuple[Tensor, float]] = []

    def watched(self, stream: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, and note each."""
        weights = iter(stream)
        while True:
            # What the stream itself does, to gather a weight or to take it from a buffer, is no part of a load.
            self._listening = False
            try:
                item = next(weights, None)
            finally:
                self._listening = True
            if item is None:
                return
            name, tensor = item
            # One that came twice would be copied twice, and the order would matter.
            self._exact &= tensor.is_contiguous() and name not in self.weights
            self.weights[name] = PlannedWeight(tensor.shape, tensor.dtype)
            if tensor.numel():
                storage = tensor.untyped_storage()
                known = self._came.get(storage.data_ptr())
                if known is None or known[0].expired():
                    known = self._came[storage.data_ptr()] = StorageWeakRef(storage), []
                known[1].append((name, _span(tensor)))
            yield item

    def repeatable(self, model: nn.Module) -> bool:
        """Return whether all that was done were copies that fill each parameter of ``model`` once and whole."""
        if not self._exact or self._kept(model):
            return False
        filled = [(_span(target), None) for target, _ in self.fills]
        copied = [(_span(target), weight) for weight in self.weights.values() for target, _ in weight.copies]
        spans = sorted([*filled, *copied], key=lambda one: one[0])
        if any(span[1] > following[0] for (span, _), (following, _) in itertools.pairwise(spans)):
            return False
        for name, parameter in model.named_parameters():
            first, end = _span(parameter)
            into = [(span, weight) for span, weight in spans if first <= span[0] and span[1] <= end]
            # They do not overlap: as many bytes are all bytes.
            if not parameter.is_contiguous() or sum(span[1] - span[0] for span, _ in into) != end - first:
                return False
            for _, weight in into:
                if weight is not None:
                    weight.parameters.add(name)
        return True

    def _kept(self, model: nn.Module) -> bool:
        """Return whether the load may have kept a weight instead of copying it."""
        # What was copied nowhere may be held where nobody finds it.
        if any(not weight.copies for weight in self.weights.values() if weight.shape.numel()):
            return True
        held = (vars(module).values() for module in model.modules())
        tensors = itertools.chain(model.parameters(), model.buffers(), itertools.chain.from_iterable(held))
        return any(isinstance(tensor, Tensor) and self._spans(tensor) for tensor in tensors)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._listening and self._exact:
            self._exact = self._noted(function, args, kwargs or {})
        return result

    def _noted(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Note what was done; returns False where it cannot be repeated."""
        if function is _aten.copy_.default and self._is_own(args[0]):
            return self._note_copy(args[0], args[1])
        if function in _FILLS and self._is_own(args[0]):
            self.fills.append((args[0], float(args[1]) if len(args) > 1 else 0.0))
            # What a target that is not contiguous covers could not be told from its first and last address.
            return bool(args[0].is_contiguous())
        if _only_views(function):
            return True
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return not any(self._is_own(tensor) or self._spans(tensor) for tensor in tensors)

    def _note_copy(self, target: Tensor, source: Tensor) -> bool:
        start, end = _span(source)
        within = [(name, first) for name, (first, behind) in self._spans(source) if first <= start and end <= behind]
        if len(within) != 1 or not target.is_contiguous():
            return False
        # Such a view reads the memory with another sign.
        if source.is_neg() or source.is_conj():
            return False
        ((name, first),) = within
        weight = self.weights[name]
        if source.dtype != weight.dtype:
            return False
        part = source.size(), source.stride(), (start - first) // source.itemsize
        whole = source.size() == weight.shape and source.is_contiguous()
        weight.copies.append((target, None if whole else part))
        return True

    def _is_own(self, tensor: Tensor) -> bool:
        return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in self._own

    def _spans(self, tensor: Tensor) -> list[tuple[str, Span]]:
        """Return the weights that came in the memory of a tensor, and where each lies."""
        if not tensor.numel():
            return []
        storage, spans = self._came.get(tensor.untyped_storage().data_ptr(), (None, []))
        return [] if storage is None or storage.expired() else spans


def _span(tensor: Tensor) -> Span:
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _only_views(function: Any) -> bool:
    """Return whether an operation computes nothing: all that it returns is memory that it was given."""
    schema = function._schema
    returned = [one.alias_info for one in schema.returns]
    return not schema.is_mutable and bool(returned) and all(one is not None for one in returned)
