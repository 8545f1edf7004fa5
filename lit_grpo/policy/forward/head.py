"""From hidden states to log-probability and entropy of each token, with as few copies of the logits as can be.

With z the logits [m, V], T the temperature, q = softmax(z / T) and p = softmax(z):
log q_y = z_y / T - logsumexp(z / T), H = logsumexp(z) - sum p z, and backwards
d log q_y / dz = (1_y - q) / T, dH / dz = -p (log p + H).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lit_grpo.policy.model import compiling


def head_stats(
    head: nn.Module,
    hidden: Tensor,
    target: Tensor,
    temperature: float,
    *,
    entropy: bool,
    entropy_gradient: bool,
    squares: bool,
    chunk: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target at the temperature, entropy at temperature 1, sum of squared probabilities.

    The logits of ``chunk`` tokens are held at once, with at most two more tensors of their size (compiled one), and are
    computed again in the backward pass where there are several chunks.

    Args:
        head: the output layer, [m, D] -> [m, V].
        hidden: [m, D].
        target: [m].
        temperature: divides the logits for the log-probability and the squares.
        entropy: otherwise it is 0.
        entropy_gradient: whether the entropy has one.
        squares: otherwise they are 0; without gradient.
        chunk: tokens.
        compiled: by ``torch.compile``: the same in fewer passes over the logits.

    Returns:
        [m] each, float32.
    """
    options = (temperature, entropy, entropy_gradient, squares, compiled)
    several = len(target) > chunk and torch.is_grad_enabled()
    if several and _is_plain(head):
        found = _Head.apply(hidden, head.weight, head.bias, target, chunk, *options)
        return cast(tuple[Tensor, Tensor, Tensor], found)

    def stats(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor, Tensor], _TokenStats.apply(head(hidden), target, *options))

    parts = []
    for part in _parts(len(target), chunk):
        given = hidden[part], target[part]
        parts.append(checkpoint(stats, *given, use_reentrant=False) if several else stats(*given))
    logprobs, entropies, squared = (_cat([part[k] for part in parts], hidden) for k in range(3))
    return logprobs, entropies, squared


def _is_plain(head: nn.Module) -> bool:
    """A product with its weight and nothing else: no adapter, no codes, no hook, no shard, no automatic casting."""
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or "forward" in vars(head):
        return False
    hooks = head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks
    return not any(hooks) and not torch.is_autocast_enabled(head.weight.device.type)


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, count, chunk))


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    # With no completion token at all the result still has to hang on the graph, for a backward pass of exact zeros.
    return torch.cat(parts) if parts else like.sum(1).float()


