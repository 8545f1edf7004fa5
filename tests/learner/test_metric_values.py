"""Every logged number of a rollout, counted by hand or by plain loops: one update, several, minibatches, two ranks.

Lengths, rewards and groups are written down as they are counted. What depends on the model is computed one token after
the other from its plain forward pass, with the weights as they were before each optimizer step.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.learner.optimizer_step import OptimizerStepper
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig
from lit_grpo.types import Completion, Prompt, Rollout
from tests import tiny
from tests.learner.helpers import Given, Watch
from tests.ranks import enter, on_two_ranks

NAN = float("nan")
PROMPTS = [(1, 2), (3, 4, 5)]
IDS = [[1, 2, 3], [1, 4], [], [1, 2, 3], [7] * 9, [7, 8, 9, 7], [7, 8, 9, 7], [5]]
LENGTHS = [3, 2, 0, 3, 9, 4, 4, 1]
TRUNCATED = [False, True, False, False, True, False, False, False]
MATH = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
FORM = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
REWARD = [1.1, 0.1, 0.0, 1.1, 0.1, 0.1, 0.1, 0.1]
NO_ANSWER = [False, True, True, False, True, False, False, False]
# What the engine says of each token, as a distance from what the learner says; NaN: it does not say.
OFFSETS = [[0.1, -0.2, 0.0], [0.3, NAN], [], [0.0, 0.05, -0.1], [0.02] * 9, [-0.4, 0.0, 0.1, 0.2], [0.0] * 4, [NAN]]

COUNTED = {
    "reward": 2.7 / 8,
    "reward/std": statistics.pstdev(REWARD),
    "reward/math": 2 / 8,
    "reward/format": 7 / 8,
    "completions/length": 26 / 8,
    "completions/length_max": 9,
    "completions/tokens": 26,
    "completions/correct_length": 3,
    "completions/incorrect_length": (2 + 0 + 9 + 4 + 4 + 1) / 6,
    "completions/truncated_frac": 2 / 8,
    "completions/correct_truncated_frac": 0,
    "completions/incorrect_truncated_frac": 2 / 6,
    "completions/empty_frac": 1 / 8,
    "completions/no_answer_frac": 3 / 8,
    "completions/filtered_frac": 0,
    # Of the one completion of at least 8 tokens: six 4-grams, of which five were there before.
    "completions/repetition_frac": 5 / 6,
    "completions/longest_run_frac": 1,
    "completions/top_token_frac": 1,
    "groups/count": 2,
    # All four of the second group are wrong and get the same reward.
    "groups/zero_std_frac": 1 / 2,
    "groups/zero_advantage_frac": 1 / 2,
    "groups/all_correct_frac": 0,
    "groups/all_wrong_frac": 1 / 2,
    "groups/distinct_frac": (3 + 3) / 8,
    "groups/equal_pairs": 2,
    # Token 1 begins two right answers and a wrong one: three conflict tokens of 26. The second group has no sign.
    "policy/conflict_frac": 3 / 26,
}
CLIP = {"clip_low": 0.002, "clip_high": 0.001}
WAYS: dict[str, dict[str, Any]] = {
    "one update": {},
    "several updates": {"updates_per_rollout": 3},
    "minibatches": {"updates_per_rollout": 2, "minibatch_prompts": 1},
    "minibatches, twice": {"updates_per_rollout": 4, "minibatch_prompts": 1},
    "several updates without importance sampling": {"updates_per_rollout": 3, "ratio": "self"},
    "several updates with correction": {"updates_per_rollout": 3, "sampler_correction": "tis_token"},
}


def start() -> Any:
    """A module whose weights are those that every run of this file begins with."""
    module = tiny.module()
    module.configure_model()
    return module


def of_tokens(module: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probability and entropy of each token, from the model's own forward pass over one completion at a time."""
    logprobs, entropies = [], []
    for i, ids in enumerate(IDS):
        prompt = PROMPTS[i // 4]
        with torch.no_grad():
            logits = module.policy.model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0].double()
        rows = logits[len(prompt) - 1 : len(prompt) - 1 + len(ids)].log_softmax(1)
        logprobs.append([float(row[token]) for row, token in zip(rows, ids, strict=True)])
        entropies.append([float(-(row.exp() * row).sum()) for row in rows])
    return logprobs, entropies


