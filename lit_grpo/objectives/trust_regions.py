"""Trust regions F(ratio, A): what bounds an update that leaves the old policy. Maximised, so the loss is -F.

At ratio 1 all of them have the gradient A (for the sequence forms: summed over the completion). Clipped terms are
constants, written with ``where``, so that the gradient at a tie is the unclipped one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives.part import Part
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.objectives.tensors import LOG_LIMIT, exp_clamped, masked
from lit_grpo.utils.bounds import Bound


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a trust region for one micro-batch, [n, T] each; junk outside ``mask`` is already gone."""

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


class SurrogateOutput(NamedTuple):
    """F of each token, and the side from which it was stopped."""

    value: Tensor
    """F, [n, T]."""
    low: Tensor
    """Tokens stopped from below (A < 0, ratio too small), [n, T] bool."""
    high: Tensor
    """Tokens stopped from above (A > 0, ratio too large), [n, T] bool."""
    dual: Tensor
    """Tokens stopped by the dual clip (A < 0, ratio far too large), [n, T] bool."""
    penalty: Tensor | None = None
    """A KL term, [n, T], that is subtracted from F but never multiplied by sampler weights."""


def _never(inputs: SurrogateInputs) -> Tensor:
    return torch.zeros_like(inputs.mask)


class TrustRegion(Part):
    """Base of all trust regions; a user's own needs ``kind`` and ``__call__`` only."""

    kind: ClassVar[str]
    per_sequence: ClassVar[bool] = False
    """True if F is one number per completion, in which token weights have no meaning."""
    needs_ratio: ClassVar[bool] = True
    """True if it means nothing without an importance ratio."""
    needs_router_scores: ClassVar[bool] = False
    """True if it looks at the scores of the experts, now and under the old policy."""
    penalizes: ClassVar[bool] = False
    """True if it has a term that acts on tokens whose advantage is 0, too."""

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        raise NotImplementedError(f"{type(self).__name__} must implement __call__")

    def penalty_coefficient(self, state: ObjectiveState) -> float:
        """Return the current coefficient of the penalty; 0 if there is none."""
        return 0.0

    def adapted(self, beta: float, kl: float) -> float:
        """Return beta after a rollout whose mean KL(pi_old || pi) was ``kl``."""
        return beta

    def router_factor(self, scores: Tensor, old_scores: Tensor) -> Tensor:
        """Factor of each token for the change of its experts' scores, see :func:`router_factor`."""
        raise UserError(f"the trust region {self.kind!r} does not look at router scores")


@dataclass(frozen=True)
class NoTrustRegion(TrustRegion):
    """F = ratio A."""

    kind: ClassVar[str] = "none"
    needs_ratio: ClassVar[bool] = False

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        never = _never(inputs)
        return SurrogateOutput(inputs.ratio * inputs.advantages, never, never, never)


def bounded(
    ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float, dual: Tensor | float
) -> SurrogateOutput:
    """Compute min(rho A, clamp(rho, low, high) A), and for A < 0 at least dual A; bounds are absolute ratios."""
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    far = (advantages < 0) & (ratio > dual)
    value = ratio * advantages
    for stopped, bound in ((above, high), (below, low), (far, dual)):
        # An infinite bound stops nothing, but inf * 0 in the unused branch would be NaN.
        # A number is filled in on the device: copied there it would be waited for.
        limit = torch.where(stopped, bound if isinstance(bound, Tensor) else ratio.new_full((), bound), 0.0)
        value = torch.where(stopped, limit * advantages, value)
    return SurrogateOutput(value, below, above, far)


@dataclass(frozen=True)
class Clip(TrustRegion):
    """F = min(rho A, clamp(rho, 1 - low, 1 + high) A); dual: for A < 0 also max(F, c A). PPO, 1707.06347; the
    dual clip is 1912.09729. ``dual_clip`` 0 is off.
    """

    kind: ClassVar[str] = "clip"
    clip_low: Annotated[float, Bound(least=0)] = 0.2
    """Lower clip range: ratios below 1 - clip_low are stopped where A < 0."""
    clip_high: Annotated[float, Bound(least=0)] = 0.2
    """Upper clip range: ratios above 1 + clip_high are stopped where A > 0."""
    dual_clip: Annotated[float, Bound(least=0)] = 0.0
    """Absolute ratio above which tokens with A < 0 are stopped; 0 is off."""

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        dual = self.dual_clip or float("inf")
        return bounded(inputs.ratio, inputs.advantages, 1 - self.clip_low, 1 + self.clip_high, dual)


