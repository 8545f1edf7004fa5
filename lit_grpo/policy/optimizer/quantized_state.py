"""Optimizers with quantized states (``torchao.optim``): what their step needs in seeds, checkpoints and a compiler.

Their moments are tensor subclasses that hold codes and scales. Weights in bfloat16 can be rounded stochastically: up or
down by chance, in the measure of the distance, so that an update far below the spacing of bfloat16 arrives on average.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from lit_grpo.distributed.optimizer_state import PACKAGE, full_tensor, is_quantized
from lit_grpo.errors import UserError

# A step holds several float32 copies of what it steps at once: 64 MiB each for this many numbers, and not the 0.87 GiB
# of an embedding of 151,936 x 1,536. The other matrices of such a model (1.5 billion weights) are smaller and stay
# whole.
SLICE = 2**24
"""Numbers of a weight that are stepped, or made float32, at once."""
_STEP_PARAMETERS = (
    *("p", "grad", "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "lr", "beta1", "beta2", "weight_decay", "eps"),
    *("IS_ADAMW", "BF16_STOCHASTIC_ROUND"),
)
"""Parameters of torchao's step of one weight, in the version known here."""


def check_compiler(package: str, where: str) -> None:
    """Check that an optimizer of torchao finds a C++ compiler.

    Raises:
        UserError: there is none, and compiling is not switched off.
    """
    # torchao compiles its step on every device, and would fail only at the first one.
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
    """Seed the stochastic rounding of a step taken within, and restore the random state after it.

    An optimizer that rounds to the nearest steps as it would anyway.

    Args:
        optimizer: optimizer whose step is taken within.
        seed: seed of the rounding, the same on ranks that hold the same weights.
    """
    # The random state of the process differs between ranks that hold the same weights, which must stay the same; and a
    # run that was cut and goes on must round as it would have.
    if not rounds_stochastically(optimizer):
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def strided_sample(value: Tensor, stride: int) -> Tensor:
    """Return every ``stride``-th number in memory order, [n] float32, without making a quantized tensor whole."""
    if not is_quantized(value):
        return value.flatten()[::stride].float()
    parts = ((span.start, full_tensor(value.view(-1)[span])) for span in _spans(value.numel(), _block(value)))
    return torch.cat([part[-start % stride :: stride].clone() for start, part in parts])


