"""Log-probability and entropy of each token from its hidden state, with as few copies of the logits as can be.

With z the logits [m, V], T the temperature, q = softmax(z / T) and p = softmax(z):
log q_y = z_y / T - logsumexp(z / T), H = logsumexp(z) - sum p z, and backwards
d log q_y / dz = (1_y - q) / T, dH / dz = -p (log p + H).

Each formula is written twice. :func:`_reference_stats` and :func:`_reference_gradient` run as they stand and reuse
tensors in place; :func:`_kernel_stats` and :func:`_kernel_gradient` are given to ``torch.compile``, which makes one
pass over the logits of them. Tests hold both to autograd and to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_grpo.policy.forward.onednn import is_linear, linear, takes_onednn
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
    """Compute log-probability of the target, entropy, and sum of squared probabilities from hidden states.

    The logits of ``chunk`` tokens are held at once, with at most two more tensors of their size (compiled one), and are
    computed again in the backward pass where there are several chunks.

    Args:
        head: the output layer, [m, D] -> [m, V].
        hidden: [m, D].
        target: [m].
        temperature: divides the logits for the log-probability and the squares; the entropy is that of temperature 1.
        entropy: whether to compute the entropy; 0 otherwise.
        entropy_gradient: whether the entropy has a gradient.
        squares: whether to sum the squared probabilities, without gradient; 0 otherwise.
        chunk: tokens whose logits are held at once.
        compiled: whether to compile what is done with the logits: the same numbers in fewer passes over them.

    Returns:
        [m] each, float32.
    """
    options = (temperature, entropy, entropy_gradient, squares, compiled)
    several = len(target) > chunk and torch.is_grad_enabled()
    if several and _is_plain(head):
        stats_of_chunks = _ChunkedHead.apply(hidden, head.weight, head.bias, target, chunk, *options)
        return cast(tuple[Tensor, Tensor, Tensor], stats_of_chunks)

    # Any other head (adapters, shards, hooks) is called as a module, and its logits are computed again by autograd's
    # own checkpointing.

    def stats(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor, Tensor], _StatsOfLogits.apply(head(hidden), target, *options))

    outputs = []
    for span in _chunks(len(target), chunk):
        inputs = hidden[span], target[span]
        outputs.append(checkpoint(stats, *inputs, use_reentrant=False) if several else stats(*inputs))
    logprobs, entropies, squared = (_cat([output[k] for output in outputs], hidden) for k in range(3))
    return logprobs, entropies, squared


def _is_plain(head: nn.Module) -> bool:
    """Tell whether the head is a mere product with its weight.

    Adapters, 4 bits, hooks, shards and automatic casting all change what calling the module gives.
    """
    if not is_linear(head) or type(head.weight) is not nn.Parameter or "forward" in vars(head):
        return False
    hooks = head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks
    return not any(hooks) and not torch.is_autocast_enabled(head.weight.device.type)


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, count, chunk))


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    # With no completion token at all the result still has to hang on the graph, for a backward pass of exact zeros.
    return torch.cat(parts) if parts else like.sum(1).float()


class _ChunkedHead(torch.autograd.Function):
    """A linear head and the stats of its logits, chunk after chunk, with one gradient of the weight for all chunks.

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
        outputs = [
            _stats(linear(hidden[span], weight, bias), target[span], temperature, entropy, squares, compiled)
            for span in _chunks(len(target), chunk)
        ]
        logprobs, entropies, squared, log_total, scaled = (torch.cat([o[k] for o in outputs]) for k in range(5))
        ctx.chunk, ctx.temperature, ctx.gradient, ctx.compiled = chunk, temperature, gradient and entropy, compiled
        # The logits are not saved: [m, V] of them is what chunks are to avoid, and the backward pass makes them again.
        ctx.save_for_backward(hidden, weight, bias, target, log_total, scaled, entropies)
        ctx.mark_non_differentiable(squared, *(() if ctx.gradient else (entropies,)))
        return logprobs, entropies, squared

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, target, log_total, scaled, entropies = ctx.saved_tensors
        grad_logprob = gradients[0].float()
        grad_entropy = gradients[1].float() if ctx.gradient and gradients[1] is not None else None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for span in _chunks(len(target), ctx.chunk):
            grad_logits = _gradient(
                linear(hidden[span], weight, bias),
                target[span],
                log_total[span],
                scaled[span],
                entropies[span],
                grad_logprob[span],
                grad_entropy[span] if grad_entropy is not None else None,
                ctx.temperature,
                ctx.compiled,
            )
            if grad_hidden is not None and takes_onednn(grad_logits, weight):
                grad_hidden[span] = linear(grad_logits, weight.T)
            elif grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[span])
            if grad_weight is not None:
                # beta 0 for the first chunk: what the empty tensor holds is not read.
                grad_weight.addmm_(grad_logits.T, hidden[span], beta=int(span.start > 0))
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, grad_weight, grad_bias, *[None] * 7