@dataclass(frozen=True)
class Cispo(TrustRegion):
    """F = sg(clamp(rho, floor, cap)) A lp: the weight is bounded, every token keeps a gradient. CISPO, 2506.13585.
    ``cispo_cap`` is absolute, not 1 + epsilon.
    """

    kind: ClassVar[str] = "cispo"
    cispo_cap: Annotated[float, Bound(above=0)] = 5.0
    """Absolute cap of the detached ratio, not 1 + epsilon."""
    cispo_floor: Annotated[float, Bound(least=0)] = 0.0
    """Absolute floor of the detached ratio."""

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        # Detached: the ratio only weighs the gradient, which comes from log pi.
        ratio = inputs.ratio.detach()
        value = ratio.clamp(self.cispo_floor, self.cispo_cap) * inputs.advantages * inputs.logprobs
        return SurrogateOutput(
            value, (ratio < self.cispo_floor), (ratio > self.cispo_cap) & inputs.mask, _never(inputs)
        )


@dataclass(frozen=True)
class Sapo(TrustRegion):
    """F = (4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (A = 0 uses the negative one). SAPO, 2511.20347."""

    kind: ClassVar[str] = "sapo"
    sapo_tau_pos: Annotated[float, Bound(above=0)] = 1.0
    """Temperature of SAPO's gate where A > 0."""
    sapo_tau_neg: Annotated[float, Bound(above=0)] = 1.05
    """Temperature of SAPO's gate where A is 0 or below."""

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        tau = torch.full_like(inputs.advantages, self.sapo_tau_neg)
        tau = tau.masked_fill(inputs.advantages > 0, self.sapo_tau_pos)
        value = 4 / tau * torch.sigmoid(tau * (inputs.ratio - 1)) * inputs.advantages
        never = _never(inputs)
        return SurrogateOutput(value, never, never, never)


