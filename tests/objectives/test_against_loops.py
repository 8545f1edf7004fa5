"""The general form, written once more as plain loops over floats, against random combinations of parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.objectives import Objective
from lit_grpo.objectives.token_weights import LN2, EntropySignal
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


def border_run(ids: list[list[int]], advantages: list[float], group: range, i: int) -> int:
    """Length of the run of conflicts at the start of completion i: the same id stands there in one of each sign."""
    if advantages[i] == 0:
        return 0
    run = 0
    for t, token in enumerate(ids[i]):
        signs = {advantages[j] > 0 for j in group if advantages[j] and t < len(ids[j]) and ids[j][t] == token}
        if len(signs) < 2:
            break
        run += 1
    return run


def gtpo(exp: Any, form: str, *, initial: float, gate: float, threshold: float, which: str) -> Any:
    """GTPO's gradient of each token, 2508.03772 Eq. 8 to 11, or as in the released code (winstonsmith1897/GTPO).

    The code differs from the paper: A = r - mean without std, factors of both runs multiplied, each completion divided
    by its conflict tokens, no 1/G.
    """
    n, size, r = exp.lengths.tolist(), 4, exp.rewards.tolist()
    ids = [exp.token_ids[i, : n[i]].tolist() for i in range(len(n))]
    grad = [[0.0] * exp.width for _ in n]
    some = sum(1 for k in n if k)
    for g in (range(start, start + size) for start in range(0, len(n), size)):
        mean = sum(r[i] for i in g) / size
        std = math.sqrt(sum((r[i] - mean) ** 2 for i in g) / (size - 1))
        a = {i: 0.0 if std == 0 else (r[i] - mean) / (1.0 if form == "code" else std + 1e-6) for i in g}
        for i in g:
            if not n[i]:
                continue
            signs = [a.get(j, 0.0) for j in range(len(n))]
            forward = border_run(ids, signs, g, i)
            backward = border_run([row[::-1] for row in ids], signs, g, i)
            entropy = sum(exp.entropy[i, : n[i]].tolist()) / n[i]
            dropped = initial < gate and entropy > threshold and (which == "all" or a[i] < 0)
            factors = []
            for t in range(n[i]):
                hits = [t < forward, t >= n[i] - backward]
                factor = 2.0 if a[i] > 0 else 0.0
                factors.append(factor ** (sum(hits) if form == "code" else any(hits)))
            conflicts = sum(t < forward or t >= n[i] - backward for t in range(n[i]))
            weight = 1 / (n[i] * max(conflicts, 1)) if form == "code" else 1 / (some * n[i])
            for t in range(n[i]):
                grad[i][t] = 0.0 if dropped else -weight * factors[t] * (a[i] - 0.1 * entropy)
    return grad


RELEASED: dict[str, Any] = {
    "advantage": "group_mean", "aggregation": "conflict_tokens", "conflict_overlap": "product",
    "entropy_threshold": 0.7, "entropy_gate": math.inf,
}  # fmt: skip
"""GTPO's released code as overrides of the recipe: docs/objectives.md names them."""


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("form", "changes", "initial", "gate", "threshold", "which"),
    [
        ("paper", {}, 0.5, LN2, LN2, "all"),
        ("paper", {}, 0.9, LN2, LN2, "all"),
        # Eq. 10's gate stays at ln 2, whatever the threshold: with H_init 0.9 nothing is dropped.
        ("paper", {"entropy_threshold": 1.05}, 0.9, LN2, 1.05, "all"),
        ("paper", {"entropy_threshold": 1.05}, 0.5, LN2, 1.05, "all"),
        ("paper", {"entropy_threshold": 0.4, "entropy_gate": 2.0}, 0.9, 2.0, 0.4, "all"),
        ("paper", {"entropy_threshold": 0.7, "entropy_filter": "negatives"}, 0.5, LN2, 0.7, "negatives"),
        ("code", RELEASED, 9.9, math.inf, 0.7, "all"),
    ],
)
def test_gtpo_as_in_its_paper_and_as_released(
    seed: int, form: str, changes: dict[str, Any], initial: float, gate: float, threshold: float, which: str
) -> None:
    exp, now = batch(seed, groups=3, size=4, width=6)
    # Two ids, so that runs of conflicts are long and overlap.
    assert exp.token_ids is not None
    exp = replace(exp, token_ids=exp.token_ids % 2)
    own = {} if math.isinf(gate) else {"initial_entropy": initial}
    made = Objective.from_recipe("gtpo", **changes, **own)
    want = gtpo(exp, form, initial=initial, gate=gate, threshold=threshold, which=which)
    got = step(made, exp, now)[3]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_the_filter_and_its_gate_count_what_they_drop() -> None:
    """The audit's case: threshold 1.05 and H_init 0.9 drop none by Eq. 10; under a gate of 1.05 they dropped two."""
    entropy = torch.tensor([0.6, 0.9, 1.1, 2.5], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)

    def kept(initial: float, **given: Any) -> list[float]:
        return EntropySignal(**({"entropy_filter": "all"} | given)).delta(entropy, signs, initial).tolist()

    assert kept(0.9, entropy_threshold=1.05) == [1, 1, 1, 1]
    assert kept(0.9, entropy_threshold=1.05, entropy_gate=1.05) == [1, 1, 0, 0]
    assert kept(0.5) == [1, 0, 0, 0]
    assert kept(0.5, entropy_filter="negatives") == [1, 0, 1, 0]
    assert kept(0.5, entropy_threshold=2.0) == [1, 1, 1, 0]
    assert kept(LN2) == [1, 1, 1, 1], "at ln 2 itself the paper says nothing"
    assert EntropySignal(entropy_filter="all").threshold_in_force(0.5) == LN2
    assert EntropySignal(entropy_filter="all").threshold_in_force(0.9) is None
    assert EntropySignal(entropy_gamma=0.1).threshold_in_force(0.5) is None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("recipe", ["ppo", "vapo"])