def rollout() -> Rollout:
    base, _ = of_tokens(start())
    sampled = [tuple(lp - offset for lp, offset in zip(*pair, strict=True)) for pair in zip(base, OFFSETS, strict=True)]
    return Rollout(
        index=0,
        prompts=[Prompt(f"p{g}", "", ids, "0") for g, ids in enumerate(PROMPTS)],
        completions=[
            Completion(i // 4, i % 4, tuple(ids), sampled[i], "length" if TRUNCATED[i] else "stop", 0)
            for i, ids in enumerate(IDS)
        ],
        texts=[""] * 8,
        rewards={"math": torch.tensor(MATH), "format": torch.tensor(FORM)},
        reward=torch.tensor(REWARD),
        correct=torch.tensor(MATH) > 0,
        group_size=4,
        no_answer=torch.tensor(NO_ANSWER),
    )


def group_of_rank(whole: Rollout, rank: int) -> Rollout:
    rows = slice(4 * rank, 4 * rank + 4)
    assert whole.no_answer is not None
    assert whole.correct is not None
    return replace(
        whole,
        prompts=[whole.prompts[rank]],
        completions=[replace(c, request=0) for c in whole.completions[rows]],
        texts=whole.texts[rows],
        rewards={name: values[rows] for name, values in whole.rewards.items()},
        reward=whole.reward[rows],
        correct=whole.correct[rows],
        no_answer=whole.no_answer[rows],
    )


class Steps:
    """The rows of each optimizer step, and what the model says of all tokens before it."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rows: list[list[int]] = []
        self.logprobs: list[list[list[float]]] = []
        self.entropies: list[list[list[float]]] = []

    def see(self, rows: torch.Tensor) -> None:
        logprobs, entropies = of_tokens(self.module)
        self.rows.append(rows.tolist())
        self.logprobs.append(logprobs)
        self.entropies.append(entropies)


def train(batch: Rollout, way: str, *, see: bool = True, **trainer: Any) -> tuple[dict[str, float], Steps]:
    settings = dict(WAYS[way])
    objective: dict[str, Any] = {k: settings.pop(k) for k in ("ratio", "sampler_correction") if k in settings}
    if "ratio" not in objective:
        objective |= CLIP
    else:
        objective["trust_region"] = "none"
    module = tiny.module(
        objective=ObjectiveConfig(recipe="grpo", **objective),
        optimizer=OptimizerConfig(lr=3e-3),
        # The offsets of single completions are wider than a run allows, and a minibatch of two may hold the widest.
        guards=GuardConfig(max_engine_gap=1.0),
        **settings,
    )
    module.connect(tiny.context(1, max_new_tokens=9))
    watch, steps = Watch(), Steps(module)
    patch = pytest.MonkeyPatch()
    if see:
        step = OptimizerStepper.step

        def watched(self: Any, rollout: Any, one: Any, *rest: Any) -> None:
            steps.see(one.rows)
            step(self, rollout, one, *rest)

        patch.setattr(OptimizerStepper, "step", watched)
    try:
        tiny.trainer(callbacks=[watch], **trainer).fit(module, Given(batch))
    finally:
        patch.undo()
    if see:
        # What the model says after the last step.
        logprobs, _ = of_tokens(module)
        steps.logprobs.append(logprobs)
    return watch.metrics[0], steps


def advantages() -> list[float]:
    """GRPO: the distance from the group's mean over its sample standard deviation; 0 in a group of equal rewards."""
    out = []
    for group in (REWARD[:4], REWARD[4:]):
        mean, spread = statistics.mean(group), statistics.stdev(group)
        out += [(r - mean) / (spread + 1e-6) if spread > 1e-9 else 0.0 for r in group]
    return out


class Means:
    """Means and maxima of single numbers, by key."""

    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, key: str, value: float) -> None:
        self.values[key].append(float(value))

    def result(self) -> dict[str, float]:
        return {k: max(v) if k.endswith("_max") else statistics.fmean(v) for k, v in self.values.items()}


def pushed_down(rows: range, pushes: list[list[float]]) -> float:
    """What the loss does to the tokens that two completions of a group or more share from their beginning on."""
    total = 0.0
    for i in rows:
        for t in range(len(IDS[i])):
            if any(IDS[j][: t + 1] == IDS[i][: t + 1] for j in rows if j != i):
                total += pushes[i][t]
    return total


