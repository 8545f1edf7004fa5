"""Importance ratios pi / pi_old.

d_t = lp_t - lp_old_t of one token; n tokens of the completion. Log-ratios are clamped to [-20, 20] before exp.

==================== =============================== =====================================
kind                 value                           gradient for each token
==================== =============================== =====================================
``none``             - (the term is A lp)            A
``self``             pi / sg(pi) = 1                 1
``token``            exp(d_t)                        exp(d_t)
``sequence``         s = exp(mean_t d_t)             s / n (GSPO, 2507.18071 Eq. 7)
``sequence_token``   sg(s) pi / sg(pi)               s, before the 1/n of the aggregation
``sequence_product`` P = exp(sum_t d_t)              P (RLOO as TRL writes it)
``geometric``        left to the trust region        GMPO clips d before the mean
==================== =============================== =====================================
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_grpo.objectives.tensors import LOG_LIMIT, exp_clamped, masked

RatioKind = Literal["none", "self", "token", "sequence", "sequence_token", "sequence_product", "geometric"]

WITHOUT_OLD = frozenset({"none", "self"})
"""Ratios that never look at the old policy."""
ONE_PER_SEQUENCE = frozenset({"sequence", "sequence_product", "geometric"})
"""Ratios that give one number per completion: seq_sum then means 1/N per completion, not per token."""


def importance_ratio(
    kind: RatioKind, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, token_form: bool = False
) -> Tensor:
    """Compute the importance ratio of each token, [n, T], with gradient; 1 outside the mask.

    Args:
        logprobs: [n, T] with gradient, already free of junk outside ``mask`` (see :func:`tensors.masked`).
        old_logprobs: [n, T] detached, the same.
        token_form: give a sequence ratio the gradient of its token form: the same value, and the same gradient if the
            terms of a completion share one weight; needed as soon as they do not.
    """
    # The value is 1, and the gradient that of log pi.
    if kind in WITHOUT_OLD:
        return (logprobs - logprobs.detach()).exp()
    log_ratio = masked(logprobs - old_logprobs, mask)
    if kind in ("token", "geometric"):
        return exp_clamped(log_ratio)
    length = mask.sum(1, keepdim=True).clamp_min(1)
    clamped = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)
    if kind == "sequence_product":
        ratio, steps = exp_clamped(clamped.sum(1, keepdim=True)), length.to(logprobs.dtype)
    else:
        ratio, steps = exp_clamped(clamped.sum(1, keepdim=True) / length), torch.ones_like(logprobs[:, :1])
    if kind == "sequence_token" or token_form:
        own = ((logprobs - logprobs.detach()) * steps).exp()
        return torch.where(mask, ratio.detach() * own, torch.ones_like(logprobs))
    return torch.where(mask, ratio.expand_as(logprobs), torch.ones_like(logprobs))
