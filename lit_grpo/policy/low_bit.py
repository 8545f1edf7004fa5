"""What optimizers with quantized states (``torchao.optim``) need around their step: seeds, checkpoints, a compiler.

Their moments are tensor subclasses that hold codes and scales. Weights in bfloat16 can be rounded stochastically: up or
down by chance, in the measure of the distance, so that an update far below the spacing of bfloat16 arrives on average.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from lit_grpo.errors import UserError

PACKAGE = "torchao"
_CLASS, _INNER, _ATTRIBUTES = "tensor_class", "tensors", "attributes"


def check_compiler(package: str, where: str) -> None:
    """torchao compiles its step, on every device, and would say so only at the first one.

    Raises:
        UserError: there is no C++ compiler, and compiling is not switched off.
    """
    compiler = os.environ.get("CXX", "g++")
    if package != PACKAGE or os.environ.get("TORCH_COMPILE_DISABLE") == "1" or shutil.which(compiler):
        return
    raise UserError(
        f"torchao compiles its optimizer step, and there is no C++ compiler ({compiler})",
        where=where,
        remedy="install one (apt-get install g++), name one in the environment variable CXX, or set "
        "TORCH_COMPILE_DISABLE=1, with which the step is slow",
    )


def rounds_stochastically(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "bf16_stochastic_round", False))


@contextmanager
def rounding_seed(optimizer: torch.optim.Optimizer, seed: int) -> Iterator[None]:
    """Rounding within draws random numbers of its own; other optimizers see nothing of this.

    The random state of the process differs between ranks that hold the same weights, which must stay the same, and a
    run that was cut and goes on must round as it would have.

    Args:
        optimizer: whose step is taken within.
        seed: the same on ranks that hold the same weights.
    """
    if not rounds_stochastically(optimizer):
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value).__module__.startswith(f"{PACKAGE}.optim.")


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict`` in plain types and tensors, which loads where torchao is not installed."""
    values = {number: {k: _plain(v) for k, v in found.items()} for number, found in state["state"].items()}
    return {**state, "state": values}


def quantized(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`plain`."""
    values = {number: {k: _quantized(v) for k, v in found.items()} for number, found in state["state"].items()}
    return {**state, "state": values}


def _plain(value: Any) -> Any:
    if not is_quantized(value):
        return value
    names, attributes = value.__tensor_flatten__()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return {_CLASS: kind, _INNER: {name: getattr(value, name) for name in names}, _ATTRIBUTES: list(attributes)}


def _quantized(value: Any) -> Any:
    if not (isinstance(value, dict) and _CLASS in value):
        return value
    module, _, name = value[_CLASS].rpartition(".")
    if not module.startswith(f"{PACKAGE}.optim."):
        raise ValueError(f"{value[_CLASS]} is no optimizer state")
    kind: Any = getattr(importlib.import_module(module), name)
    return kind.__tensor_unflatten__(value[_INNER], value[_ATTRIBUTES])


def whole(value: Any) -> Any:
    """A quantized tensor as the numbers that it stands for, float32; anything else as it is."""
    return value.dequantize(torch.float32) if is_quantized(value) else value


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer of torchao fit for shards in bfloat16 and for checkpoints with other shards; others stay.

    Its quantized tensors show themselves in the weights' number format, and in shards (DTensor) they lose it on the
    way: local part and whole then contradict each other. Those that show float32 do not. ``load_state_dict`` also takes
    moments that are not quantized: the same up to the rounding of 8 or 4 bits.
    """
    _step_eagerly_if_told(optimizer)
    make: Any = getattr(optimizer, "_new_buffer", None)
    if make is None or not type(optimizer).__module__.startswith(f"{PACKAGE}."):
        return
    owner: Any = optimizer
    zeros = owner._subclass_zeros
    owner._subclass_zeros = lambda *arguments: zeros(*arguments).to(torch.float32)

    @torch.no_grad()
    def hook(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        values = dict(state["state"])
        for parameter, number in zip(parameters, numbers, strict=True):
            found = dict(values.get(number, {}))
            for name, value in found.items():
                if name.endswith(("exp_avg", "exp_avg_sq")) and not is_quantized(_local(value)):
                    buffer = make(parameter, name == "exp_avg")
                    if is_quantized(_local(buffer)):
                        _local(buffer).copy_(_local(value).to(_local(buffer).device, torch.float32))
                        found[name] = buffer
            if found:
                values[number] = found
        return {**state, "state": values}

    optimizer.register_load_state_dict_pre_hook(hook)


def _step_eagerly_if_told(optimizer: torch.optim.Optimizer) -> None:
    """With ``TORCH_COMPILE_DISABLE=1`` alone a step that insists on being compiled fails."""
    if os.environ.get("TORCH_COMPILE_DISABLE") != "1" or not type(optimizer).__module__.startswith(f"{PACKAGE}."):
        return
    compiled: Any = optimizer.step

    def step(_: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return compiled(*arguments, **options)

    cast(Any, optimizer).step = MethodType(step, optimizer)  # bound, as schedulers expect it


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value
