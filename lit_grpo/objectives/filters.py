"""Sample filters: which completions of an optimizer step are in the loss, and which count in its denominators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_grpo.objectives.part import Part, on_off
from lit_grpo.objectives.tensors import Groups


@dataclass(frozen=True)
class Filters(Part):
    """Choice of the completions of a step that are in its loss.

    A dropped completion leaves every term of the loss; its reward stays in the statistics of its group.
    """

    drop_zero_variance: bool = False
    """Drop groups whose rewards (before length penalties) are all equal. DAPO, Olmo 3, Reinforce-Rej."""
    dynamic_sampling: bool = False
    """Drop them, and sample more prompts until the batch is full of mixed groups. DAPO, 2503.14476 Eq. 11."""
    mask_truncated: bool = False
    """Drop completions that the length limit cut (overlong filtering); never in the denominator."""
    keep_sign: Literal["all", "positives", "negatives"] = "all"
    """Keep only completions with a reward above 0, or only the others."""
    filtered_denominator: Literal["kept", "all"] = "kept"
    """Whether dropped groups and completions stay in the denominators (released code of Reinforce-Rej, RAFT++)."""

    def labels(self) -> dict[str, str]:
        uniform = "dynamic" if self.dynamic_sampling else "drop" if self.drop_zero_variance else "keep"
        return {"uniform_groups": uniform, "mask_truncated": on_off(self.mask_truncated), "keep_sign": self.keep_sign}

    @property
    def zero_variance(self) -> bool:
        """Whether uniform groups are dropped."""
        return self.drop_zero_variance or self.dynamic_sampling

    def __call__(self, base: Tensor, shaped: Tensor, truncated: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Choose the completions in the loss, and those in the denominators, both [N] bool.

        Args:
            base: rewards before length penalties, [N]; a group is uniform if these are equal.
            shaped: rewards that the advantages come from, [N]; their sign decides what ``keep_sign`` keeps.
            truncated: [N] bool.
        """
        complete = ~truncated if self.mask_truncated else torch.ones_like(truncated)
        kept = complete.clone()
        if self.zero_variance:
            kept &= ~groups.spread(groups.uniform(base))
        if self.keep_sign != "all":
            kept &= (shaped > 0) if self.keep_sign == "positives" else ~(shaped > 0)
        return kept, complete if self.filtered_denominator == "all" else kept
