"""Trust regions F(ratio, A): what bounds an update that leaves the old policy. Maximised, so the loss is -F.

At ratio 1 all of them have the gradient A (for the sequence forms: summed over the completion). Clipped terms are
constants, written with ``where``, so that the gradient at a tie is the unclipped one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_grpo.objectives.tensors import LOG_LIMIT, exp_clamped, masked


@dataclass(frozen=True)
class Terms:
    """What a trust region sees of one micro-batch. All [n, T]; junk outside ``mask`` is already gone."""

    ratio: Tensor
    """pi / pi_old, with gradient."""
    advantages: Tensor
    logprobs: Tensor
    """log pi, with gradient."""
    old_logprobs: Tensor
    mask: Tensor
    log_router: Tensor | None = None
    """log of the router factor gamma (RSPO), detached; None is gamma = 1."""
    beta: float = 0.0
    """Current coefficient of a penalty that adapts."""


class Surrogate(NamedTuple):
    """F of each token and which side stopped it."""

    value: Tensor
    """F, [n, T]."""
    low: Tensor
    """Stopped from below (A < 0, ratio too small), [n, T] bool."""
    high: Tensor
    """Stopped from above (A > 0, ratio too large)."""
    dual: Tensor
    """Stopped by the dual clip (A < 0, ratio far too large)."""
    penalty: Tensor | None = None
    """Subtracted from F, but never multiplied by sampler weights: a KL term."""


def _never(terms: Terms) -> Tensor:
    return torch.zeros_like(terms.mask)


class TrustRegion:
    """Base of all trust regions; a user's own needs ``kind`` and ``__call__`` only."""

    kind: ClassVar[str]
    per_sequence: ClassVar[bool] = False
    """True if F is one number per completion, in which token weights have no meaning."""
    needs_ratio: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False

    def __call__(self, terms: Terms) -> Surrogate:
        raise NotImplementedError(f"{type(self).__name__} must implement __call__")

    def new_state(self) -> dict[str, Any]:
        """State at the start of a run: plain types only."""
        return {}


@dataclass(frozen=True)
class NoTrustRegion(TrustRegion):
    """F = ratio A."""

    kind: ClassVar[str] = "none"
    needs_ratio: ClassVar[bool] = False

    def __call__(self, terms: Terms) -> Surrogate:
        never = _never(terms)
        return Surrogate(terms.ratio * terms.advantages, never, never, never)


def bounded(
    ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float, dual: Tensor | float
) -> Surrogate:
    """min(rho A, clamp(rho, low, high) A), and for A < 0 at least dual A. Bounds are absolute ratios."""
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    far = (advantages < 0) & (ratio > dual)
    value = ratio * advantages
    for stopped, bound in ((above, high), (below, low), (far, dual)):
        # An infinite bound stops nothing, but inf * 0 in the unused branch would be NaN.
        # A number is filled in on the device: copied there it would be waited for.
        limit = torch.where(stopped, bound if isinstance(bound, Tensor) else ratio.new_full((), bound), 0.0)
        value = torch.where(stopped, limit * advantages, value)
    return Surrogate(value, below, above, far)


@dataclass(frozen=True)
class Clip(TrustRegion):
    """F = min(rho A, clamp(rho, 1 - low, 1 + high) A); dual: for A < 0 also max(F, c A). PPO, 1707.06347; the
    dual clip is 1912.09729. ``dual_clip`` 0 is off."""

    kind: ClassVar[str] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0

    def __call__(self, terms: Terms) -> Surrogate:
        dual = self.dual_clip or float("inf")
        return bounded(terms.ratio, terms.advantages, 1 - self.clip_low, 1 + self.clip_high, dual)


@dataclass(frozen=True)
class Cispo(TrustRegion):
    """F = sg(clamp(rho, floor, cap)) A lp: the weight is bounded, every token keeps a gradient. CISPO, 2506.13585.
    ``cispo_cap`` is absolute, not 1 + epsilon."""

    kind: ClassVar[str] = "cispo"
    cispo_cap: float = 5.0
    cispo_floor: float = 0.0

    def __call__(self, terms: Terms) -> Surrogate:
        ratio = terms.ratio.detach()
        value = ratio.clamp(self.cispo_floor, self.cispo_cap) * terms.advantages * terms.logprobs
        return Surrogate(value, (ratio < self.cispo_floor), (ratio > self.cispo_cap) & terms.mask, _never(terms))


@dataclass(frozen=True)
class Sapo(TrustRegion):
    """F = (4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (A = 0 uses the negative one). SAPO, 2511.20347."""

    kind: ClassVar[str] = "sapo"
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05

    def __call__(self, terms: Terms) -> Surrogate:
        tau = torch.full_like(terms.advantages, self.sapo_tau_neg)
        tau = tau.masked_fill(terms.advantages > 0, self.sapo_tau_pos)
        value = 4 / tau * torch.sigmoid(tau * (terms.ratio - 1)) * terms.advantages
        never = _never(terms)
        return Surrogate(value, never, never, never)


