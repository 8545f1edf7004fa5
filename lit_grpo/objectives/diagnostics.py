"""Diagnostics as pure functions, and the metrics that every loss returns.

Means are :class:`lit_grpo.types.Sum` s over generated tokens (or completions), so that they add over micro-batches and
ranks. :func:`derive` turns the reduced means into the numbers that are no means.

Keys, each with what it measures; a line that is indented goes on with the one above it:

policy/ratio_mean: mean of pi / pi_old over the updates of the rollout; 1 in the first. This key and the next five
    compare each update's policy, before its step, with the policy before the first one: tokens of the rollout, mean
    over its updates. They are absent where nothing was compared: with a single update and no earlier pass
policy/ratio_gap: mean of |ratio - 1|
policy/clip_frac/low: share of tokens with A < 0 whose ratio is below the bound; tokens in the loss
policy/clip_frac/high: share of tokens with A > 0 whose ratio is above the bound
policy/clip_frac/dual: share of tokens stopped by the dual clip
policy/clipped_old_prob: mean pi_old of the clipped tokens
policy/approx_kl_k1, policy/approx_kl_k3: KL(pi_old || pi): mean of -d, of rho - 1 - log rho
policy/kl_ref_k1, policy/kl_ref_k3: KL(pi || pi_ref) on the sampled tokens
policy/delta_prob: mean of pi - pi_old, and ``policy/delta_prob_abs`` of its size. The landscape study (App. D)
    writes the difference from the old policy to the current one the other way round: its sign is minus this one
policy/advantage_abs: mean |A| over tokens in the loss; ``policy/advantage_abs_max`` the largest
policy/entropy: mean over generated tokens of the next-token entropy at temperature 1, before the first update
policy/entropy_sequence: mean over completions with a token of <H>_i, their mean entropy, before the first update
policy/entropy_high_frac: share of those whose <H>_i is above ``entropy_threshold`` (ln 2 unless it is set)
policy/entropy_threshold: that threshold, where GTPO's entropy filter is on and its gate is open
policy/conflict_frac: share of tokens in GTPO's conflict masks
loss/<term>: share of the term in the loss: policy, kl_ref, kl_old, entropy, nll, value
completions/filtered_frac: share of completions that a filter took out of the loss
completions/entropy_filtered_frac: share of completions that GTPO's entropy filter took out of it (delta_i = 0)
groups/zero_advantage_frac: share of groups without any advantage in the loss, after label noise, shaping, GTPO's
    entropy terms, token weights and filters: nothing but regularizers trains on them
groups/prefix_pushed_down_frac: share of groups that share a beginning (first 16 tokens) and push it down: the weights
    that the loss gives to the log-probabilities of its tokens sum to less than 0. GTPO, 2508.03772 Eq. 6
critic/value_correct: mean value on tokens of correct completions; ``critic/value_incorrect`` of the others
critic/value_outside_frac: share of values outside the rewards' range by more than a twentieth of it; also
    ``critic/value_outside_correct_frac`` and ``critic/value_outside_incorrect_frac``
critic/return: mean target of the critic; ``critic/error`` mean of target - V; ``critic/return_sq``,
    ``critic/error_sq`` of the squares
critic/explained_variance: derived: 1 - Var(return - V) / Var(return), V before the update
critic/*_after: derived or mean: the same after the update, every ``critic.measure_every`` rollouts
sampler_mismatch/prob_abs_diff: mean |pi_old - pi_sampler|; ``sampler_mismatch/prob_abs_diff_max`` the largest
sampler_mismatch/logprob_abs_diff: mean |log pi_old - log pi_sampler|; ``sampler_mismatch/logprob_abs_diff_max`` the
    largest
sampler_mismatch/kl_k1, sampler_mismatch/kl_k3: KL(pi_sampler || pi_old): mean of -log c, of c - 1 - log c
sampler_mismatch/weight: mean c; ``sampler_mismatch/weight_sq`` mean c^2, ``sampler_mismatch/sequence_weight_sq`` mean
    C^2
sampler_mismatch/capped_frac: share of tokens whose weight the sampler correction changed; where there is one, like the
    next two
sampler_mismatch/applied: mean of the weight w after correction; ``sampler_mismatch/applied_sq`` mean w^2
sampler_mismatch/missing_frac: share of tokens without a sampler log-probability
sampler_mismatch/impossible_frac: share of tokens with pi_sampler > 0.5 and pi_old < 1e-4: wrong template, stale weights
sampler_mismatch/*_perplexity: learner and sampler: mean over completions of exp(-mean log-probability)
sampler_mismatch/ess: derived: (mean c)^2/mean c^2; ``sampler_mismatch/chi2_token``,
    ``sampler_mismatch/chi2_sequence``: mean c^2 - 1
sampler_mismatch/applied_ess: derived: (mean w)^2/mean w^2, the ESS after correction
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_grpo.objectives.plan import StepPlan
from lit_grpo.objectives.regularizers import kl_to_reference
from lit_grpo.objectives.sampler_correction import SamplerWeights, sampler_log_ratio
from lit_grpo.objectives.tensors import exp_clamped, masked, token_mean
from lit_grpo.objectives.token_weights import LN2
from lit_grpo.objectives.trust_regions import SurrogateOutput
from lit_grpo.types import Sum

OUTSIDE = 0.05
"""Share of the rewards' range by which a value must leave it to count as outside."""


