"""Torch's variable-length attention on a CPU, for tests: its signature and what the compiler sees of it, by loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _stretches(cum_q: Tensor, cum_k: Tensor) -> list[tuple[slice, slice]]:
    queries, keys = cum_q.tolist(), cum_k.tolist()
    return [(slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])) for i in range(len(queries) - 1)]


def _probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal, the last query beside the last key: [n, h, d], [m, h, d] -> [h, n, m]."""
    n, m = len(q), len(k)
    hidden = torch.arange(m)[None] > torch.arange(n)[:, None] + (m - n)
    return (torch.einsum("nhd,mhd->hnm", q, k) * scale).masked_fill(hidden, float("-inf")).softmax(-1)


@torch.library.custom_op("lit_grpo_tests::varlen", mutates_args={})
def _forward(q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int,
             scale: float) -> Tensor:  # fmt: skip
    out = torch.empty_like(q)
    for queries, keys in _stretches(cum_q, cum_k):
        assert queries.stop - queries.start <= max_q
        assert keys.stop - keys.start <= max_k
        out[queries] = torch.einsum("hnm,mhd->nhd", _probabilities(q[queries], k[keys], scale), v[keys])
    return out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, scale: float) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("lit_grpo_tests::varlen_backward", mutates_args={})
def _backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int,
              scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in _stretches(cum_q, cum_k):
        p = _probabilities(q[queries], k[keys], scale)
        grad_v[keys] += torch.einsum("hnm,nhd->mhd", p, g[queries])
        grad_p = torch.einsum("nhd,mhd->hnm", g[queries], v[keys])
        grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * scale
        grad_q[queries] = torch.einsum("hnm,mhd->nhd", grad_s, k[keys])
        grad_k[keys] += torch.einsum("hnm,nhd->mhd", grad_s, q[queries])
    return grad_q, grad_k, grad_v


@_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int,
      scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    saved = ctx.saved_tensors
    return (*_backward(gradient.contiguous(), *saved, ctx.max_q, ctx.max_k, ctx.scale), *[None] * 5)


_forward.register_autograd(_differentiate, setup_context=_setup)


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
                *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """As ``torch.nn.attention.varlen.varlen_attn``: [S, h, d], [K, h', d] twice -> [S, h, d]; causal, no window."""
    assert window_size == (-1, 0)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        assert enable_gqa
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)
    return out