class _Head(torch.autograd.Function):
    """Chunk after chunk through a linear layer.

    Autograd would make the gradient of the weight anew for each chunk and then add it: with a large vocabulary as much
    memory traffic as the products themselves. Here each product adds to one gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        chunk: int,
        temperature: float,
        entropy: bool,
        gradient: bool,
        squares: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = compiling.compiled(_fused_stats) if compiled else _stats
        parts = [
            compute(functional.linear(hidden[part], weight, bias), target[part], temperature, entropy, squares)
            for part in _parts(len(target), chunk)
        ]
        logprobs, entropies, squared, log_total, scaled = (torch.cat([part[k] for part in parts]) for k in range(5))
        ctx.chunk, ctx.temperature, ctx.gradient, ctx.compiled = chunk, temperature, gradient and entropy, compiled
        ctx.save_for_backward(hidden, weight, bias, target, log_total, scaled, entropies)
        ctx.mark_non_differentiable(squared, *(() if ctx.gradient else (entropies,)))
        return logprobs, entropies, squared

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, target, log_total, scaled, entropies = ctx.saved_tensors
        of_logprob = gradients[0].float()
        of_entropy = gradients[1].float() if ctx.gradient and gradients[1] is not None else None
        compute = compiling.compiled(_fused_gradient) if ctx.compiled else _gradient
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _parts(len(target), ctx.chunk):
            made = compute(
                functional.linear(hidden[part], weight, bias),
                target[part],
                log_total[part],
                scaled[part],
                entropies[part],
                of_logprob[part],
                of_entropy[part] if of_entropy is not None else None,
                ctx.temperature,
            )
            if of_hidden is not None:
                torch.mm(made, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight.addmm_(made.T, hidden[part], beta=int(part.start > 0))
            if of_bias is not None:
                of_bias += made.sum(0)
        return of_hidden, of_weight, of_bias, *[None] * 7


class _TokenStats(torch.autograd.Function):
    """From logits that are there."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        temperature: float,
        entropy: bool,
        gradient: bool,
        squares: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = compiling.compiled(_fused_stats) if compiled else _stats
        found = compute(logits.detach(), target, temperature, entropy, squares)
        logprobs, entropies, squared, log_total, scaled = found
        ctx.temperature, ctx.gradient, ctx.compiled = temperature, gradient and entropy, compiled
        ctx.save_for_backward(logits, target, log_total, scaled, entropies)
        ctx.mark_non_differentiable(squared, *(() if ctx.gradient else (entropies,)))
        return logprobs, entropies, squared

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, log_total, scaled, entropies = ctx.saved_tensors
        of_entropy = gradients[1].float() if ctx.gradient and gradients[1] is not None else None
        compute = compiling.compiled(_fused_gradient) if ctx.compiled else _gradient
        made = compute(logits, target, log_total, scaled, entropies, gradients[0].float(), of_entropy, ctx.temperature)
        return made, None, None, None, None, None, None


Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Log-probabilities, entropies, squares [m]; logsumexp at temperature 1 and at the temperature, [m, 1]."""


def _stats(logits: Tensor, target: Tensor, temperature: float, entropy: bool, squares: bool) -> Stats:
    z = logits.float()
    top = z.amax(1, keepdim=True)
    probs = (z - top).exp_()  # up to their sum
    total = probs.sum(1, keepdim=True)
    log_total = total.log() + top
    entropies = torch.zeros_like(target, dtype=torch.float32)
    if entropy:
        # A logit of minus infinity has probability 0 and contributes nothing.
        products = torch.nan_to_num_(probs * (z - top), nan=0.0)
        entropies = total[:, 0].log() - products.sum(1) / total[:, 0]
        del products
    scaled = log_total
    if temperature != 1.0:
        torch.sub(z, top, out=probs).div_(temperature).exp_()
        total = probs.sum(1, keepdim=True)
        scaled = total.log() + top / temperature
    squared = torch.zeros_like(entropies)
    if squares:
        squared = probs.square_().sum(1) / total[:, 0].square()
    logprobs = z.gather(1, target[:, None])[:, 0] / temperature - scaled[:, 0]
    return logprobs, entropies, squared, log_total, scaled


def _fused_stats(logits: Tensor, target: Tensor, temperature: float, entropy: bool, squares: bool) -> Stats:
    """:func:`_stats` as the compiler likes it: nothing in place, one pass for the maximum and one for all sums."""
    z = logits.float()
    top = z.amax(1, keepdim=True)
    total = (z - top).exp().sum(1, keepdim=True)
    log_total = total.log() + top
    entropies = torch.zeros_like(target, dtype=torch.float32)
    if entropy:
        products = torch.where(z > float("-inf"), (z - top).exp() * (z - top), 0.0)
        entropies = total[:, 0].log() - products.sum(1) / total[:, 0]
    scaled = log_total
    if temperature != 1.0:
        scaled = ((z - top) / temperature).exp().sum(1, keepdim=True).log() + top / temperature
    squared = torch.zeros_like(entropies)
    if squares:
        squared = (2.0 * (z / temperature - scaled)).exp().sum(1)
    logprobs = z.gather(1, target[:, None])[:, 0] / temperature - scaled[:, 0]
    return logprobs, entropies, squared, log_total, scaled


def _gradient(
    logits: Tensor,
    target: Tensor,
    log_total: Tensor,
    scaled: Tensor,
    entropies: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Of the logits, [m, V], in their number format."""
    z = logits.float()
    out = (z / temperature).sub_(scaled).exp_().mul_(-of_logprob[:, None] / temperature)
    if of_entropy is not None:
        log_p = z - log_total
        p = log_p.exp()
        log_p.add_(entropies[:, None]).mul_(p).mul_(of_entropy[:, None])
        out.sub_(torch.nan_to_num_(log_p, nan=0.0))
    out.scatter_add_(1, target[:, None], (of_logprob / temperature)[:, None])
    return out.to(logits.dtype)


def _fused_gradient(
    logits: Tensor,
    target: Tensor,
    log_total: Tensor,
    scaled: Tensor,
    entropies: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """:func:`_gradient` as one pass over the logits."""
    z = logits.float()
    chosen = torch.arange(z.shape[1], device=z.device)[None, :] == target[:, None]
    out = (chosen.float() - (z / temperature - scaled).exp()) * (of_logprob[:, None] / temperature)
    if of_entropy is not None:
        log_p = z - log_total
        out = (
            out - torch.where(z > float("-inf"), (log_p + entropies[:, None]) * log_p.exp(), 0.0) * of_entropy[:, None]
        )
    return out.to(logits.dtype)
