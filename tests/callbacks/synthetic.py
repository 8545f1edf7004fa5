"""Made-up runs: what a healthy one logs, and one thing at a time that goes wrong in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

Step = dict[str, float]
Change = Callable[[int], dict[str, float]]


def healthy(steps: int = 120, seed: int = 0) -> list[Step]:
    """A run that learns: reward 0.5 to 0.9, entropy and length drift, noise on everything."""
    draw = random.Random(seed)

    def noisy(value: float, share: float = 0.05) -> float:
        return value * (1 + draw.gauss(0, share))

    run = []
    for t in range(1, steps + 1):
        done = 1 - math.exp(-t / 40)
        run.append(
            {
                "reward": noisy(0.5 + 0.4 * done, 0.03),
                "reward/exact_match": noisy(0.5 + 0.4 * done, 0.03),
                "reward/std": 0.4,
                "reward/format": min(1.0, noisy(0.95, 0.01)),
                "sanity/reward_contradiction_frac": 0.0,
                "sanity/advantage_contradiction_frac": 0.0,
                "sanity/inverted_advantage_frac": 0.0,
                "policy/entropy": noisy(0.4 - 0.15 * done),
                "policy/entropy_sequence": noisy(0.4 - 0.15 * done),
                "completions/length": noisy(100 + 20 * done, 0.03),
                "completions/correct_length": noisy(100 + 18 * done, 0.03),
                "completions/incorrect_length": noisy(105 + 22 * done, 0.05),
                "completions/truncated_frac": abs(draw.gauss(0.02, 0.01)),
                "optim/grad_norm": noisy(1.0, 0.3),
                "critic/grad_norm": noisy(2.0, 0.3),
                "optim/update_to_weight_ratio": noisy(1e-3, 0.1),
                "loss": draw.gauss(0, 0.01),
                "policy/upward_frac": noisy(0.5, 0.02),
                "policy/advantage_abs": 0.6,
                "policy/advantage_abs_max": 2.5,
                "groups/distinct_frac": noisy(0.9 - 0.1 * done, 0.02),
                "groups/zero_advantage_frac": 0.1 + 0.25 * done,
                "groups/all_correct_frac": 0.05 + 0.25 * done,
                "groups/all_wrong_frac": 0.05,
                "groups/count": 64.0,
                "groups/equal_pairs": 40.0,
                "sanity/mixed_prompts_frac": 0.0,
                "sanity/missing_tokens_frac": 0.0,
                "completions/repetition_frac": abs(draw.gauss(0.05, 0.01)),
                "completions/longest_run_frac": 0.05,
                "completions/top_token_frac": 0.15,
                "policy/conflict_frac": noisy(0.2, 0.1),
                "groups/prefix_pushed_down_frac": noisy(0.5, 0.2),
                "policy/ratio_gap": noisy(0.02, 0.2),
                "policy/ratio_mean": 1.0,
                "policy/approx_kl_k3": noisy(0.002, 0.2),
                "policy/kl_ref_k3": 0.001 * t,
                "policy/clip_frac/low": noisy(0.01, 0.2),
                "policy/clip_frac/high": noisy(0.012, 0.2),
                "policy/delta_prob_abs": noisy(0.01, 0.1),
                "optim/steps": 4.0 * t,
                "optim/skipped_steps": 0.0,
                "rollout/staleness": 0.0,
                "sampler_mismatch/logprob_abs_diff": noisy(0.01, 0.1),
                "sampler_mismatch/prob_abs_diff_max": 0.3,
                "sampler_mismatch/weight": noisy(1.0, 0.001),
                "sampler_mismatch/weight_sq": 1.02,
                "sampler_mismatch/ess": 0.98,
                "sampler_mismatch/chi2_token": 0.02,
                "sampler_mismatch/kl_k1": draw.gauss(0, 1e-4),
                "sampler_mismatch/kl_k3": 1e-4,
                "sampler_mismatch/learner_perplexity": 1.5,
                "sampler_mismatch/sampler_perplexity": 1.5,
                "sampler_mismatch/impossible_frac": 0.0,
                "critic/value_correct": 0.8,
                "critic/value_incorrect": 0.3,
                "critic/value_outside_frac": 0.05,
                "critic/explained_variance": noisy(0.4, 0.1),
                "val/reward": round(0.45 + 0.35 * (1 - math.exp(-(t // 20) / 2)), 3),
                "reward_errors/timeout_frac/exact_match": 0.0,
                "time/tokens_per_second": noisy(2000.0),
                "time/generate": noisy(3.0),
                "time/update": noisy(2.0),
                "memory/peak_gib": 10.0,
            }
        )
    return run


def changed(change: Change, start: int = 60, steps: int = 120, seed: int = 0) -> list[Step]:
    """A healthy run that ``change(k)`` overrides from rollout ``start`` on; k counts from 1."""
    run = healthy(steps, seed)
    for t in range(start, steps):
        run[t] |= change(t - start + 1)
    return run


def replay(monitor: Any, run: list[Step]) -> list[Any]:
    """All findings, in order."""
    return [found for t, metrics in enumerate(run, 1) for found in monitor.observe(t, metrics)]
