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
    """Drop uniform groups (``uniform_by``). DAPO, Olmo 3, Reinforce-Rej."""
    dynamic_sampling: bool = False
    """Drop them, and sample more prompts until the batch is full of mixed groups. DAPO, 2503.14476 Eq. 11."""
    uniform_by: Literal["reward", "correct"] = "reward"
    """A group is uniform if its rewards (before length penalties) are all equal (``reward``, Olmo 3), or if all of its
    completions are correct, or none (``correct``: DAPO, Reinforce-Rej)."""
    mask_truncated: bool = False
    """Drop completions that the length limit cut (overlong filtering); never in the denominator."""
    keep_sign: Literal["all", "positives", "negatives"] = "all"
    """Keep only correct completions, or only the others."""
    filtered_denominator: Literal["kept", "all"] = "kept"
    """Whether dropped groups and completions stay in the denominators (released code of Reinforce-Rej, RAFT++)."""

    def labels(self) -> dict[str, str]:
        uniform = "dynamic" if self.dynamic_sampling else "drop" if self.drop_zero_variance else "keep"
        return {
            "uniform_groups": uniform,
            "uniform_by": self.uniform_by,
            "mask_truncated": on_off(self.mask_truncated),
            "keep_sign": self.keep_sign,
        }

    def idle(self, *, critic: bool) -> dict[str, str]:
        return {} if self.zero_variance else {"uniform_by": "uniform groups are not dropped"}

    @property
    def uses_correct(self) -> tuple[str, ...]:
        by_verdict = self.zero_variance and self.uniform_by == "correct"
        return ("keep_sign",) * (self.keep_sign != "all") + ("uniform_by",) * by_verdict

    @property
    def zero_variance(self) -> bool:
        """Whether uniform groups are dropped."""
        return self.drop_zero_variance or self.dynamic_sampling

    def __call__(
        self, base: Tensor, correct: Tensor | None, truncated: Tensor, groups: Groups
    ) -> tuple[Tensor, Tensor]:
        """Choose the completions in the loss, and those in the denominators, both [N] bool.

        Args:
            base: rewards before length penalties, [N].
            correct: correct completions, [N] bool; None only if ``uses_correct`` is empty.
            truncated: [N] bool.
            groups: the groups of the completions.
        """
        complete = ~truncated if self.mask_truncated else torch.ones_like(truncated)
        kept = complete.clone()
        if self.zero_variance:
            values = base
            if self.uniform_by == "correct":
                assert correct is not None
                values = correct.to(base.dtype)
            kept &= ~groups.spread(groups.uniform(values))
        if self.keep_sign != "all":
            assert correct is not None
            kept &= correct if self.keep_sign == "positives" else ~correct
        return kept, complete if self.filtered_denominator == "all" else kept
