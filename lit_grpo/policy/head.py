"""From logits to log-probability and entropy of each token, with as few copies of the logits as can be.

With z the logits [m, V], T the temperature, q = softmax(z / T) and p = softmax(z):
log q_y = z_y / T - logsumexp(z / T), H = logsumexp(z) - sum p z, and backwards
d log q_y / dz = (1_y - q) / T, dH / dz = -p (log p + H).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def token_stats(
    logits: Tensor, target: Tensor, temperature: float, *, entropy: bool, entropy_gradient: bool, squares: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target at the temperature, entropy at temperature 1, sum of squared probabilities.

    Forwards and backwards hold two more tensors of the logits' size at most.

    Args:
        logits: [m, V].
        target: [m].
        temperature: divides the logits for the log-probability and the squares.
        entropy: otherwise it is 0.
        entropy_gradient: whether the entropy has one.
        squares: otherwise they are 0; without gradient.

    Returns:
        [m] each, float32.
    """
    found = _TokenStats.apply(logits, target, temperature, entropy, entropy_gradient, squares)
    return cast(tuple[Tensor, Tensor, Tensor], found)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, entropy: bool, gradient: bool, squares: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = logits.detach().float()
        top = z.amax(1, keepdim=True)
        probs = (z - top).exp_()  # up to their sum
        total = probs.sum(1, keepdim=True)
        log_total = total.log() + top  # [m, 1]
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
        ctx.temperature, ctx.gradient = temperature, gradient and entropy
        ctx.save_for_backward(logits, target, log_total, scaled, entropies)
        ctx.mark_non_differentiable(squared, *(() if ctx.gradient else (entropies,)))
        return logprobs, entropies, squared

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, log_total, scaled, entropies = ctx.saved_tensors
        of_logprob, of_entropy = gradients[0].float(), gradients[1]
        z = logits.float()
        out = (z / ctx.temperature).sub_(scaled).exp_().mul_(-of_logprob[:, None] / ctx.temperature)
        if ctx.gradient and of_entropy is not None:
            log_p = z - log_total
            p = log_p.exp()
            log_p.add_(entropies[:, None]).mul_(p).mul_(of_entropy.float()[:, None])
            out.sub_(torch.nan_to_num_(log_p, nan=0.0))
        out.scatter_add_(1, target[:, None], (of_logprob / ctx.temperature)[:, None])
        return out.to(logits.dtype), None, None, None, None, None
