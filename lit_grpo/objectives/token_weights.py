"""Token weights: conflict masks (GTPO), top-entropy mask, Lopti's two passes, advantage reweighting."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from lit_grpo.objectives.part import Part, on_off, refuse
from lit_grpo.objectives.tensors import Groups, Reduce, masked, over_ranks, token_mean
from lit_grpo.utils.bounds import Bound

LN2 = 0.6931471805599453


@dataclass(frozen=True)
class TokenWeights(Part):
    """Factors on the policy term of single tokens, each of them off by default."""

    top_entropy: Annotated[float, Bound(least=0, most=1)] = 0.0
    """Share k of tokens that keep their term: entropy at or above the step's (1 - k) quantile; 0 is off. 2506.01939."""
    top_entropy_denominator: Literal["all", "kept"] = "all"
    """Whether the tokens that ``top_entropy`` drops stay in the denominators."""
    lopti_eta: Annotated[float, Bound(least=0, most=1)] = 0.0
    """Probability that splits two optimizer passes: tokens with pi_old below it, then the others; 0 is off. Lopti,
    2505.12929."""
    reweight_alpha: Annotated[float, Bound(least=0, most=1)] = 0.0
    """alpha of A_t = A (alpha pi_old + 1 - alpha); 0 is off. Advantage reweighting, 2505.12929."""
    conflict_overlap: Literal["none", "or", "product"] = "none"
    """GTPO's conflict weights; ``product`` multiplies where forward and backward masks overlap (released code)."""

    def labels(self) -> dict[str, str]:
        return {
            "top_entropy": on_off(self.top_entropy),
            "lopti": on_off(self.lopti_eta),
            "reweighting": on_off(self.reweight_alpha),
            "conflicts": self.conflict_overlap,
        }

    def idle(self, *, critic: bool) -> dict[str, str]:
        return {} if self.top_entropy else {"top_entropy_denominator": "top_entropy is 0"}

    @property
    def vary_by_token(self) -> bool:
        """Whether tokens of one completion can have different weights."""
        return bool(self.top_entropy or self.lopti_eta or self.reweight_alpha or self.conflict_overlap != "none")