def prepare(optimizer: torch.optim.Optimizer, where: str = "model.optimizer") -> None:
    """Make an optimizer of torchao fit for large weights, for shards, and for checkpoints without quantized moments.

    Its step makes several float32 copies of a weight, so large ones go through it in parts. ``load_state_dict`` also
    takes moments that are not quantized: the same up to the rounding of 8 or 4 bits. Other optimizers stay as they are.

    Raises:
        UserError: this version of torchao steps in another way than the one known here, or ``amsgrad`` is set, which it
            cannot do with quantized moments.
    """
    make: Any = getattr(optimizer, "_new_buffer", None)
    if make is None or not type(optimizer).__module__.startswith(f"{PACKAGE}."):
        return
    _check(optimizer, where)
    owner: Any = optimizer
    # Its quantized tensors show themselves in the weights' number format. In shards (DTensor) they lose it on the way:
    # local part and whole then contradict each other. Those that show float32 do not.
    zeros = owner._subclass_zeros
    owner._subclass_zeros = lambda *arguments: zeros(*arguments).to(torch.float32)
    # Bound, as schedulers expect it; the decorator runs the hooks that were registered for steps.
    owner.step = MethodType(torch.optim.Optimizer.profile_hook_step(_step), optimizer)

    @torch.no_grad()
    def hook(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        values = dict(state["state"])
        for parameter, number in zip(parameters, numbers, strict=True):
            moments = dict(values.get(number, {}))
            for name, value in moments.items():
                if name.endswith(("exp_avg", "exp_avg_sq")) and not is_quantized(_local(value)):
                    buffer = make(parameter, name == "exp_avg")
                    if is_quantized(_local(buffer)):
                        for part, source in _parts([_local(buffer), _local(value).contiguous()]):
                            part.copy_(source.to(part.device, torch.float32))
                        moments[name] = buffer
            if moments:
                values[number] = moments
        return {**state, "state": values}

    optimizer.register_load_state_dict_pre_hook(hook)


def _check(optimizer: torch.optim.Optimizer, where: str) -> None:
    adam = importlib.import_module(f"{PACKAGE}.optim.adam")
    parameters = tuple(inspect.signature(adam.single_param_adam).parameters)
    if parameters != _STEP_PARAMETERS or not isinstance(optimizer, adam._AdamBase):
        raise UserError(
            f"this version of torchao steps a weight in another way than the one known here: {', '.join(parameters)}",
            where=f"{where}.type",
            remedy="pip install 'lit-grpo[quantized]' -c constraints.txt",
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise UserError(
            "torchao cannot take the larger of two second moments that are quantized",
            where=f"{where}.args.amsgrad",
            remedy="leave amsgrad out",
        )


@torch.no_grad()
def _step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Step as torchao's own ``step`` does, with this rank's shards, and large weights in parts."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    update = importlib.import_module(f"{PACKAGE}.optim.adam").single_param_adam
    # Where compiling is switched off, fullgraph=True would fail.
    if os.environ.get("TORCH_COMPILE_DISABLE") != "1":
        update = torch.compile(update, fullgraph=True, dynamic=False)
    # One graph is compiled for each shape of weight, and a model may have more shapes than the compiler's limit.
    with torch._dynamo.utils.disable_cache_limit():
        for group in optimizer.param_groups:
            rate = torch.as_tensor(group["lr"], dtype=torch.float32)
            for weight in (p for p in group["params"] if p.grad is not None):
                state = optimizer.state[weight]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = optimizer._new_buffer(weight, True)
                    state["exp_avg_sq"] = optimizer._new_buffer(weight, False)
                state["step"] += 1
                rounds = optimizer.bf16_stochastic_round and weight.dtype is torch.bfloat16
                constants = (*group["betas"], group["weight_decay"], group["eps"], optimizer.is_adamw, rounds)
                for w, g, m, v in _parts(_aligned(weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])):
                    update(w, g, state["step"], m, v, None, rate, *constants)
    return loss


def _aligned(weight: Tensor, gradient: Any, *moments: Tensor) -> list[Tensor]:
    """Return this rank's shards, with the gradient brought to the placement and memory order of the weight."""
    if hasattr(weight, "placements"):
        gradient = gradient.redistribute(placements=weight.placements)
    local = _local(weight.detach())
    gradient = _local(gradient)
    return [local, gradient.contiguous() if local.is_contiguous() else gradient, *map(_local, moments)]


def _parts(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield views of tensors of the same shape, in parts of about :data:`SLICE` numbers at most; none of empty ones.

    All parts but the last have the same size, whatever the shape, so that a step of them is compiled once. Tensors in
    another memory order, and weights that are quantized themselves, stay whole.
    """
    count = tensors[0].numel()
    plain_or_state = all(type(t) is Tensor or is_quantized(t) for t in tensors)
    if count <= SLICE or not plain_or_state or not all(t.is_contiguous() for t in tensors):
        if count:
            yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for span in _spans(count, math.lcm(*map(_block, tensors))):
        yield [tensor[span] for tensor in flat]


def _spans(count: int, block: int) -> Iterator[slice]:
    # Whole blocks, 16 at a time: the scales of every part then begin where a GPU can read 16 bytes at once.
    unit = 16 * block
    size = max(1, SLICE // unit) * unit
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _block(value: Tensor) -> int:
    """Return how many numbers share a scale, so that they must stay in one part; 1 without scales."""
    return int(cast(Any, value).block_size) if is_quantized(value) else 1


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value