def by_loops(steps: Steps, way: str) -> dict[str, float]:
    """All of ``policy/*`` and ``sampler_mismatch/*`` but for what is counted above, from single tokens."""
    add, a = Means(), advantages()
    uses_ratio, several = "ratio" not in WAYS[way], len(steps.rows) > 1
    corrects = "sampler_correction" in WAYS[way]
    old, entropy = steps.logprobs[0], steps.entropies[0]
    up = whole = 0.0
    for rows, new in zip(steps.rows, steps.logprobs, strict=False):
        pushes = [[0.0] * n for n in LENGTHS]
        answers = [i for i in rows if IDS[i]]
        counted = len([i for i in range(8) if i in rows and IDS[i]])
        for i in answers:
            add("policy/entropy_sequence", statistics.fmean(entropy[i]))
            add("policy/entropy_high_frac", statistics.fmean(entropy[i]) > math.log(2))
            known = [t for t in range(len(IDS[i])) if not math.isnan(OFFSETS[i][t])]
            if known:
                add("sampler_mismatch/learner_perplexity", math.exp(-statistics.fmean(old[i][t] for t in known)))
                drawn = [old[i][t] - OFFSETS[i][t] for t in known]
                add("sampler_mismatch/sampler_perplexity", math.exp(-statistics.fmean(drawn)))
            add("sampler_mismatch/sequence_weight_sq", math.exp(2 * sum(OFFSETS[i][t] for t in known)))
            for t in range(len(IDS[i])):
                d = new[i][t] - old[i][t]
                ratio = math.exp(d)
                add("policy/entropy", entropy[i][t])
                add("policy/advantage_abs", abs(a[i]))
                add("policy/advantage_abs_max", abs(a[i]))
                if several:
                    change = math.exp(new[i][t]) - math.exp(old[i][t])
                    add("policy/ratio_mean", ratio)
                    add("policy/ratio_gap", abs(ratio - 1))
                    add("policy/approx_kl_k1", -d)
                    add("policy/approx_kl_k3", ratio - 1 - d)
                    add("policy/delta_prob", change)
                    add("policy/delta_prob_abs", abs(change))
                low = uses_ratio and a[i] < 0 and ratio < 1 - CLIP["clip_low"]
                high = uses_ratio and a[i] > 0 and ratio > 1 + CLIP["clip_high"]
                add("policy/clip_frac/low", low)
                add("policy/clip_frac/high", high)
                add("policy/clip_frac/dual", 0)
                if low or high:
                    add("policy/clipped_old_prob", math.exp(old[i][t]))
                offset = OFFSETS[i][t]
                correction = (min(math.exp(0.0 if math.isnan(offset) else offset), 2.0)) if corrects else 1.0
                weight = 0.0 if low or high else a[i] * (ratio if uses_ratio else 1.0) / len(IDS[i]) / counted
                pushes[i][t] = weight * correction
                up, whole = up + max(weight * correction, 0), whole + abs(weight * correction)
                add("sampler_mismatch/missing_frac", math.isnan(offset))
                if corrects:
                    add("sampler_mismatch/applied", correction)
                    add("sampler_mismatch/applied_sq", correction**2)
                    add("sampler_mismatch/capped_frac", 0)
                if math.isnan(offset):
                    continue
                c, gap = math.exp(offset), math.exp(old[i][t]) - math.exp(old[i][t] - offset)
                add("sampler_mismatch/weight", c)
                add("sampler_mismatch/weight_sq", c * c)
                add("sampler_mismatch/kl_k1", -offset)
                add("sampler_mismatch/kl_k3", c - 1 - offset)
                add("sampler_mismatch/prob_abs_diff", abs(gap))
                add("sampler_mismatch/prob_abs_diff_max", abs(gap))
                add("sampler_mismatch/logprob_abs_diff", abs(offset))
                add("sampler_mismatch/logprob_abs_diff_max", abs(offset))
                add("sampler_mismatch/impossible_frac", 0)
        for group in {i // 4 for i in rows}:
            add("groups/prefix_pushed_down_frac", pushed_down(range(4 * group, 4 * group + 4), pushes) < -1e-9)
    after = steps.logprobs[-1]
    # Everything goes through the model again, so what the steps did is measured on all tokens. With minibatches: on
    # those of the first.
    for i in steps.rows[0]:
        for t in range(len(IDS[i])):
            d = after[i][t] - old[i][t]
            add("policy/step_kl", math.exp(d) - 1 - d)
            if a[i]:
                sign = "positive" if a[i] > 0 else "negative"
                add(f"policy/delta_prob_{sign}", math.exp(after[i][t]) - math.exp(old[i][t]))
    out = add.result() | {"policy/upward_frac": up / whole}
    mean, square = out["sampler_mismatch/weight"], out["sampler_mismatch/weight_sq"]
    out["sampler_mismatch/ess"] = mean**2 / square
    out["sampler_mismatch/chi2_token"] = square - 1
    out["sampler_mismatch/chi2_sequence"] = out["sampler_mismatch/sequence_weight_sq"] - 1
    if corrects:
        out["sampler_mismatch/applied_ess"] = out["sampler_mismatch/applied"] ** 2 / out["sampler_mismatch/applied_sq"]
    return out


GROUPS = ("reward", "completions", "groups", "policy", "sampler_mismatch")


def of_groups(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.split("/")[0] in GROUPS}


@pytest.mark.parametrize("way", WAYS)
def test_every_number_is_the_one_counted_by_hand(way: str) -> None:
    metrics, steps = train(rollout(), way)
    expected = COUNTED | by_loops(steps, way)
    found = of_groups(metrics)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
    if way == "one update":
        # The first group raises its beginning by more than its wrong answer pushes it down; the second has no gradient.
        assert found["groups/prefix_pushed_down_frac"] == 0
    if "several" in way:
        assert found["policy/delta_prob_abs"] > 1e-4, "the policy moved, so the comparison is one"


def ranks_job(rank: int, folder: str) -> dict[str, dict[str, float]]:
    found = {}
    for way in WAYS:
        enter(rank)
        found[way], _ = train(group_of_rank(rollout(), rank), way, see=False, devices=2, strategy="ddp")
    return found


@pytest.mark.slow
def test_two_ranks_log_the_numbers_of_one(tmp_path: Any) -> None:
    """Each rank has one group, so in a step of one group the other rank has nothing."""
    ranks = on_two_ranks(ranks_job, tmp_path)
    for way in WAYS:
        alone, _ = train(rollout(), way, see=False)
        for of_rank in ranks:
            found, expected = of_groups(of_rank[way]), of_groups(alone)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (way, key)
