"""StepPlan: everything about one optimizer step that is fixed before its forward passes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepPlan:
    """Filters, weights and denominators of one optimizer step, for N completions on this rank, T tokens wide.

    Denominators are already inside ``weights``, so the losses of any split of the rows add up to the step's loss.
    """

    lengths: Tensor
    """[N] int64."""
    kept: Tensor
    """[N] bool: completions that no filter took out of the loss."""
    active: Tensor
    """[N] bool: completions that contribute anything; the others need no gradient."""
    advantages: Tensor
    """[N, T], 0 outside the mask: the signal that multiplies the ratio."""
    weights: Tensor
    """[N] weight of each token, from the aggregation; 0 for dropped completions."""
    token_weights: Tensor
    """[N, T] lambda: factors of single tokens on the policy term."""
    pass_mask: Tensor
    """[N, T] bool: tokens of this pass (Lopti); True elsewhere."""
    conflicts: Tensor | None
    """[N, T] bool: GTPO's conflict tokens, None if ids or signs are not known."""
    positive: Tensor
    """[N] bool: reward above 0."""
    old_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    router_logscores_old: Tensor | None = None
    empty: bool = False
    """Nothing is left on any rank: skip forward, backward and optimizer."""
    active_total: float = 0.0
    """Active completions of the step, all ranks."""
    nll_weight: float = 0.0
    """Weight of each token of a positive completion in the likelihood term."""
    value_weight: float = 0.0
    """Weight of each token in the critic's loss."""
    beta: float = 0.0
    """Current coefficient of an adaptive KL penalty."""
    value_range: tuple[float, float] = field(default=(0.0, 1.0))
    """Smallest and largest reward, in the whole run as far as it is known."""

    @property
    def width(self) -> int:
        """T."""
        return self.advantages.shape[1]

    @property
    def tokens(self) -> Tensor:
        """[N, T] bool: generated tokens of all completions."""
        return torch.arange(self.width, device=self.lengths.device)[None, :] < self.lengths[:, None]

    def select(self, rows: Tensor) -> StepPlan:
        """The plan of some completions, in the order of ``rows`` (indices or a bool mask)."""
        changed: dict[str, Any] = {
            f.name: v[rows] for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)

    def trim(self, width: int) -> StepPlan:
        """The plan for a micro-batch padded to ``width`` tokens instead of T."""
        if width == self.width:
            return self
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        if longest > width:
            raise ValueError(f"log-probabilities are {width} tokens wide, but a completion has {longest} tokens")
        changed: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, Tensor) or value.ndim < 2:
                continue
            if width < self.width:
                changed[f.name] = value[:, :width]
            else:
                tail = value.new_zeros(value.shape[0], width - self.width, *value.shape[2:])
                changed[f.name] = torch.cat([value, tail], dim=1)
        return replace(self, **changed)
