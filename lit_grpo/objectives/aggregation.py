"""Aggregation: the weight of one token of each completion in the loss. Denominators are those of the whole optimizer
step: over micro-batches, accumulation and ranks.

N completions, n_i tokens of completion i, B tokens of the step. A completion without tokens does not count in N
unless ``count_empty``; one that a filter took out counts only if the filter keeps its denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives.part import Part
from lit_grpo.objectives.tensors import Groups, Reduce, over_ranks
from lit_grpo.utils.bounds import Bound


@dataclass(frozen=True)
class Counts:
    """Counts that denominators are made of, for the completions of one optimizer step on this rank."""

    tokens: Tensor
    """n_i, tokens that count, [N] int64."""
    counted: Tensor
    """Completions that count in the denominators, [N] bool."""
    member: Tensor
    """Completions of the set that is averaged (positives, negatives, or all), [N] bool."""
    groups: Groups
    dtype: torch.dtype
    """Number format of the weights."""
    reduce: Reduce | None = None
    conflicts: Tensor | None = None
    """Conflict tokens of each completion, [N] (GTPO)."""

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over completions and ranks, a scalar."""
        # Summed in float64: float32 counts single tokens only up to 2**24.
        return over_ranks(value.to(torch.float64).sum(), self.reduce).to(self.dtype)

    def rows(self, count_empty: bool, among: Tensor | None = None) -> Tensor:
        """Return which completions count in N, [N] bool.

        Args:
            count_empty: whether completions without a token count.
            among: completions to choose from, [N] bool; None: ``counted``.
        """
        rows = self.counted if among is None else among
        return rows if count_empty else rows & (self.tokens > 0)


def _inverse(value: Tensor) -> Tensor:
    """Return 1 / ``value``, and 0 where it is 0."""
    # A set without members weighs nothing; infinity times its weight of 0 would be NaN. The clamp keeps infinity out of
    # the branch that is not taken, too.
    return torch.where(value > 0, 1 / value.clamp_min(1e-30), torch.zeros_like(value))


class Aggregation(Part):
    """Base of all aggregations, each of which gives the weight of a token in the loss."""

    kind: ClassVar[str]
    sums_trajectory: ClassVar[bool] = False
    """True if the weight is that of a sum over the tokens of a completion; under a ratio of whole sequences there is
    one term for all of them."""

    def __call__(self, counts: Counts) -> Tensor:
        """Return the weight that each token of a completion has in the loss, [N]."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__")

    def for_run(self, max_new_tokens: int) -> Aggregation:
        """Return the aggregation with the constants that the run's length limit fixes."""
        return self


@dataclass(frozen=True)
class SeqMean(Aggregation):
    """1 / (N n_i): mean over completions of their token means. GRPO as printed."""

    kind: ClassVar[str] = "seq_mean"
    count_empty: bool = False
    """Whether completions without a token count in the number of completions."""

    def __call__(self, counts: Counts) -> Tensor:
        n = counts.total(counts.rows(self.count_empty))
        return _inverse(n) * _inverse(counts.tokens.to(counts.dtype))


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """1 / B: mean over all tokens of the step. DAPO's code, LitePPO, Olmo 3."""

    kind: ClassVar[str] = "token_mean"

    def __call__(self, counts: Counts) -> Tensor:
        tokens = counts.total(counts.tokens * counts.counted)
        return _inverse(tokens).expand(counts.tokens.shape)


@dataclass(frozen=True)
class TokenMeanGroup(Aggregation):
    """1 / (groups x tokens of the own group): DAPO as printed."""

    kind: ClassVar[str] = "token_mean_group"

    def __call__(self, counts: Counts) -> Tensor:
        per_group = counts.groups.sum((counts.tokens * counts.counted).to(counts.dtype))
        groups = counts.total(per_group > 0)
        return _inverse(groups) * counts.groups.spread(_inverse(per_group))