def mean_of(value: Tensor, mask: Tensor) -> Sum:
    """Return sum and count of ``value`` over the tokens or completions of ``mask``, in float64."""
    return Sum(masked(value, mask).double().sum(), mask.sum().double())


def largest(value: Tensor, mask: Tensor) -> Tensor:
    """Return the largest ``value`` over the tokens of ``mask``, float64; -inf, which no metric shows, over none."""
    floor = value.new_full((1,), float("-inf"))
    # The floor goes first: the maximum over no element at all is an error.
    return torch.cat([floor, masked(value, mask, float("-inf")).flatten()]).max().double()


def clip_fractions(surrogate: SurrogateOutput, mask: Tensor) -> dict[str, Sum]:
    """Return ``policy/clip_frac/*``: shares of the tokens of ``mask`` [n, T] that are stopped at either bound."""
    sides = {"low": surrogate.low, "high": surrogate.high, "dual": surrogate.dual}
    return {f"policy/clip_frac/{k}": mean_of((v & mask).double(), mask) for k, v in sides.items()}


def policy_change(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, Sum]:
    """Measure how far the policy is from the one before the first update; arguments [n, T] each."""
    new, old = masked(logprobs, mask), masked(old_logprobs, mask)
    d = new - old
    ratio = exp_clamped(d)
    change = new.exp() - old.exp()
    return {
        "policy/ratio_mean": mean_of(ratio, mask),
        "policy/ratio_gap": mean_of((ratio - 1).abs(), mask),
        "policy/approx_kl_k1": mean_of(-d, mask),
        "policy/approx_kl_k3": mean_of(ratio - 1 - d, mask),
        "policy/delta_prob": mean_of(change, mask),
        "policy/delta_prob_abs": mean_of(change.abs(), mask),
    }


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, Sum]:
    """Estimate KL(pi || pi_ref) by k1 and by k3; arguments [n, T] each."""
    return {f"policy/kl_ref_{k}": mean_of(kl_to_reference(k, logprobs, ref_logprobs, mask), mask) for k in ("k1", "k3")}


