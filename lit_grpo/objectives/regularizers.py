"""Regularisers: KL to a reference, entropy bonus, likelihood of correct completions, and the critic's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from lit_grpo.objectives.part import Part, on_off
from lit_grpo.objectives.tensors import LOG_LIMIT, masked
from lit_grpo.utils.bounds import Bound

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Regularizers(Part):
    """Terms beside the policy term, each with its own coefficient; never multiplied by sampler weights."""

    kl_coef: Annotated[float, Bound(least=0)] = 0.0
    """Coefficient beta of KL(pi || pi_ref); 0 is off and needs no reference."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: the loss (aggregated as the policy term), or -beta (lp_old - lp_ref) in the reward."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of a KL term in the loss. k1 has a gradient of mean zero, k2 that of KL(pi || ref), k3 that of
    KL(ref || pi)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, aggregated as the policy term; 0 is off."""
    nll_coef: Annotated[float, Bound(least=0)] = 0.0
    """Coefficient mu of the mean negative log-likelihood of the tokens of correct completions. VAPO, 2504.05118."""
    value_coef: Annotated[float, Bound(least=0)] = 0.0
    """Coefficient of the critic's loss; 0 for methods without a critic."""
    value_clip: Annotated[float, Bound(least=0)] = 0.0
    """Range that the critic's new value may leave its old one by; 0 is off."""

    def labels(self) -> dict[str, str]:
        kl = f"{self.kl_estimator}_in_loss" if self.kl_loss else "in_reward" if self.kl_reward else "off"
        return {"kl": kl, "entropy_bonus": on_off(self.entropy_coef), "nll": on_off(self.nll_coef)}

    def idle(self, *, critic: bool) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if not self.kl_loss:
            reasons["kl_estimator"] = "no KL term is in the loss (kl_coef is 0 or kl_placement is reward)"
        if not self.kl_coef:
            reasons["kl_placement"] = "kl_coef is 0"
        if not critic:
            reasons["value_clip"] = "the objective has no critic"
        return reasons

    @property
    def uses_correct(self) -> tuple[str, ...]:
        return ("nll_coef",) if self.nll_coef else ()

    @property
    def kl_loss(self) -> bool:
        """Whether a KL term is in the loss."""
        return self.kl_coef != 0 and self.kl_placement == "loss"

    @property
    def kl_reward(self) -> bool:
        """Whether a KL term is in the reward."""
        return self.kl_coef != 0 and self.kl_placement == "reward"


def kl_to_reference(kind: KlEstimator, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KL(pi || pi_ref) estimated on sampled tokens, [n, T], 0 outside the mask (Schulman 2020).

    k1 = lp - lp_ref; k2 = (lp - lp_ref)^2 / 2; k3 = exp(lp_ref - lp) - (lp_ref - lp) - 1.
    """
    difference = masked(ref_logprobs - logprobs, mask)
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference * difference / 2
    clamped = difference.clamp(-LOG_LIMIT, LOG_LIMIT)
    return clamped.exp() - clamped - 1


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """1/2 max((V - ret)^2, (clamp(V, V_old - clip, V_old + clip) - ret)^2) of each token, [n, T], 0 outside the mask.

    ``clip`` 0 is off. PPO2 (1707.06347 and its released code).
    """
    new, old, target = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    error = (new - target) ** 2
    # The larger of the two errors, as in PPO2: clipping never makes an error smaller.
    if clip:
        bounded = torch.minimum(torch.maximum(new, old - clip), old + clip)
        error = torch.maximum(error, (bounded - target) ** 2)
    return error / 2
