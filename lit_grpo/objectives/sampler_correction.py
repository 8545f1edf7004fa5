"""Sampler corrections: weights for tokens that another engine drew with slightly other probabilities.

c_t = exp(lp_old_t - lp_sampler_t) of a token, C = prod_t c_t of the completion, C^(1/n) its geometric mean; all
detached. The weight multiplies the policy term after clipping, never the KL, entropy or likelihood terms, and a weight
of 0 does not change a denominator (unless ``sampler_denominator`` is ``kept``). A token whose probability the engine
did not report (not finite) has c = 1 and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_grpo.objectives.part import Part
from lit_grpo.objectives.tensors import LOG_LIMIT, exp_clamped, masked
from lit_grpo.utils.bounds import Bound


class SamplerWeights(NamedTuple):
    """Weights of the tokens of one micro-batch, and what the correction did to them."""

    weights: Tensor
    """c after the method's cap or mask, [n, T], 0 outside the mask."""
    ratios: Tensor
    """Raw c, [n, T], 1 outside the mask."""
    capped: Tensor
    """Tokens whose weight the cap or mask changed, [n, T] bool."""
    missing: Tensor
    """Tokens whose sampler log-probability is not known, [n, T] bool."""


def sampler_log_ratio(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log c clamped to [-20, 20], 0 where masked or unknown, and which tokens are unknown; [n, T] both."""
    known = torch.isfinite(sampler_logprobs) & mask
    log_c = masked(masked(old_logprobs, known) - masked(sampler_logprobs, known), known)
    return log_c.clamp(-LOG_LIMIT, LOG_LIMIT), mask & ~known


class SamplerCorrection(Part):
    """Base of all sampler corrections."""

    kind: ClassVar[str]
    token_level: ClassVar[bool] = False
    """True if tokens of one completion get different weights."""
    sampler_denominator: Literal["all", "kept"] = "all"
    """Whether tokens of weight 0 stay in the denominators, of corrections that mask."""

    @property
    def needs_old_early(self) -> bool:
        """Whether pi_old must be known before the first update: a denominator of kept tokens is fixed by then."""
        return self.sampler_denominator == "kept"

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        """Return the weights, [n, T].

        Args:
            c: ratio of each token, [n, T].
            sequence: product of the ratios of each completion, [n, 1].
            geometric: geometric mean of the ratios of each completion, [n, 1].
        """
        raise NotImplementedError(f"{type(self).__name__} must implement weights")

    def __call__(self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> SamplerWeights:
        """Compute the weights from log-probabilities and a mask, all [n, T] and detached."""
        log_c, missing = sampler_log_ratio(old_logprobs, sampler_logprobs, mask)
        c = log_c.exp()
        total = log_c.sum(1, keepdim=True)
        sequence, geometric = exp_clamped(total), exp_clamped(total / mask.sum(1, keepdim=True).clamp_min(1))
        weights = self.weights(c, sequence, geometric)
        reference = c if self.token_level or self.kind == "none" else sequence.expand_as(c)
        capped = (weights != reference) & mask if self.kind != "none" else torch.zeros_like(mask)
        return SamplerWeights(masked(weights, mask), c, capped, missing)


@dataclass(frozen=True)
class NoCorrection(SamplerCorrection):
    """No correction: c = 1."""

    kind: ClassVar[str] = "none"

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        return torch.ones_like(c)


@dataclass(frozen=True)
class TisToken(SamplerCorrection):
    """clamp(c, floor, cap), token by token: truncated importance sampling. Cap 2 (TIS authors, Olmo 3)."""

    kind: ClassVar[str] = "tis_token"
    token_level: ClassVar[bool] = True
    sampler_cap: Annotated[float, Bound(above=0)] = 2.0
    """Upper bound of a sampler weight."""
    sampler_floor: Annotated[float, Bound(least=0)] = 0.0
    """Lower bound of a sampler weight."""

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        return c.clamp(self.sampler_floor, self.sampler_cap)


@dataclass(frozen=True)
class TisSequence(SamplerCorrection):
    """min(C, cap), one weight for all tokens of the completion."""

    kind: ClassVar[str] = "tis_sequence"
    sampler_cap: Annotated[float, Bound(above=0)] = 2.0
    sampler_floor: Annotated[float, Bound(least=0)] = 0.0

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        return sequence.clamp(self.sampler_floor, self.sampler_cap).expand_as(c)


def _inside(value: Tensor, low: float, high: float) -> Tensor:
    return torch.where((value >= low) & (value <= high), value, torch.zeros_like(value))


@dataclass(frozen=True)
class MisToken(SamplerCorrection):
    """c inside [floor, cap], else 0, token by token (IcePop)."""

    kind: ClassVar[str] = "mis_token"
    token_level: ClassVar[bool] = True
    sampler_cap: Annotated[float, Bound(above=0)] = 2.0
    sampler_floor: Annotated[float, Bound(least=0)] = 0.5
    sampler_denominator: Literal["all", "kept"] = "all"
    """Whether masked tokens stay in the denominators."""

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        return _inside(c, self.sampler_floor, self.sampler_cap)


@dataclass(frozen=True)
class MisSequence(SamplerCorrection):
    """C inside [floor, cap], else 0, for the whole completion."""

    kind: ClassVar[str] = "mis_sequence"
    sampler_cap: Annotated[float, Bound(above=0)] = 2.0
    sampler_floor: Annotated[float, Bound(least=0)] = 0.5
    sampler_denominator: Literal["all", "kept"] = "all"

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        return _inside(sequence, self.sampler_floor, self.sampler_cap).expand_as(c)


@dataclass(frozen=True)
class GeoMask(SamplerCorrection):
    """1 for completions with geo_low <= C^(1/n) <= geo_high, else 0."""

    kind: ClassVar[str] = "geo_mask"
    geo_low: Annotated[float, Bound(least=0)] = 0.999
    """Smallest geometric mean of a completion that is kept."""
    geo_high: Annotated[float, Bound(above=0)] = 1.001
    """Largest geometric mean of a completion that is kept."""
    sampler_denominator: Literal["all", "kept"] = "all"

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        kept = (geometric >= self.geo_low) & (geometric <= self.geo_high)
        return kept.to(c.dtype).expand_as(c)

    def __call__(self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> SamplerWeights:
        out = super().__call__(old_logprobs, sampler_logprobs, mask)
        return out._replace(capped=mask & (out.weights == 0))


@dataclass(frozen=True)
class GeoMaskTisToken(GeoMask):
    """The geometric mask with truncated token weights on the completions it keeps."""

    kind: ClassVar[str] = "geo_mask_tis_token"
    token_level: ClassVar[bool] = True
    sampler_cap: Annotated[float, Bound(above=0)] = 2.0
    sampler_floor: Annotated[float, Bound(least=0)] = 0.0

    def weights(self, c: Tensor, sequence: Tensor, geometric: Tensor) -> Tensor:
        return super().weights(c, sequence, geometric) * c.clamp(self.sampler_floor, self.sampler_cap)

    def __call__(self, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> SamplerWeights:
        out = SamplerCorrection.__call__(self, old_logprobs, sampler_logprobs, mask)
        return out._replace(capped=mask & (out.weights != out.ratios))


def geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """Return (prod_t c_t)^(1/n) of each completion, [n, 1]; 0 as soon as one token's weight is 0."""
    safe = torch.where(mask & (weights > 0), weights, torch.ones_like(weights))
    value = (safe.log().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)).exp()
    return value * (~(mask & (weights <= 0))).all(1, keepdim=True)