@dataclass(frozen=True)
class Gmpo(TrustRegion):
    """F = A exp(mean_t y_t), y = d clipped at eps on the side where the sign of A pushes: min(d, eps) for A > 0,
    max(d, -eps) for A < 0. GMPO, 2507.20673. Clipped tokens stay in the mean. F is the same on all tokens."""

    kind: ClassVar[str] = "gmpo"
    per_sequence: ClassVar[bool] = True
    log_clip: float = 0.4

    def _clipped(self, log_ratio: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        high = (terms.advantages > 0) & (log_ratio > self.log_clip)
        low = (terms.advantages < 0) & (log_ratio < -self.log_clip)
        y = torch.where(high, torch.full_like(log_ratio, self.log_clip), log_ratio)
        return torch.where(low, torch.full_like(log_ratio, -self.log_clip), y), low, high

    def log_terms(self, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        """y [n, T], stopped low, stopped high."""
        log_ratio = masked(terms.logprobs - terms.old_logprobs, terms.mask).clamp(-LOG_LIMIT, LOG_LIMIT)
        return self._clipped(log_ratio, terms)

    def __call__(self, terms: Terms) -> Surrogate:
        y, low, high = self.log_terms(terms)
        length = terms.mask.sum(1, keepdim=True).clamp_min(1)
        geometric = exp_clamped(masked(y, terms.mask).sum(1, keepdim=True) / length)
        return Surrogate(geometric * terms.advantages, low & terms.mask, high & terms.mask, _never(terms))


@dataclass(frozen=True)
class Rspo(Gmpo):
    """GMPO with the ratios scaled by the router factor gamma, before the clip or after it. RSPO, 2510.23027.
    gamma multiplies for both signs of A. Without router scores (one update) gamma is 1."""

    kind: ClassVar[str] = "rspo"
    router_floor: float = 0.8
    router_stage: Literal["before_clip", "after_clip"] = "before_clip"

    def log_terms(self, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        if terms.log_router is None:
            return super().log_terms(terms)
        log_ratio = masked(terms.logprobs - terms.old_logprobs, terms.mask).clamp(-LOG_LIMIT, LOG_LIMIT)
        log_router = masked(terms.log_router, terms.mask)
        if self.router_stage == "before_clip":
            return self._clipped(log_ratio + log_router, terms)
        y, low, high = self._clipped(log_ratio, terms)
        return y + log_router, low, high


def router_factor(scores: Tensor, old_scores: Tensor, floor: float) -> Tensor:
    """gamma = max(exp(-mean over layers and active experts of |log r - log r_old|), floor), detached.

    ``scores``, ``old_scores``: log-scores of the experts active under the old policy, [n, T, layers, K] -> [n, T].
    """
    change = (scores.detach() - old_scores.detach()).abs().mean((-1, -2))
    return (-change).exp().clamp_min(floor)


def dcpo_bounds(old_probs: Tensor, clip_low: float, clip_high: float, cap: float) -> tuple[Tensor, Tensor]:
    """lo = 1/2 + 1/2 sqrt(max(1 - 4 e_lo / q, 0)), hi = min(1/2 + 1/2 sqrt(1 + 4 e_hi / q), cap), q = pi_old."""
    q = old_probs.clamp_min(1e-30)
    low = 0.5 + 0.5 * (1 - 4 * clip_low / q).clamp_min(0).sqrt()
    high = (0.5 + 0.5 * (1 + 4 * clip_high / q).sqrt()).clamp_max(cap)
    return low, high


@dataclass(frozen=True)
class Dcpo(TrustRegion):
    """Clip with bounds that widen for rare tokens, and no gradient where A < 0 and rho > dual. DCPO, 2509.02333."""

    kind: ClassVar[str] = "dcpo"
    clip_low: float = 0.16
    clip_high: float = 0.2
    dual_clip: float = 10.0

    def __call__(self, terms: Terms) -> Surrogate:
        low, high = dcpo_bounds(terms.old_logprobs.exp(), self.clip_low, self.clip_high, self.dual_clip)
        return bounded(terms.ratio, terms.advantages, low, high, self.dual_clip)


@dataclass(frozen=True)
class KlPenalty(TrustRegion):
    """F = rho A - beta (rho - 1 - log rho), the penalised TRPO: on samples of pi_old the second term estimates
    KL(pi_old || pi) without bias in value and gradient. 1502.05477. With ``trpo_target_kl`` above 0, beta doubles
    after a rollout with KL > 1.5 target and halves below target / 1.5 (1707.06347 section 4)."""

    kind: ClassVar[str] = "kl_penalty"
    trpo_beta: float = 1.0
    trpo_target_kl: float = 0.0

    def new_state(self) -> dict[str, Any]:
        return {"beta": self.trpo_beta} if self.trpo_target_kl > 0 else {}

    def adapted(self, beta: float, kl: float) -> float:
        """beta after a rollout whose mean KL(pi_old || pi) was ``kl``."""
        if kl > 1.5 * self.trpo_target_kl:
            return beta * 2
        return beta / 2 if kl < self.trpo_target_kl / 1.5 else beta

    def __call__(self, terms: Terms) -> Surrogate:
        never = _never(terms)
        log_ratio = terms.ratio.log()
        penalty = terms.beta * (terms.ratio - 1 - log_ratio)
        return Surrogate(terms.ratio * terms.advantages, never, never, never, masked(penalty, terms.mask))


@dataclass(frozen=True)
class CustomTrustRegion(TrustRegion):
    """A user's function or object, called with :class:`Terms`; it returns F [n, T] or a :class:`Surrogate`."""

    kind: ClassVar[str] = "custom"
    path: str = ""
    function: Any = field(default=None, compare=False, repr=False)

    def __call__(self, terms: Terms) -> Surrogate:
        result = self.function(terms)
        if isinstance(result, Surrogate):
            return result
        never = _never(terms)
        return Surrogate(masked(result, terms.mask), never, never, never)
