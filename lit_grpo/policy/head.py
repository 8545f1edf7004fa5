"""From logits to log-probability and entropy of each token, with as few copies of the logits as can be.

With z the logits [m, V], T the temperature, q = softmax(z / T) and p = softmax(z):
log q_y = z_y / T - logsumexp(z / T), H = logsumexp(z) - sum p z, and backwards
d log q_y / dz = (1_y - q) / T, dH / dz = -p (log p + H).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lit_grpo.policy import compiling


def token_stats(
    logits: Tensor,
    target: Tensor,
    temperature: float,
    *,
    entropy: bool,
    entropy_gradient: bool,
    squares: bool,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target at the temperature, entropy at temperature 1, sum of squared probabilities.

    Forwards and backwards hold two more tensors of the logits' size at most, compiled one.

    Args:
        logits: [m, V].
        target: [m].
        temperature: divides the logits for the log-probability and the squares.
        entropy: otherwise it is 0.
        entropy_gradient: whether the entropy has one.
        squares: otherwise they are 0; without gradient.
        compiled: by ``torch.compile``: the same in fewer passes over the logits.

    Returns:
        [m] each, float32.
    """
    found = _TokenStats.apply(logits, target, temperature, entropy, entropy_gradient, squares, compiled)
    return cast(tuple[Tensor, Tensor, Tensor], found)


class _TokenStats(torch.autograd.Function):
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
