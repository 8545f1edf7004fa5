"""Optimizer states in checkpoints: quantized moments (``torchao.optim``) as plain tensors, and back.

A checkpoint holds plain types and tensors only, so that it can be read where torchao is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_grpo.utils.imports import import_by_path

PACKAGE = "torchao"
_CLASS, _INNER, _ATTRIBUTES = "tensor_class", "tensors", "attributes"


def is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value).__module__.startswith(f"{PACKAGE}.optim.")


def to_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Turn an optimizer's ``state_dict`` into plain types and tensors, which load where torchao is not installed."""
    values = {n: {key: _plain_value(v) for key, v in moments.items()} for n, moments in state["state"].items()}
    return {**state, "state": values}


def to_quantized(state: Mapping[str, Any]) -> dict[str, Any]:
    """Turn plain types and tensors, as :func:`to_plain` makes them, back into an optimizer's ``state_dict``."""
    values = {n: {key: _quantized_value(v) for key, v in moments.items()} for n, moments in state["state"].items()}
    return {**state, "state": values}


def _plain_value(value: Any) -> Any:
    if not is_quantized(value):
        return value
    names, attributes = value.__tensor_flatten__()
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    return {_CLASS: name, _INNER: {inner: getattr(value, inner) for inner in names}, _ATTRIBUTES: list(attributes)}


def _quantized_value(value: Any) -> Any:
    if not (isinstance(value, dict) and _CLASS in value):
        return value
    # The name comes from a file, and what it names is imported: torchao's own classes alone.
    if not value[_CLASS].startswith(f"{PACKAGE}.optim."):
        raise ValueError(f"{value[_CLASS]} is no optimizer state")
    kind: Any = import_by_path(value[_CLASS])
    return kind.__tensor_unflatten__(value[_INNER], value[_ATTRIBUTES])


def full_tensor(value: Any) -> Any:
    """Return a quantized tensor as the float32 numbers that it stands for, and anything else as it is."""
    return value.dequantize(torch.float32) if is_quantized(value) else value
