"""Products with weights on a processor where oneDNN computes them faster than the library that torch takes.

torch gives float32 products to MKL, which is slower on processors that are not Intel's. oneDNN, which is part of torch
as well, uses what the processor has. Measured on one core of an AMD EPYC with AVX-512, weights of 576 x 576 to
1536 x 576 and 16 to 1,024 rows: 2.1 to 2.6 times faster for the product, for the gradient of its input and for that of
its weight. With oneDNN held to AVX2 there is no difference, so nothing is changed on other processors.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LEAST_WEIGHTS = 2**18
"""Numbers in a weight from which on oneDNN is taken: a call costs 10 us more, and a new number of rows some ms."""
KEPT = 64
"""Sizes of products whose code is kept. Rollouts have ever new numbers of tokens, and a size costs one to three
megabytes: with the default of 1,024 a process grew by 2 GB, with this by 0.2."""


class OneDNNLinear(nn.Linear):
    """A linear layer whose products are oneDNN's where its weight, its input and the processor are fit for it."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model take oneDNN, if this is a processor on which it is faster.

    Only layers that are ``nn.Linear`` and nothing else are changed, in place; their names and weights stay.
    """
    if not is_faster():
        return
    # torch and oneDNN read them at the first product of this kind, and have no other way to be told.
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT))
    for layer in model.modules():
        if type(layer) is nn.Linear:
            # The class and not the method: a copy of the model must call its own weights.
            layer.__class__ = OneDNNLinear


def is_linear(layer: nn.Module) -> bool:
    """Tell whether a layer is a mere product with its weight, with or without oneDNN."""
    return type(layer) in (nn.Linear, OneDNNLinear)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``input @ weight.T + bias`` like :func:`torch.nn.functional.linear`, by oneDNN where that is faster.

    Args:
        input: [..., I].
        weight: [O, I].
        bias: [O], or None.

    Returns:
        [..., O].
    """
    if not takes_onednn(input, weight):
        return functional.linear(input, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias)):
        out: Tensor = _Product.apply(input, weight, bias)
        return out
    return _product(input, weight, bias)


def takes_onednn(input: Tensor, weight: Tensor) -> bool:
    """Tell whether :func:`linear` gives this product to oneDNN."""
    return (
        weight.numel() >= LEAST_WEIGHTS
        and input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        # Shards and quantised weights are tensors of their own kinds, with products of their own.
        and type(weight) in (Tensor, nn.Parameter)
        and input.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and is_faster()
    )


@cache
def is_faster() -> bool:
    """Tell whether this is a machine without a GPU, with a processor of AMD that has AVX-512.

    It is read from the processor and not measured: two runs on one machine must compute the same numbers.
    """
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_amd() and not torch.cuda.is_available()


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Not Linux: nothing was measured there.
        return False


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


class _Product(torch.autograd.Function):
    """The product and its gradients, each one call of oneDNN, which reads transposed views as they are."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = _product(gradient, weight.T) if ctx.needs_input_grad[0] else None
        of_weight = _product(rows.T, input.reshape(-1, input.shape[-1]).T) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias
