"""Checks of a rollout of the untouched model: whether there is anything to learn, and whether its numbers are right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import comb, isfinite

import torch

from lit_grpo.commands.check.result import Result, Status, percent
from lit_grpo.learner.sync_check import SyncResult
from lit_grpo.objectives import diagnostics
from lit_grpo.objectives.pass_at_k import pass_at_k
from lit_grpo.objectives.tensors import token_mean
from lit_grpo.rewards import Reward, primary_reward
from lit_grpo.types import Experience, Rollout

LN2 = math.log(2)
SURE, HOPELESS = 0.95, 0.02
"""pass@1 above and below which most groups have no gradient at the usual group sizes."""
FEW_MIXED = 0.5
"""Share of groups with unequal rewards below which most of the sampling teaches nothing."""
MANY_TRUNCATED = 0.1
"""Share of completions cut by the length limit above which the preflight warns."""
SOME_GAP = 0.02
"""Mean difference of log-probabilities, in nats, that is worth a look; bfloat16 against float32 gives about 0.01."""
LITTLE_ENTROPY = 0.1
"""Mean entropy of the untouched model, in nats, below which little is left to explore."""


def signal(rollout: Rollout, rewards: Sequence[Reward]) -> Result:
    """Check base pass rate and pass@k: can the model do it at all, and is there anything left to learn?"""
    size, reward = rollout.group_size, primary_reward(rewards)
    if rollout.correct is None or reward is None:
        found = "no reward says which completions are right, so there is no pass rate"
        remedy = "fine if nothing can be right or wrong; else set correct_threshold of the reward that knows"
        return Result("signal", "warn", found, remedy, {})
    judged = torch.ones_like(rollout.correct) if rollout.judged is None else rollout.judged
    # Of samples without a verdict nothing is known, and a prompt with fewer than k others says nothing of k.
    numbers = judged.view(-1, size).sum(1).tolist()
    pairs = list(zip(numbers, (rollout.correct & judged).view(-1, size).sum(1).tolist(), strict=True))
    hits = [c for n, c in pairs if n]
    if not hits:
        remedy = "is a return missing in it? None leaves a completion out, and nothing is left to learn from"
        return Result("signal", "fail", f"{reward.name} gave None for every completion", remedy, {})
    size = max(numbers)
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < size] + [size]
    chances = {k: [pass_at_k(n, c, k) for n, c in pairs if n >= k] for k in ks}
    rates = {k: sum(of_prompts) / len(of_prompts) for k, of_prompts in chances.items()}
    found = f"{reward.name} on {len(hits)} prompts: " + ", ".join(f"pass@{k} {percent(rates[k])}" for k in ks)
    status: Status = "pass"
    remedy = ""
    if not rates[size]:
        status = "fail"
        remedy = (
            "nothing is right, so nothing is reinforced: easier prompts, another template, a longer limit, "
            "a supervised start, or a larger model"
        )
    elif rates[1] < HOPELESS:
        status, remedy = "warn", "few are right: easier prompts or a larger group_size; try --prompts 200 to be sure"
    elif rates[1] > SURE:
        status, remedy = "warn", "nearly all are right: take harder prompts, or leave out those that are solved"
    return Result("signal", status, found, remedy, {f"pass@{k}": rate for k, rate in rates.items()})


def spread(rollout: Rollout, prompts_per_rollout: int) -> Result:
    """Check the share of groups whose rewards are not all equal: only they have a gradient."""
    size = rollout.group_size
    # What no reward scored has no part in the spread of its group.
    groups = [[value for value in group if not math.isnan(value)] for group in rollout.reward.view(-1, size).tolist()]
    mixed = sum(len(set(group)) > 1 for group in groups)
    # Of a few groups the share is uncertain, and near 0 and 1 only the score interval stays within them.
    share, (low, high) = mixed / len(groups), wilson(mixed, len(groups))
    # The share at half the group size, exactly: draws without replacement from the sampled group, all of one value.
    half = max(1, size // 2)
    at_half = sum(_mixed_at(half, group) for group in groups) / len(groups)
    found = (
        f"{percent(share)} of groups have unequal rewards at G = {size} ({percent(low)} to {percent(high)}): about "
        f"{share * prompts_per_rollout:.1f} of {prompts_per_rollout} a rollout; at G = {half} {percent(at_half)}"
    )
    values = {"share": share, "low": low, "high": high, "share_at_half": at_half}
    if not mixed:
        remedy = "no group has a gradient: see signal; if some are right, raise data.group_size"
        return Result("spread", "fail", found, remedy, values)
    if share < FEW_MIXED:
        remedy = (
            "most of the sampling teaches nothing: raise data.group_size, filter prompts by pass rate, or recipe dapo"
        )
        return Result("spread", "warn", found, remedy, values)
    return Result("spread", "pass", found, values=values)


def _mixed_at(k: int, rewards: Sequence[float]) -> float:
    """Return the chance that k of the rewards are not all equal; of fewer than k, that of all of them."""
    k = min(k, len(rewards))
    return 1 - sum(comb(n, k) for n in Counter(rewards).values()) / comb(len(rewards), k) if k else 0.0


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the score interval of a share, at 95 % for the default ``z``. Wilson (1927)."""
    p, shrinkage = hits / count, z * z / count
    middle = (p + shrinkage / 2) / (1 + shrinkage)
    half = z / (1 + shrinkage) * math.sqrt(p * (1 - p) / count + shrinkage / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def initial_entropy(experience: Experience, vocabulary: int) -> Result:
    """Measure H_ini and state the rule of GTPO, arXiv 2508.03772, Eq. 10: below ln 2 the model is sensitive."""
    assert experience.entropy is not None
    nonempty = experience.lengths > 0
    by_completion = token_mean(experience.entropy, experience.mask)[nonempty].double()
    mean, above = float(by_completion.mean()), float((by_completion > LN2).double().mean())
    uniform = math.log(vocabulary)
    values = {"initial_entropy": mean, "share_above_ln2": above, "rule": "filter" if mean < LN2 else "no filter"}
    if mean < LN2:
        rule = f"below ln 2: sensitive, filter completions above ln 2 ({percent(above)} now); alarm at ln 2"
    else:
        rule = f"above ln 2: no filter; alarm at twice this ({2 * mean:.2f})"
    found = f"H_ini {mean:.3f} nats, {rule}"
    if mean < LITTLE_ENTROPY:
        return Result("entropy", "warn", found, "little is left to explore: raise the temperature, or start from an "
                      "earlier checkpoint", values)  # fmt: skip
    if mean > uniform / 2:
        found = f"H_ini {mean:.2f} of at most {uniform:.2f} nats: nearly uniform"
        return Result("entropy", "warn", found, "fine for a model from scratch; else look at template, dtype and the "
                      "model's folder", values)  # fmt: skip
    return Result("entropy", "pass", found, values=values)


def truncation(rollout: Rollout, limit: int, bound: float | None) -> Result:
    """Check the share of completions that the length limit cut."""
    lengths = sorted(len(c.token_ids) for c in rollout.completions)
    share = sum(c.truncated for c in rollout.completions) / len(lengths)
    found = f"{percent(share)} cut at {limit} tokens; median length {lengths[len(lengths) // 2]}"
    values = {"truncated": share, "median_length": lengths[len(lengths) // 2]}
    remedy = "raise data.sampling.max_new_tokens, ask for short answers, or check the chat template and the end token"
    if bound is not None and share > bound:
        return Result("truncation", "fail", found, remedy, values)
    if share > MANY_TRUNCATED:
        return Result("truncation", "warn", found, remedy, values)
    return Result("truncation", "pass", found, values=values)


def rewards(rollout: Rollout, given: Sequence[Reward]) -> Result:
    """Check for rewards that time out, fail or find no answer."""
    means = {r.name: float(rollout.rewards[r.name].mean()) for r in given}
    found = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items())
    values: dict[str, float] = dict(means)
    for group, verb in (("failed_frac", "failed"), ("timeout_frac", "ran into its time limit")):
        for r in given:
            failed, scored = rollout.sums.get(f"reward_errors/{group}/{r.name}", (0.0, 1.0))
            if failed:
                share = failed / scored
                values[f"reward_errors/{group}/{r.name}"] = share
                return Result("rewards", "warn" if share < 0.05 else "fail", f"{r.name} {verb} on {percent(share)}",
                              "look at such a completion; raise the reward's limit or mend it", values)  # fmt: skip
    if rollout.no_answer is not None:
        unanswered = float(rollout.no_answer.double().mean())
        values["no_answer"] = unanswered
        found += f"; no answer found in {percent(unanswered)}"
        if unanswered > 0.5:
            return Result("rewards", "warn", found, "say in the prompt how the answer is to be written", values)
    return Result("rewards", "pass", f"mean {found}", values=values)


def sync(found: SyncResult) -> Result:
    """Say what the check of the engine's first sync found; one that fails has ended the preflight."""
    text = (
        f"with other weights, which move log-probabilities by {found.change:.2g} nats, the engine's differ from the "
        f"learner's by {found.changed_gap:.2g}"
    )
    return Result("sync", "pass", text, values=asdict(found))


def mismatch(experience: Experience, bound: float | None) -> Result:
    """Compare the engine's log-probabilities of its own tokens with the learner's, under the same weights."""
    old, sampled, mask = experience.old_logprobs, experience.sampler_logprobs, experience.mask
    assert old is not None
    assert sampled is not None
    sums, peaks = diagnostics.sampler_mismatch(old, sampled, mask)
    means = {key: float(total / weight) if weight else math.nan for key, (total, weight) in sums.items()}
    gap, impossible = means["sampler_mismatch/logprob_abs_diff"], means["sampler_mismatch/impossible_frac"]
    values = {**means, **{key: float(v) for key, v in peaks.items()}}
    largest = values["sampler_mismatch/logprob_abs_diff_max"]
    values = {key.removeprefix("sampler_mismatch/"): value for key, value in values.items() if isfinite(value)}
    # The log-probability of every single token is missing.
    if means["sampler_mismatch/missing_frac"] == 1:
        # A run with the guard would end in its first rollout.
        return Result("mismatch", "warn" if bound is None else "fail", "the engine gives no log-probabilities",
                      "have it return them: without them no sampler correction and no guard", values)  # fmt: skip
    found = f"log-probabilities differ by {gap:.2g} nats on average, {largest:.2g} at most"
    remedy = "check dtype, temperature and template on both sides; then sampler_correction: tis_token"
    # Written so that a gap of NaN fails too.
    if not gap <= (math.inf if bound is None else bound) or impossible:
        if impossible:
            found += f"; {impossible:.2%} of tokens are impossible for the learner"
        return Result("mismatch", "fail", found, remedy, values)
    if gap > SOME_GAP:
        return Result("mismatch", "warn", found, remedy, values)
    return Result("mismatch", "pass", found, values=values)