class _StatsOfLogits(torch.autograd.Function):
    """The stats of logits that exist already, with one tensor of their size for the gradient."""

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
        stats = _stats(logits.detach(), target, temperature, entropy, squares, compiled)
        logprobs, entropies, squared, log_total, scaled = stats
        ctx.temperature, ctx.gradient, ctx.compiled = temperature, gradient and entropy, compiled
        ctx.save_for_backward(logits, target, log_total, scaled, entropies)
        ctx.mark_non_differentiable(squared, *(() if ctx.gradient else (entropies,)))
        return logprobs, entropies, squared

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, log_total, scaled, entropies = ctx.saved_tensors
        grad_entropy = gradients[1].float() if ctx.gradient and gradients[1] is not None else None
        saved = logits, target, log_total, scaled, entropies
        return _gradient(*saved, gradients[0].float(), grad_entropy, ctx.temperature, ctx.compiled), *[None] * 6


Stats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Log-probabilities, entropies and sums of squares, [m] each; logsumexp at temperature 1 and at the given, [m, 1]."""


def _stats(logits: Tensor, target: Tensor, temperature: float, entropy: bool, squares: bool, compiled: bool) -> Stats:
    # The compiler makes code of its own for a size of 1, which a last chunk may have in the midst of a run.
    if not compiled or len(target) <= 1:
        return _reference_stats(logits, target, temperature, entropy, squares)
    return compiling.compiled(_kernel_stats)(logits.detach(), _own(target), temperature, entropy, squares)


def _gradient(
    logits: Tensor,
    target: Tensor,
    log_total: Tensor,
    scaled: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    compiled: bool,
) -> Tensor:
    of_tokens = target, log_total, scaled, entropies, grad_logprob
    if not compiled or len(target) <= 1:
        return _reference_gradient(logits, *of_tokens, grad_entropy, temperature)
    own = (_own(tensor) for tensor in of_tokens)
    grad_entropy = None if grad_entropy is None else _own(grad_entropy)
    return compiling.compiled(_kernel_gradient)(logits.detach(), *own, grad_entropy, temperature)


def _own(tensor: Tensor) -> Tensor:
    """Return the values of tokens, [m] or [m, 1], as a tensor that is part of no other one."""
    # The compiler looks at where in another tensor a view begins and how large that one is, and makes code anew for
    # the second chunk, for the first one that is not the last, and so on.
    return tensor.detach().clone() if tensor._is_view() else tensor.detach()


def _reference_stats(logits: Tensor, target: Tensor, temperature: float, entropy: bool, squares: bool) -> Stats:
    z = logits.float()
    top = z.amax(1, keepdim=True)
    # Not divided by their sum: the sums below are, which saves a pass over the vocabulary.
    probs = (z - top).exp_()
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


def _kernel_stats(logits: Tensor, target: Tensor, temperature: float, entropy: bool, squares: bool) -> Stats:
    """Compute what :func:`_reference_stats` does, for the compiler: nothing in place, two passes over the logits."""
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


def _reference_gradient(
    logits: Tensor,
    target: Tensor,
    log_total: Tensor,
    scaled: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Compute the gradient of the logits, [m, V], in their number format."""
    z = logits.float()
    # In place wherever a tensor is not needed again: each copy has the size of the logits.
    out = (z / temperature).sub_(scaled).exp_().mul_(-grad_logprob[:, None] / temperature)
    if grad_entropy is not None:
        log_p = z - log_total
        p = log_p.exp()
        log_p.add_(entropies[:, None]).mul_(p).mul_(grad_entropy[:, None])
        out.sub_(torch.nan_to_num_(log_p, nan=0.0))
    out.scatter_add_(1, target[:, None], (grad_logprob / temperature)[:, None])
    return out.to(logits.dtype)


def _kernel_gradient(
    logits: Tensor,
    target: Tensor,
    log_total: Tensor,
    scaled: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Compute what :func:`_reference_gradient` does, for the compiler: one pass over the logits."""
    z = logits.float()
    # A comparison in the place of the scatter above, so that one pass over the logits does everything.
    chosen = torch.arange(z.shape[1], device=z.device)[None, :] == target[:, None]
    out = (chosen.float() - (z / temperature - scaled).exp()) * (grad_logprob[:, None] / temperature)
    if grad_entropy is not None:
        log_p = z - log_total
        out = (
            out
            - torch.where(z > float("-inf"), (log_p + entropies[:, None]) * log_p.exp(), 0.0) * grad_entropy[:, None]
        )
    return out.to(logits.dtype)
