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
    """Tokens of each completion, [N] int64."""
    kept: Tensor
    """Completions that no filter took out of the loss, [N] bool."""
    active: Tensor
    """Completions that contribute anything, [N] bool; the others need no gradient."""
    advantages: Tensor
    """The signal that multiplies the ratio, [N, T], 0 outside the mask."""
    weights: Tensor
    """Weight of each token of a completion, from the aggregation, [N]; 0 for dropped completions."""
    token_weights: Tensor
    """Factors lambda of single tokens on the policy term, [N, T]."""
    pass_mask: Tensor
    """Tokens that belong to this pass over the step, [N, T] bool; all of them except under Lopti."""
    conflicts: Tensor | None
    """GTPO's conflict tokens, [N, T] bool; None if ids or signs are not known."""
    entropy_filtered: Tensor | None
    """Completions that GTPO's entropy filter takes out, [N] bool; None where the filter is off."""
    correct: Tensor | None
    """Completions that count as correct, after label noise, [N] bool; None where no reward says what is right."""
    old_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    router_logscores_old: Tensor | None = None
    empty: bool = False
    """Whether nothing is left on any rank, so that forward, backward and optimizer are skipped."""
    active_total: float = 0.0
    """Number of active completions of the step, over all ranks."""
    nll_weight: float = 0.0
    """Weight of each token of a correct completion in the likelihood term."""
    value_weight: float = 0.0
    """Weight of each token in the critic's loss."""
    beta: float = 0.0
    """Current coefficient of an adaptive KL penalty."""
    value_range: tuple[float, float] = field(default=(0.0, 1.0))
    """Smallest and largest reward, in the whole run as far as it is known."""

    @property
    def width(self) -> int:
        """T, the number of columns."""
        return self.advantages.shape[1]

    @property
    def tokens(self) -> Tensor:
        """The generated tokens of all completions, [N, T] bool."""
        return torch.arange(self.width, device=self.lengths.device)[None, :] < self.lengths[:, None]

    def select(self, rows: Tensor) -> StepPlan:
        """Return the plan of some completions, in the order of ``rows`` (indices or a bool mask)."""
        changed: dict[str, Any] = {
            f.name: v[rows] for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)

    def trim(self, width: int) -> StepPlan:
        """Return the plan for a micro-batch that is padded to ``width`` tokens instead of T.

        Raises:
            ValueError: a completion is longer.
        """
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
                # Columns past T hold no token of any completion, so what stands there is never read.
                tail = value.new_zeros(value.shape[0], width - self.width, *value.shape[2:])
                changed[f.name] = torch.cat([value, tail], dim=1)
        return replace(self, **changed)