@pytest.mark.parametrize("bounds", [{}, {"value_low": -0.2, "value_high": 0.3}])
def test_truncated_completions_are_bootstrapped(seed: int, recipe: str, bounds: dict[str, float]) -> None:
    """A_t = sum_k (gamma lambda)^(k-t) delta_k, where V after the last token of a truncated completion is the critic's
    and that of an ended one 0.
    """
    exp, _ = batch(seed, groups=3, size=3, width=5)
    exp = replace(exp, truncated=torch.arange(9) % 2 == 0)
    generator = torch.Generator().manual_seed(seed)
    after = torch.randn(9, generator=generator, dtype=torch.float64)
    # What stands there for ended completions must not be read.
    exp = replace(exp, final_values=torch.where(exp.truncated, after, float("nan")))
    settings: dict[str, Any] = {"gae_gamma": 0.9, "whiten": False} | bounds
    settings |= {"gae_lambda": 0.7} if recipe == "ppo" else {"length_alpha": 0.6}
    made = Objective.from_recipe(recipe, bootstrap_truncated=True, **settings)
    assert {"values", "final_values"} <= made.requires(1)
    low, high = bounds.get("value_low", -math.inf), bounds.get("value_high", math.inf)
    state = made.new_state()
    advantages, returns = made.advantages(exp, state)[0], made.returns(exp, state)
    for i, n in enumerate(exp.lengths.tolist()):
        v = [min(max(x, low), high) for x in exp.values[i, :n].tolist()]  # type: ignore[index]
        v.append(min(max(float(after[i]), low), high) if exp.truncated[i] else 0.0)
        lam = 0.7 if recipe == "ppo" else max(0.0, 1 - 1 / (0.6 * max(n, 1)))
        delta = [(float(exp.rewards[i]) if k == n - 1 else 0.0) + 0.9 * v[k + 1] - v[k] for k in range(n)]
        for t in range(n):
            want = sum((0.9 * lam) ** (k - t) * delta[k] for k in range(t, n))
            target = sum((0.9 * (lam if recipe == "ppo" else 1.0)) ** (k - t) * delta[k] for k in range(t, n)) + v[t]
            assert float(advantages[i, t]) == pytest.approx(want, abs=1e-6)
            assert float(returns[i, t]) == pytest.approx(target, abs=1e-6)
    plain = Objective.from_recipe(recipe, **settings)
    ended = exp.lengths * ~exp.truncated > 0
    torch.testing.assert_close(advantages[ended], plain.advantages(exp, state)[0][ended])
    assert not torch.equal(advantages, plain.advantages(exp, state)[0])