@dataclass(frozen=True)
class Gmpo(TrustRegion):
    """F = A exp(mean_t y_t), y = d clipped at eps on the side where the sign of A pushes: min(d, eps) for A > 0,
    max(d, -eps) for A < 0. GMPO, 2507.20673. Clipped tokens stay in the mean. F is the same on all tokens.
    """

    kind: ClassVar[str] = "gmpo"
    per_sequence: ClassVar[bool] = True
    log_clip: Annotated[float, Bound(least=0)] = 0.4
    """Clip range of the log-ratio."""

    def _clipped(self, log_ratio: Tensor, inputs: SurrogateInputs) -> tuple[Tensor, Tensor, Tensor]:
        high = (inputs.advantages > 0) & (log_ratio > self.log_clip)
        low = (inputs.advantages < 0) & (log_ratio < -self.log_clip)
        y = torch.where(high, torch.full_like(log_ratio, self.log_clip), log_ratio)
        return torch.where(low, torch.full_like(log_ratio, -self.log_clip), y), low, high

    def log_terms(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return clipped log-ratios y, the tokens stopped from below, and those stopped from above; [n, T] each."""
        log_ratio = masked(inputs.logprobs - inputs.old_logprobs, inputs.mask).clamp(-LOG_LIMIT, LOG_LIMIT)
        return self._clipped(log_ratio, inputs)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        y, low, high = self.log_terms(inputs)
        length = inputs.mask.sum(1, keepdim=True).clamp_min(1)
        geometric = exp_clamped(masked(y, inputs.mask).sum(1, keepdim=True) / length)
        return SurrogateOutput(geometric * inputs.advantages, low & inputs.mask, high & inputs.mask, _never(inputs))


@dataclass(frozen=True)
class Rspo(Gmpo):
    """GMPO with the ratios scaled by the router factor gamma, before the clip or after it. RSPO, 2510.23027.
    gamma multiplies for both signs of A. Without router scores (one update) gamma is 1.
    """

    kind: ClassVar[str] = "rspo"
    needs_router_scores: ClassVar[bool] = True
    router_floor: Annotated[float, Bound(least=0, most=1)] = 0.8
    """Smallest router factor."""
    router_stage: Literal["before_clip", "after_clip"] = "before_clip"
    """Whether the router factor enters before the clip."""

    def router_factor(self, scores: Tensor, old_scores: Tensor) -> Tensor:
        return router_factor(scores, old_scores, self.router_floor)

    def log_terms(self, inputs: SurrogateInputs) -> tuple[Tensor, Tensor, Tensor]:
        if inputs.log_router is None:
            return super().log_terms(inputs)
        log_ratio = masked(inputs.logprobs - inputs.old_logprobs, inputs.mask).clamp(-LOG_LIMIT, LOG_LIMIT)
        log_router = masked(inputs.log_router, inputs.mask)
        if self.router_stage == "before_clip":
            return self._clipped(log_ratio + log_router, inputs)
        y, low, high = self._clipped(log_ratio, inputs)
        return y + log_router, low, high


def router_factor(scores: Tensor, old_scores: Tensor, floor: float) -> Tensor:
    """Compute gamma = max(exp(-mean over layers and active experts of |log r - log r_old|), floor), detached.

    ``scores``, ``old_scores``: log-scores of the experts active under the old policy, [n, T, layers, K] -> [n, T].
    """
    change = (scores.detach() - old_scores.detach()).abs().mean((-1, -2))
    return (-change).exp().clamp_min(floor)


def dcpo_bounds(old_probs: Tensor, clip_low: float, clip_high: float, cap: float) -> tuple[Tensor, Tensor]:
    """Return bounds of the ratio that widen for rare tokens, [n, T] both. DCPO, 2509.02333.

    lo = 1/2 + 1/2 sqrt(max(1 - 4 e_lo / q, 0)), hi = min(1/2 + 1/2 sqrt(1 + 4 e_hi / q), cap), q = pi_old.
    """
    q = old_probs.clamp_min(1e-30)
    low = 0.5 + 0.5 * (1 - 4 * clip_low / q).clamp_min(0).sqrt()
    high = (0.5 + 0.5 * (1 + 4 * clip_high / q).sqrt()).clamp_max(cap)
    return low, high


@dataclass(frozen=True)
class Dcpo(TrustRegion):
    """Clip with bounds that widen for rare tokens, and no gradient where A < 0 and rho > dual. DCPO, 2509.02333."""

    kind: ClassVar[str] = "dcpo"
    clip_low: Annotated[float, Bound(least=0)] = 0.16
    clip_high: Annotated[float, Bound(least=0)] = 0.2
    dual_clip: Annotated[float, Bound(least=0)] = 10.0

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        low, high = dcpo_bounds(inputs.old_logprobs.exp(), self.clip_low, self.clip_high, self.dual_clip)
        return bounded(inputs.ratio, inputs.advantages, low, high, self.dual_clip)


@dataclass(frozen=True)
class KlPenalty(TrustRegion):
    """F = rho A - beta (rho - 1 - log rho), the penalised TRPO: on samples of pi_old the second term estimates
    KL(pi_old || pi) without bias in value and gradient. 1502.05477. With ``trpo_target_kl`` above 0, beta doubles
    after a rollout with KL > 1.5 target and halves below target / 1.5 (1707.06347 section 4).
    """

    kind: ClassVar[str] = "kl_penalty"
    penalizes: ClassVar[bool] = True
    trpo_beta: Annotated[float, Bound(least=0)] = 1.0
    """Coefficient of KL(old || new)."""
    trpo_target_kl: Annotated[float, Bound(least=0)] = 0.0
    """Target of the adaptive coefficient; 0 keeps it fixed."""

    @property
    def state_fields(self) -> frozenset[str]:
        return frozenset({"beta"} if self.trpo_target_kl > 0 else ())

    def penalty_coefficient(self, state: ObjectiveState) -> float:
        return self.trpo_beta if state.beta is None else state.beta

    def adapted(self, beta: float, kl: float) -> float:
        if kl > 1.5 * self.trpo_target_kl:
            return beta * 2
        return beta / 2 if kl < self.trpo_target_kl / 1.5 else beta

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        never = _never(inputs)
        log_ratio = inputs.ratio.log()
        penalty = inputs.beta * (inputs.ratio - 1 - log_ratio)
        return SurrogateOutput(inputs.ratio * inputs.advantages, never, never, never, masked(penalty, inputs.mask))


@dataclass(frozen=True)
class CustomTrustRegion(TrustRegion):
    """A user's function of :class:`SurrogateInputs`; it returns F [n, T] or a :class:`SurrogateOutput`."""

    kind: ClassVar[str] = "custom"
    path: str = ""
    function: Any = field(default=None, compare=False, repr=False)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateOutput:
        result = self.function(inputs)
        if isinstance(result, SurrogateOutput):
            return result
        never = _never(inputs)
        return SurrogateOutput(masked(result, inputs.mask), never, never, never)
