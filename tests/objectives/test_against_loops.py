"""The general form, written once more as plain loops over floats, against random combinations of parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.objectives import Objective
from tests.objectives.random_batches import batch, step

CLIP = {"clip_low": 0.15, "clip_high": 0.1, "dual_clip": 1.3}
REGIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "clip": CLIP,
    "cispo": {"cispo_cap": 1.1, "cispo_floor": 0.9},
    "sapo": {},
    "dcpo": {"clip_low": 0.02, "clip_high": 0.05, "dual_clip": 1.3},
}


def surrogate(kind: str, rho: float, a: float, lp: float, q: float) -> tuple[float, float]:
    """F and dF/dlp of one token, as the table of trust regions writes them."""
    if kind == "none":
        return rho * a, rho * a
    if kind == "cispo":
        w = min(max(rho, 0.9), 1.1)
        return w * a * lp, w * a
    if kind == "sapo":
        tau = 1.0 if a > 0 else 1.05
        p = 1 / (1 + math.exp(-tau * (rho - 1)))
        return 4 / tau * p * a, 4 * p * (1 - p) * rho * a
    low, high, dual = 0.85, 1.1, 1.3
    if kind == "dcpo":
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.02 / q, 0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.05 / q), 1.3)
    value = min(rho * a, min(max(rho, low), high) * a)
    if a < 0:
        value = max(value, dual * a)
    moves = not (a > 0 and rho > high) and not (a < 0 and (rho < low or rho > dual))
    return value, rho * a if moves else 0.0


def sampler(kind: str, c: list[float]) -> list[float]:
    product = math.prod(c)
    mean = product ** (1 / max(len(c), 1))
    if kind == "tis_token":
        return [min(x, 1.05) for x in c]
    if kind == "tis_sequence":
        return [min(product, 1.05)] * len(c)
    if kind == "mis_token":
        return [x if 0.9 <= x <= 1.05 else 0.0 for x in c]
    if kind == "mis_sequence":
        return [product if 0.9 <= product <= 1.05 else 0.0] * len(c)
    if kind == "geo_mask":
        return [float(0.95 <= mean <= 1.05)] * len(c)
    return [1.0] * len(c)


SAMPLER_SETTINGS: dict[str, dict[str, float]] = {
    "none": {},
    "tis_token": {"sampler_cap": 1.05},
    "tis_sequence": {"sampler_cap": 1.05},
    "mis_token": {"sampler_cap": 1.05, "sampler_floor": 0.9},
    "mis_sequence": {"sampler_cap": 1.05, "sampler_floor": 0.9},
    "geo_mask": {"geo_low": 0.95, "geo_high": 1.05},
}


def loops(kind: str, ratio: str, agg: str, corr: str, drop: bool, exp: Any, lp: list[list[float]]) -> Any:
    """Loss and gradient of one combination with the advantage r - mean."""
    n, size = exp.lengths.tolist(), 3
    r, old = exp.rewards.tolist(), exp.old_logprobs.tolist()
    groups = [range(g, g + size) for g in range(0, len(n), size)]
    kept = [i for g in groups for i in g if not drop or len({r[j] for j in g}) > 1]
    some = [i for i in kept if n[i]]
    tokens = sum(n[i] for i in kept)
    loss, grad = 0.0, [[0.0] * exp.width for _ in n]
    for g in groups:
        mean = sum(r[i] for i in g) / size
        mine = [i for i in g if i in some]
        for i in mine:
            a = 0.0 if len({r[j] for j in g}) == 1 else r[i] - mean
            d = [lp[i][t] - old[i][t] for t in range(n[i])]
            c = sampler(corr, [math.exp(old[i][t] - exp.sampler_logprobs[i][t].item()) for t in range(n[i])])
            live_groups = sum(any(j in some for j in h) for h in groups)
            w = {
                "seq_mean": 1 / (len(some) * n[i]),
                "token_mean": 1 / max(tokens, 1),
                "token_mean_group": 1 / (live_groups * sum(n[j] for j in mine)),
                "sum_const": 1 / (len(kept) * 16),
                "seq_sum": 1 / len(some),
                "only_token_mean": 1 / n[i],
            }[agg]
            for t in range(n[i]):
                rho = {"self": 1.0, "token": math.exp(d[t])}.get(ratio, math.exp(sum(d) / n[i]))
                value, slope = surrogate(kind, rho, a, lp[i][t], math.exp(old[i][t]))
                loss -= w * c[t] * value
                grad[i][t] -= w * c[t] * slope
    return loss, grad


@pytest.mark.parametrize("recipe", ["rloo", "gspo"])
def test_one_term_per_completion(recipe: str) -> None:
    """RLOO with the product ratio and GSPO: (1/N) min(R A, clip(R) A), R of the whole completion."""
    exp, now = batch(12, groups=3, size=3, width=4)
    changes: dict[str, Any] = {"ratio": "sequence_product", "kl_coef": 0.0} if recipe == "rloo" else {}
    made = Objective.from_recipe(recipe, clip_low=0.2, clip_high=0.2, **changes)
    advantages, _, out, got = step(made, exp, now)
    some = [i for i, n in enumerate(exp.lengths.tolist()) if n]
    loss, grad = 0.0, torch.zeros_like(got)
    for i in some:
        n, a = int(exp.lengths[i]), float(advantages[i, 0])
        total = float((now.logprobs[i, :n] - exp.old_logprobs[i, :n]).sum())  # type: ignore[index]
        ratio = math.exp(total if recipe == "rloo" else total / n)
        loss -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a) / len(some)
        moves = not (a > 0 and ratio > 1.2) and not (a < 0 and ratio < 0.8)
        grad[i, :n] = -a * ratio * moves / len(some) / (1 if recipe == "rloo" else n)
    assert out.loss.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(got, grad, rtol=1e-9, atol=1e-12)
    assert grad.any()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(list(REGIONS)),
    ratio=st.sampled_from(["self", "token", "sequence_token"]),
    agg=st.sampled_from(["seq_mean", "token_mean", "token_mean_group", "sum_const", "seq_sum", "only_token_mean"]),
    corr=st.sampled_from(list(SAMPLER_SETTINGS)),
    drop=st.booleans(),
)
def test_any_combination_equals_the_loops(seed: int, kind: str, ratio: str, agg: str, corr: str, drop: bool) -> None:
    exp, now = batch(seed, groups=3, size=3, width=4)
    changes: dict[str, Any] = {"max_tokens": 16} if agg == "sum_const" else {}
    made = Objective.from_recipe(
        "dr_grpo", truncated_reward="keep", ratio=ratio, trust_region=kind, aggregation=agg, sampler_correction=corr,
        drop_zero_variance=drop, **REGIONS[kind], **SAMPLER_SETTINGS[corr], **changes,
    )  # fmt: skip
    loss, grad = loops(kind, ratio, agg, corr, drop, exp, now.logprobs.tolist())
    _, _, out, got = step(made, exp, now)
    assert out.loss.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(got, torch.tensor(grad, dtype=torch.float64), rtol=1e-9, atol=1e-12)