def sampler_mismatch(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> tuple[dict[str, Sum], dict[str, Tensor]]:
    """Compare learner and engine on the generated tokens before any update, and return means and maxima.

    Arguments are [n, T] each.
    """
    log_c, missing = sampler_log_ratio(old_logprobs, sampler_logprobs, mask)
    known = mask & ~missing
    old, sampled = masked(old_logprobs, known), masked(sampler_logprobs, known)
    c, gap, log_gap = log_c.exp(), (old.exp() - sampled.exp()).abs(), (old - sampled).abs()
    rows = mask.any(1)
    sequence = exp_clamped(log_c.sum(1))
    sums = {
        "sampler_mismatch/prob_abs_diff": mean_of(gap, known),
        "sampler_mismatch/logprob_abs_diff": mean_of(log_gap, known),
        "sampler_mismatch/kl_k1": mean_of(-log_c, known),
        "sampler_mismatch/kl_k3": mean_of(c - 1 - log_c, known),
        "sampler_mismatch/weight": mean_of(c, known),
        "sampler_mismatch/weight_sq": mean_of(c * c, known),
        "sampler_mismatch/sequence_weight_sq": mean_of(sequence * sequence, rows),
        "sampler_mismatch/missing_frac": mean_of(missing.double(), mask),
        "sampler_mismatch/impossible_frac": mean_of(((sampled.exp() > 0.5) & (old.exp() < 1e-4)).double(), known),
        "sampler_mismatch/learner_perplexity": mean_of((-token_mean(old, known)).exp(), known.any(1)),
        "sampler_mismatch/sampler_perplexity": mean_of((-token_mean(sampled, known)).exp(), known.any(1)),
    }
    maxima = {
        "sampler_mismatch/prob_abs_diff_max": largest(gap, known),
        "sampler_mismatch/logprob_abs_diff_max": largest(log_gap, known),
    }
    return sums, maxima


def entropies(
    entropy: Tensor, mask: Tensor, threshold: float = LN2, multiplicity: Tensor | None = None
) -> dict[str, Sum]:
    """Return the means of the entropy over tokens and over completions, and the share of completions above a threshold.

    Args:
        entropy: of each token in nats, [n, T].
        mask: generated tokens, [n, T] bool.
        threshold: bound on <H>_i, the mean entropy of a completion, in nats.
        multiplicity: how many completions each of them stands for, [n]; None: itself alone.
    """
    one = torch.ones(len(entropy), dtype=torch.float64, device=entropy.device)
    count = one if multiplicity is None else multiplicity.to(one)
    per_sequence = token_mean(entropy.double(), mask)
    rows = count * mask.any(1)
    return {
        "policy/entropy": Sum((masked(entropy.double(), mask).sum(1) * count).sum(), (mask.sum(1) * count).sum()),
        "policy/entropy_sequence": Sum((per_sequence * rows).sum(), rows.sum()),
        "policy/entropy_high_frac": Sum(((per_sequence > threshold) * rows).sum(), rows.sum()),
    }


def groups_without_advantage(plan: StepPlan, group_ids: Tensor) -> Sum:
    """Count groups of a step none of whose tokens has an advantage in the loss, and groups.

    Args:
        plan: the step's plan, all completions of its groups.
        group_ids: number of each completion's group, [N].
    """
    live = ((plan.advantages * plan.token_weights != 0) & plan.tokens & plan.kept[:, None]).any(1)
    groups = torch.unique(group_ids)
    silent = len(groups) - len(torch.unique(group_ids[live]))
    return Sum(*(torch.tensor(float(count), dtype=torch.float64) for count in (silent, len(groups))))


def rows_by_verdict(correct: Tensor | None, mask: Tensor) -> dict[str, Tensor]:
    """Return the tokens of ``mask`` [n, T] of correct and of incorrect completions; {} where that is not known."""
    if correct is None:
        return {}
    return {"correct": mask & correct[:, None], "incorrect": mask & ~correct[:, None]}


def value_signs(
    values: Tensor, returns: Tensor, correct: Tensor | None, mask: Tensor, bounds: tuple[float, float]
) -> dict[str, Sum]:
    """Return mean values of correct and incorrect completions, and the parts of the explained variance.

    Args:
        values: the critic's values before the update, [n, T].
        returns: targets of the critic, [n, T].
        correct: correct completions, [n] bool; None: the keys that ask for them are left out.
        mask: generated tokens, [n, T] bool.
        bounds: least and greatest reward.
    """
    v, target = masked(values, mask), masked(returns, mask)
    low, high = bounds
    margin = OUTSIDE * (high - low)
    outside = ((v < low - margin) | (v > high + margin)).double()
    sums: dict[str, Sum] = {}
    for name, tokens in rows_by_verdict(correct, mask).items():
        sums[f"critic/value_{name}"] = mean_of(v, tokens)
        sums[f"critic/value_outside_{name}_frac"] = mean_of(outside, tokens)
    return sums | {
        "critic/value_outside_frac": mean_of(outside, mask),
        "critic/return": mean_of(target, mask),
        "critic/return_sq": mean_of(target * target, mask),
        "critic/error": mean_of(target - v, mask),
        "critic/error_sq": mean_of((target - v) ** 2, mask),
    }


def derive(means: Mapping[str, float]) -> dict[str, float]:
    """Compute from reduced means what is no mean itself: ESS, chi^2, explained variance."""
    out: dict[str, float] = {}
    if "sampler_mismatch/weight_sq" in means:
        out["sampler_mismatch/chi2_token"] = means["sampler_mismatch/weight_sq"] - 1
        out["sampler_mismatch/chi2_sequence"] = means["sampler_mismatch/sequence_weight_sq"] - 1
        out["sampler_mismatch/ess"] = means["sampler_mismatch/weight"] ** 2 / means["sampler_mismatch/weight_sq"]
    if means.get("sampler_mismatch/applied_sq", 0.0) > 0:
        out["sampler_mismatch/applied_ess"] = (
            means["sampler_mismatch/applied"] ** 2 / means["sampler_mismatch/applied_sq"]
        )
    if "critic/return_sq" in means:
        total = means["critic/return_sq"] - means["critic/return"] ** 2
        for when in ("", "_after"):
            if total > 0 and f"critic/error_sq{when}" in means:
                error = means[f"critic/error_sq{when}"] - means[f"critic/error{when}"] ** 2
                out[f"critic/explained_variance{when}"] = 1 - error / total
    return out


def step_metrics(
    plan: StepPlan,
    current: Tensor,
    old: Tensor,
    surrogate: SurrogateOutput,
    sampler: SamplerWeights | None,
    *,
    corrects: bool,
    tokens: Tensor,
) -> tuple[dict[str, Sum], dict[str, Tensor]]:
    """Return the sums and maxima that a loss reports of one micro-batch, by the keys of this module's table."""
    # What the policy and the sampler say is measured on all generated tokens, also on those that a filter dropped.
    in_loss = tokens & plan.kept[:, None] & plan.pass_mask
    stopped = (surrogate.low | surrogate.high | surrogate.dual) & in_loss
    size = masked(plan.advantages, in_loss).abs()
    sums = clip_fractions(surrogate, in_loss)
    # Without log-probabilities of the old policy `old` is the current one: a comparison would show 0 as if measured.
    if plan.old_logprobs is not None:
        sums |= policy_change(current, old, tokens)
    sums["policy/clipped_old_prob"] = mean_of(old.exp(), stopped)
    sums["policy/advantage_abs"] = mean_of(size, in_loss)
    maxima = {"policy/advantage_abs_max": largest(size, in_loss)}
    if plan.ref_logprobs is not None:
        sums |= reference_kl(current, plan.ref_logprobs.to(current.dtype), tokens)
    if plan.sampler_logprobs is not None and sampler is not None:
        mismatch, peaks = sampler_mismatch(old, plan.sampler_logprobs.to(old.dtype), tokens)
        sums, maxima = sums | mismatch, maxima | peaks
        # Without a correction there are no weights that it made.
        if corrects:
            sums["sampler_mismatch/capped_frac"] = mean_of(sampler.capped.double(), tokens)
            applied = sampler.weights.double()
            sums["sampler_mismatch/applied"] = mean_of(applied, tokens)
            sums["sampler_mismatch/applied_sq"] = mean_of(applied * applied, tokens)
    if plan.conflicts is not None:
        sums["policy/conflict_frac"] = mean_of(plan.conflicts.double(), tokens)
    if plan.values is not None and plan.returns is not None:
        sums |= value_signs(plan.values, plan.returns, plan.correct, tokens, plan.value_range)
    return sums, maxima
