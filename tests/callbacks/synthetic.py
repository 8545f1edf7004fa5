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
                "reward/contradiction": 0.0,
                "advantage/contradiction": 0.0,
                "advantage/inverted": 0.0,
                "entropy": noisy(0.4 - 0.15 * done),
                "entropy/sequence": noisy(0.4 - 0.15 * done),
                "length": noisy(100 + 20 * done, 0.03),
                "length/correct": noisy(100 + 18 * done, 0.03),
                "length/incorrect": noisy(105 + 22 * done, 0.05),
                "truncated": abs(draw.gauss(0.02, 0.01)),
                "grad_norm": noisy(1.0, 0.3),
                "critic/grad_norm": noisy(2.0, 0.3),
                "update_size": noisy(1e-3, 0.1),
                "loss": draw.gauss(0, 0.01),
                "loss/upward": noisy(0.5, 0.02),
                "advantage/abs": 0.6,
                "advantage/abs_max": 2.5,
                "groups/distinct": noisy(0.9 - 0.1 * done, 0.02),
                "groups/zero_gradient": 0.1 + 0.25 * done,
                "groups/all_correct": 0.05 + 0.25 * done,
                "groups/all_wrong": 0.05,
                "groups/count": 64.0,
                "groups/equal_pairs": 40.0,
                "groups/mixed_prompts": 0.0,
                "tokens/missing": 0.0,
                "repetition": abs(draw.gauss(0.05, 0.01)),
                "repetition/run": 0.05,
                "repetition/top_token": 0.15,
                "conflict/rate": noisy(0.2, 0.1),
                "conflict/prefix_down": noisy(0.5, 0.2),
                "ratio/gap": noisy(0.02, 0.2),
                "ratio/mean": 1.0,
                "kl/old_k3": noisy(0.002, 0.2),
                "kl/ref_k3": 0.001 * t,
                "clip/low": noisy(0.01, 0.2),
                "clip/high": noisy(0.012, 0.2),
                "policy/delta_prob_abs": noisy(0.01, 0.1),
                "optimizer_steps": 4.0 * t,
                "skipped_steps": 0.0,
                "staleness": 0.0,
                "mismatch/logprob": noisy(0.01, 0.1),
                "mismatch/prob_max": 0.3,
                "mismatch/weight": noisy(1.0, 0.001),
                "mismatch/weight_sq": 1.02,
                "mismatch/ess": 0.98,
                "mismatch/chi2_token": 0.02,
                "mismatch/k1": draw.gauss(0, 1e-4),
                "mismatch/k3": 1e-4,
                "mismatch/learner_perplexity": 1.5,
                "mismatch/sampler_perplexity": 1.5,
                "mismatch/impossible": 0.0,
                "value/correct": 0.8,
                "value/incorrect": 0.3,
                "value/outside": 0.05,
                "value/explained_variance": noisy(0.4, 0.1),
                "val/reward": round(0.45 + 0.35 * (1 - math.exp(-(t // 20) / 2)), 3),
                "timeouts/exact_match": 0.0,
                "tokens_per_second": noisy(2000.0),
                "time/generate": noisy(3.0),
                "time/update": noisy(2.0),
                "memory/peak": 10.0,
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