@dataclass(frozen=True)
class SumConst(Aggregation):
    """1 / (N M) with a constant M, the generation limit: no length preference. Dr. GRPO, 2503.20783.
    ``max_tokens`` 0 takes the limit of the run.
    """

    kind: ClassVar[str] = "sum_const"
    max_tokens: Annotated[int, Bound(least=0)] = 0
    """Constant divisor; the run's generation limit if left out."""
    count_empty: bool = True

    def __call__(self, counts: Counts) -> Tensor:
        n = counts.total(counts.rows(self.count_empty))
        return (_inverse(n) / _constant(self.max_tokens, self.kind)).expand(counts.tokens.shape)

    def for_run(self, max_new_tokens: int) -> SumConst:
        return self if self.max_tokens else SumConst(max_new_tokens, self.count_empty)


def _constant(max_tokens: int, kind: str) -> int:
    if max_tokens <= 0:
        raise UserError(
            f"the aggregation {kind!r} divides by the generation limit, which is not set",
            where="model.objective.max_tokens",
            remedy="give max_tokens, or call Objective.for_run(max_new_tokens)",
        )
    return max_tokens


@dataclass(frozen=True)
class SeqSum(Aggregation):
    """1 / N: the sum over the trajectory, mean over completions. The unbiased policy gradient. With a ratio of whole
    sequences there is one term per completion, and its weight is 1 / N.
    """

    kind: ClassVar[str] = "seq_sum"
    sums_trajectory: ClassVar[bool] = True
    count_empty: bool = False

    def __call__(self, counts: Counts) -> Tensor:
        return _inverse(counts.total(counts.rows(self.count_empty))).expand(counts.tokens.shape)


@dataclass(frozen=True)
class PerPromptSet(Aggregation):
    """1 / (prompts with a non-empty set x |set of the prompt| x n_i): the likelihood losses. ``set_scope`` ``batch``
    makes one set of the whole batch.
    """

    kind: ClassVar[str] = "per_prompt_set"
    set_scope: Literal["prompt", "batch"] = "prompt"
    """Whether completions are averaged within each prompt and then over prompts, or over the whole batch."""
    count_empty: bool = False

    def length(self, counts: Counts) -> Tensor:
        """Return the divisor that stands in the place of n_i, [N]."""
        return counts.tokens.to(counts.dtype)

    def __call__(self, counts: Counts) -> Tensor:
        members = counts.rows(self.count_empty, counts.member & counts.counted)
        per_token = _inverse(self.length(counts))
        if self.set_scope == "batch":
            return _inverse(counts.total(members)) * per_token
        size = counts.groups.sum(members.to(counts.dtype))
        return _inverse(counts.total(size > 0)) * counts.groups.spread(_inverse(size)) * per_token


@dataclass(frozen=True)
class PerPromptSetConst(PerPromptSet):
    """``per_prompt_set`` with the constant T in place of n_i: TNPL, TNNL, TNCL. Empty completions count in the set."""

    kind: ClassVar[str] = "per_prompt_set_const"
    count_empty: bool = True
    max_tokens: Annotated[int, Bound(least=0)] = 0

    def length(self, counts: Counts) -> Tensor:
        constant = _constant(self.max_tokens, self.kind)
        return torch.full(counts.tokens.shape, float(constant), dtype=counts.dtype, device=counts.tokens.device)

    def for_run(self, max_new_tokens: int) -> PerPromptSetConst:
        return self if self.max_tokens else PerPromptSetConst(self.set_scope, self.count_empty, max_new_tokens)


@dataclass(frozen=True)
class OnlyTokenMean(Aggregation):
    """1 / n_i without 1/N: the gradient grows with the batch. DCPO, 2509.02333."""

    kind: ClassVar[str] = "only_token_mean"

    def __call__(self, counts: Counts) -> Tensor:
        return _inverse(counts.tokens.to(counts.dtype))


@dataclass(frozen=True)
class ConflictTokens(Aggregation):
    """1 / (n_i max(conflict tokens of i, 1)) without 1/N: GTPO's released code."""

    kind: ClassVar[str] = "conflict_tokens"

    def __call__(self, counts: Counts) -> Tensor:
        conflicts = counts.conflicts
        if conflicts is None:
            raise UserError("the aggregation 'conflict_tokens' needs conflict masks", remedy="set conflict_overlap")
        return _inverse(counts.tokens.to(counts.dtype)) / conflicts.clamp_min(1)