@dataclass(frozen=True)
class EntropySignal(Part):
    """GTPO's entropy terms: A_i becomes delta_i (A_i - gamma <H>_i), detached. 2508.03772 Eq. 10, 11.

    delta_i = 0 if H_init < gate and <H>_i > threshold, else 1; with ``negatives`` it is 1 where A_i >= 0, too. H_init
    is the mean entropy of the untouched model over the first 100 training prompts; the trainer measures it and puts it
    into the state, unless it is given here.
    """

    entropy_gamma: Annotated[float, Bound(least=0)] = 0.0
    """gamma of GTPO's A - gamma <H>; 0 is off."""
    entropy_filter: Literal["none", "negatives", "all"] = "none"
    """GTPO's filter: completions whose mean entropy <H> is above ``entropy_threshold`` get no gradient; of all
    completions, or of those with A < 0 alone (2508.03772 section 6.2, OnlyNeg)."""
    entropy_threshold: Annotated[float, Bound(least=0)] = LN2
    """Threshold of GTPO's entropy filter on <H> of a completion, in nats. The paper tries 0.7, 1.05 and 2."""
    entropy_gate: Annotated[float, Bound(least=0, infinite=True)] = LN2
    """The entropy filter acts only if the untouched model's mean entropy H_init is below this, in nats (Eq. 10);
    .inf: always, and H_init is not measured."""
    initial_entropy: Annotated[float | None, Bound(least=0)] = None
    """H_init, the mean entropy of the untouched model, in nats; left out, it is measured over the first 100 prompts."""

    def labels(self) -> dict[str, str]:
        kinds = {"none": "gamma" if self.entropy_gamma else "off", "negatives": "only_negatives", "all": "on"}
        return {"entropy_signal": kinds[self.entropy_filter]}

    def idle(self, *, critic: bool) -> dict[str, str]:
        if self.entropy_filter == "none":
            return dict.fromkeys(("entropy_threshold", "entropy_gate", "initial_entropy"), "entropy_filter is none")
        return {} if self.gated else {"initial_entropy": "entropy_gate is infinite, so the filter always acts"}

    @property
    def gated(self) -> bool:
        """Whether the filter depends on the entropy of the untouched model."""
        return self.entropy_filter != "none" and self.entropy_gate != float("inf")

    @property
    def state_fields(self) -> frozenset[str]:
        return frozenset({"initial_entropy"} if self.gated else ())

    @property
    def on(self) -> bool:
        """Whether the entropy terms change any advantage."""
        return self.entropy_gamma != 0 or self.entropy_filter != "none"

    def threshold_in_force(self, initial_entropy: float | None) -> float | None:
        """Return the mean entropy above which completions are filtered, in nats; None if the filter does not act.

        Raises:
            UserError: that depends on the entropy of the untouched model, which is not known.
        """
        if self.entropy_filter == "none":
            return None
        if self.gated and initial_entropy is None:
            refuse(
                "initial_entropy",
                "the entropy filter needs the entropy of the untouched model, which was not measured",
                "give initial_entropy, or entropy_gate: .inf, under which the filter always acts",
            )
        acts = not self.gated or (initial_entropy is not None and initial_entropy < self.entropy_gate)
        return self.entropy_threshold if acts else None

    def delta(self, mean_entropy: Tensor, advantages: Tensor, initial_entropy: float | None) -> Tensor:
        """Return delta_i, [N]: 0 for completions that the filter takes out, 1 for the others. 2508.03772 Eq. 10.

        Args:
            mean_entropy: <H>_i, [N].
            advantages: A_i before the entropy term, or A_{i,t} where they differ between tokens: [N] or [N, T]. A
                completion is negative if all of them together are below 0.
            initial_entropy: H_init; None if it is not known.

        Raises:
            UserError: the filter needs H_init, and it is not known.
        """
        threshold = self.threshold_in_force(initial_entropy)
        if threshold is None:
            return torch.ones_like(mean_entropy)
        dropped = mean_entropy > threshold
        if self.entropy_filter == "negatives":
            dropped = dropped & ((advantages if advantages.ndim == 1 else advantages.sum(1)) < 0)
        return (~dropped).to(mean_entropy.dtype)


class Conflicts(NamedTuple):
    """Conflict masks of GTPO, [N, T] bool each."""

    forward: Tensor
    """Conflicts at positions that are counted from the first token."""
    backward: Tensor
    """Conflicts at positions that are counted from the last token."""

    @property
    def either(self) -> Tensor:
        """Tokens of one mask or of both, [N, T] bool."""
        return self.forward | self.backward

    def weights(self, advantages: Tensor, overlap: str) -> Tensor:
        """Return lambda, [N, T]: 1 outside the masks, inside 2 for A > 0 and 0 for A < 0.

        Where the masks overlap ``product`` multiplies both factors, so that A > 0 has 4 there.
        """
        inside = torch.where(advantages[:, None] > 0, 2.0, 0.0).to(advantages.dtype)
        one = torch.ones((), dtype=advantages.dtype, device=advantages.device)
        if overlap == "product":
            return torch.where(self.forward, inside, one) * torch.where(self.backward, inside, one)
        return torch.where(self.either, inside, one)


def _border_run(token_ids: Tensor, mask: Tensor, positive: Tensor, negative: Tensor, groups: Groups) -> Tensor:
    """Find the run of conflicts that starts at column 0 of each completion, [N, T] bool.

    A token conflicts if its group has the same id in the same column in a completion of each sign.
    """
    width = mask.shape[1]
    if not mask.any():
        return torch.zeros_like(mask)
    # One number for each (group, column, id); counted once over all positives and once over all negatives.
    ids = torch.where(mask, token_ids, torch.zeros_like(token_ids))
    low, span = int(ids.min()), int(ids.max()) - int(ids.min()) + 1
    column = torch.arange(width, device=mask.device)[None, :]
    code = (groups.index[:, None] * width + column) * span + (ids - low)
    _, code = torch.unique(code, return_inverse=True)
    buckets = int(code.max()) + 1

    def present(rows: Tensor) -> Tensor:
        chosen = (mask & rows[:, None]).flatten().to(torch.int64)
        return code.new_zeros(buckets).index_add_(0, code.flatten(), chosen)[code] > 0

    conflict = present(positive) & present(negative) & mask & (positive | negative)[:, None]
    return conflict.to(torch.int64).cumprod(1).bool()


def conflict_masks(token_ids: Tensor, lengths: Tensor, mask: Tensor, advantages: Tensor, groups: Groups) -> Conflicts:
    """Forward and backward conflict masks. GTPO, 2508.03772 Eq. 8.

    A token conflicts at a position if some completion of its group with A > 0 and some with A < 0 hold the same id
    there; positions are counted from the first token (forward) or from the last (backward). The mask is the run of
    conflicts that begins at that border. Completions with A = 0 have none.

    Args:
        token_ids: [N, T] int64. advantages: [N]. lengths: [N]. mask: [N, T] bool.
    """
    positive, negative = advantages > 0, advantages < 0
    forward = _border_run(token_ids, mask, positive, negative, groups)
    column = torch.arange(mask.shape[1], device=mask.device)[None, :]
    # The j-th token from the end; applied twice it gives the first order back.
    mirror = (lengths[:, None] - 1 - column).clamp_min(0)
    backward = _border_run(token_ids.gather(1, mirror), mask, positive, negative, groups).gather(1, mirror) & mask
    return Conflicts(forward, backward)


def _ordered_bits(value: float) -> int:
    """Return an integer of 64 bits for a float64, such that integers compare as the floats do."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFFFFFFFFFF)


def _float_of(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits if bits >= 0 else (-bits) | -0x8000000000000000))[0]
    return value


def quantile(values: Tensor, q: float, reduce: Reduce | None = None) -> float:
    """Return the q-quantile (linear interpolation) of the values of all ranks together; NaN if there are none.

    Args:
        values: this rank's values, [n].
        q: share of the values below the quantile.
        reduce: sum over ranks; None for one process.
    """
    # A sum over ranks is the only collective here. With it an order statistic is found exactly by bisection over the
    # bits of a float64, in 65 sums of one number.
    values = values.double()
    count = int(over_ranks(torch.tensor(float(len(values)), dtype=torch.float64, device=values.device), reduce))
    if count == 0:
        return float("nan")
    position = q * (count - 1)
    lower = int(position)
    if reduce is None:
        ordered = values.sort().values
        first, second = float(ordered[lower]), float(ordered[min(lower + 1, count - 1)])
    else:
        first = _order_statistic(values, lower, reduce)
        second = _order_statistic(values, min(lower + 1, count - 1), reduce)
    return first + (second - first) * (position - lower)


def _order_statistic(values: Tensor, rank: int, reduce: Reduce) -> float:
    """Return the value that has ``rank`` smaller or equal ones before it, over all ranks."""
    low, high = _ordered_bits(float("-inf")), _ordered_bits(float("inf"))
    for _ in range(65):
        middle = low if low >= high else (low + high) // 2
        below = int(reduce((values <= _float_of(middle)).sum().to(torch.float64)))
        if below >= rank + 1:
            high = middle
        else:
            low = middle + 1
    return _float_of(high)


def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float, reduce: Reduce | None = None) -> Tensor:
    """Choose tokens with entropy at or above the (1 - share) quantile of all ranks' masked tokens, [N, T] bool."""
    limit = quantile(entropy[mask], 1 - share, reduce)
    return mask & (masked(entropy.double(), mask, float("-inf")) >= limit)


def reweighting(old_logprobs: Tensor, alpha: float) -> Tensor:
    """Return the factor alpha pi_old + 1 - alpha of each token, [n, T]."""
    return alpha * old_logprobs.exp() + (1 - alpha)


def lopti_mask(old_logprobs: Tensor, eta: float, pass_index: int) -> Tensor:
    """Choose the tokens of a pass, [N, T] bool: those with pi_old < eta in the first, the others in the second."""
    low = old_logprobs.exp() < eta
    return low if pass_index == 0 else ~low


def mean_entropy(entropy: Tensor, mask: Tensor) -> Tensor:
    """Return <H>_i, the mean entropy over the tokens of each completion, [N]; 0 for an empty one."""
    return token_mean(entropy, mask)
