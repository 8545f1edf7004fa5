"""Facts that hold for any rewards: sums of advantages, trust regions at ratio 1, sampler weights, empty losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.objectives import RECIPES, Objective
from lit_grpo.objectives.advantages import AdvantageInputs, GroupStd
from lit_grpo.objectives.ratios import importance_ratio
from lit_grpo.objectives.registry import ADVANTAGES, AGGREGATIONS, SAMPLER_CORRECTIONS, TRUST_REGIONS
from lit_grpo.objectives.regularizers import kl_to_reference
from lit_grpo.objectives.tensors import Groups, masked
from lit_grpo.objectives.token_weights import quantile
from lit_grpo.objectives.trust_regions import SurrogateInputs
from lit_grpo.types import Experience
from tests.objectives.random_batches import NAMES, Ranks, batch, objective, step

SEEDS = st.integers(0, 10_000)
REWARDS = st.lists(st.floats(-5, 5), min_size=2, max_size=8)


def flat(rewards: list[float], groups: list[int]) -> Experience:
    ids = torch.tensor(groups)
    return Experience(
        torch.ones_like(ids), ids, torch.tensor(rewards, dtype=torch.float64), ids.bool() & False, width=1,
        prompt_ids=[str(g) for g in groups],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["group_std", "group_mean", "group_var", "rloo", "batch_std"])
@settings(max_examples=20, deadline=None)
@given(first=REWARDS, second=REWARDS)
def test_advantages_of_a_group_sum_to_zero(kind: str, first: list[float], second: list[float]) -> None:
    exp = flat(first + second, [7] * len(first) + [3] * len(second))
    groups = Groups.of(exp.group_ids)
    advantages = ADVANTAGES[kind](AdvantageInputs(exp, exp.rewards, groups))
    limit = 1e-9 * (1 + float(advantages.abs().max()))
    assert float(groups.sum(advantages).abs().max()) <= limit


@settings(max_examples=20, deadline=None)
@given(p=st.integers(1, 7))
def test_mean_size_of_binary_advantages(p: int) -> None:
    """Mean |A| is 2 sqrt(p(1-p)) with the population deviation, 2p(1-p) without, 2 with the variance."""
    exp = flat([1.0] * p + [0.0] * (8 - p), [0] * 8)
    inputs, share = AdvantageInputs(exp, exp.rewards, Groups.of(exp.group_ids)), p / 8
    population = replace(ADVANTAGES["group_std"], std_ddof=0, std_eps=0.0)  # type: ignore[type-var]
    variance = replace(ADVANTAGES["group_var"], std_ddof=0, std_eps=0.0)  # type: ignore[type-var]
    assert float(population(inputs).abs().mean()) == pytest.approx(2 * (share * (1 - share)) ** 0.5)
    assert float(ADVANTAGES["group_mean"](inputs).abs().mean()) == pytest.approx(2 * share * (1 - share))
    assert float(variance(inputs).abs().mean()) == pytest.approx(2)


@pytest.mark.parametrize("kind", [k for k, v in ADVANTAGES.items() if v.grouped])
@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, -3.3])
def test_uniform_group_and_group_of_one_are_exactly_zero(kind: str, value: float) -> None:
    exp, _ = batch(5, groups=1, size=4, width=3)
    exp = replace(
        exp,
        group_ids=torch.tensor([0, 0, 0, 1]),
        rewards=torch.tensor([value] * 3 + [2.0], dtype=torch.float64),
        lengths=torch.full((4,), 3),
        prompt_ids=["a", "a", "a", "b"],
    )
    old_logprobs, sum_squared_probs = torch.rand(2, 4, 3, dtype=torch.float64).neg().unbind()
    exp = replace(exp, old_logprobs=old_logprobs, sum_squared_probs=sum_squared_probs)
    estimator = ADVANTAGES[kind]
    inputs = AdvantageInputs(exp, exp.rewards, Groups.of(exp.group_ids))
    result = estimator(inputs)
    if kind == "group_mean_then_whiten":  # whitened over the batch: all returns are equal, so 0 too
        assert not masked(result, exp.mask).any()
    else:
        assert not result.any()


def test_group_of_one_can_keep_its_reward() -> None:
    exp = flat([1.0, 0.0, 3.0], [0, 0, 1])
    result = GroupStd(single_sample_advantage="raw")(AdvantageInputs(exp, exp.rewards, Groups.of(exp.group_ids)))
    assert result[2] == 3.0


@pytest.mark.parametrize("kind", [k for k in TRUST_REGIONS if k != "cispo"])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_at_ratio_one_all_trust_regions_give_one_gradient(kind: str, seed: int) -> None:
    """Summed over a completion with equal weights, dF/dlp = A for every trust region at ratio 1."""
    exp, now = batch(seed, groups=2, size=2, width=3)
    lp = masked(now.logprobs, exp.mask).requires_grad_()
    old = lp.detach()
    advantages = torch.randn(4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).expand(4, 3)
    n = exp.lengths.clamp_min(1)[:, None]
    for ratio in ("token", "sequence", "sequence_token"):
        region = TRUST_REGIONS[kind]
        name = "geometric" if region.per_sequence else ratio
        inputs = SurrogateInputs(importance_ratio(name, lp, old, exp.mask), advantages, lp, old, exp.mask, beta=1.0)  # type: ignore[arg-type]
        value = region(inputs).value
        if (penalty := region(inputs).penalty) is not None:
            value = value - penalty
        (grad,) = torch.autograd.grad((masked(value, exp.mask) / n).sum(), lp)
        torch.testing.assert_close(grad, masked(advantages / n, exp.mask), rtol=1e-9, atol=1e-12)


def test_cispo_at_ratio_one() -> None:
    exp, now = batch(1, groups=2, size=2, width=3)
    lp = masked(now.logprobs, exp.mask).requires_grad_()
    a = torch.ones(4, 3, dtype=torch.float64)
    inputs = SurrogateInputs(importance_ratio("token", lp, lp.detach(), exp.mask), a, lp, lp.detach(), exp.mask)
    (grad,) = torch.autograd.grad(masked(TRUST_REGIONS["cispo"](inputs).value, exp.mask).sum(), lp)
    torch.testing.assert_close(grad, masked(a, exp.mask))


# No clip acts at ratio 1, so recipes that differ in the trust region alone give the same first update.
ONE_GRADIENT = ["grpo", "gspo", "gspo_token", "gmpo", "sapo"]


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_first_update_is_the_same_for_all_trust_regions(seed: int) -> None:
    exp, now = batch(seed, groups=3, size=3, width=4, old=False)
    grads = [step(objective(name), exp, now)[3] for name in ONE_GRADIENT]
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["tis_token", "mis_token"])
@pytest.mark.parametrize("name", [n for n in RECIPES if n not in ("gmpo", "rspo", "sft")])
def test_token_sampler_weights_multiply_the_policy_gradient(name: str, kind: str) -> None:
    """P1: with the other inputs off, grad becomes c * grad."""
    made = objective(name)
    plain = replace(
        made, sampler=SAMPLER_CORRECTIONS["none"],
        regularizers=replace(made.regularizers, kl_coef=0.0, entropy_coef=0.0, nll_coef=0.0, value_coef=0.0),
    )  # fmt: skip
    if made.trust_region.kind == "kl_penalty":
        plain = replace(plain, trust_region=replace(made.trust_region, trpo_beta=0.0))  # type: ignore[type-var]
    corrected = replace(plain, sampler=SAMPLER_CORRECTIONS[kind])
    exp, now = batch(11, groups=3, size=3, width=4)
    assert exp.old_logprobs is not None
    assert exp.sampler_logprobs is not None
    grad = step(plain, exp, now)[3]
    c = corrected.sampler(masked(exp.old_logprobs, exp.mask), exp.sampler_logprobs, exp.mask).weights
    torch.testing.assert_close(step(corrected, exp, now)[3], c * grad, rtol=1e-9, atol=1e-12)
    assert grad.any()


@pytest.mark.parametrize("kind", list(SAMPLER_CORRECTIONS))
def test_no_mismatch_no_correction(kind: str) -> None:
    exp, now = batch(2, groups=3, size=3, width=4)
    exp = replace(exp, sampler_logprobs=exp.old_logprobs)
    plain = objective("grpo")
    corrected = replace(plain, sampler=SAMPLER_CORRECTIONS[kind])
    assert torch.equal(step(plain, exp, now)[3], step(corrected, exp, now)[3])


def test_unknown_sampler_probability_counts_as_one() -> None:
    exp, now = batch(2, groups=2, size=3, width=4)
    exp = replace(exp, lengths=torch.full((6,), 4))
    known = {key: getattr(exp, key).nan_to_num(-1.0) for key in ("old_logprobs", "sampler_logprobs")}
    exp = replace(exp, **known)
    now.logprobs = now.logprobs.nan_to_num(-1.0)
    assert exp.sampler_logprobs is not None
    exp.sampler_logprobs[0, 1], exp.sampler_logprobs[3, 2] = float("nan"), float("-inf")
    made = Objective.from_recipe("grpo", sampler_correction="tis_token")
    out = step(made, exp, now)[2]
    weights = made.sampler(exp.old_logprobs, exp.sampler_logprobs, exp.mask)  # type: ignore[arg-type]
    assert weights.weights[0, 1] == weights.weights[3, 2] == 1
    assert float(out.metrics["sampler_mismatch/missing_frac"].total) == 2


@pytest.mark.parametrize("name", NAMES)
def test_nothing_left_is_exactly_zero(name: str) -> None:
    """All completions dropped, or all empty: zero loss, zero gradient, and a plan that says so."""
    made = objective(name)
    exp, now = batch(4, groups=2, size=3, width=4)
    for case in ("empty", "truncated"):
        if case == "empty":
            nothing, test = replace(exp, lengths=torch.zeros(6, dtype=torch.long)), made
        else:
            nothing = replace(exp, truncated=torch.ones(6, dtype=torch.bool))
            test = replace(made, filters=replace(made.filters, mask_truncated=True))
        _, plan, out, grad = step(test, nothing, now)
        assert plan.empty
        assert not plan.active.any()
        assert out.loss.item() == 0
        assert not grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_completions_or_tokens(name: str) -> None:
    made = objective(name)
    exp, now = batch(4, groups=2, size=3, width=4)
    none = torch.zeros(0, dtype=torch.long)
    _, plan, out, grad = step(made, exp.select(none), now.select(none))
    assert plan.empty
    assert out.loss.item() == 0
    assert grad.shape == (0, 4)
    bare, bare_now = batch(4, groups=2, size=3, width=0)
    _, plan, out, grad = step(made, bare, bare_now)
    assert plan.empty
    assert out.loss.item() == 0
    assert grad.shape == (6, 0)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "gmpo", "cispo", "sapo", "olmo3", "lite_ppo"])
def test_all_correct_batch_teaches_nothing(name: str) -> None:
    exp, now = batch(4, groups=2, size=3, width=4)
    exp = replace(exp, rewards=torch.ones(6, dtype=torch.float64), truncated=torch.zeros(6, dtype=torch.bool))
    # Lengths alone may differ in reward (DAPO), but the group is dropped all the same.
    _, plan, out, grad = step(objective(name), exp, now)
    assert plan.empty
    assert out.loss.item() == 0
    assert not grad.any()


def test_what_dropped_completions_count_for() -> None:
    """Uniform groups stay in the denominator if so chosen; truncated completions never do."""
    exp, now = batch(9, groups=2, size=3, width=4)
    exp = replace(
        exp,
        lengths=torch.full((6,), 2),
        rewards=torch.tensor([1.0, 0, 0, 1, 1, 1], dtype=torch.float64),
        truncated=torch.tensor([False, True, False, False, False, True]),
    )
    for kept, tokens in (("kept", 4), ("all", 8)):
        made = Objective.from_recipe(
            "grpo", aggregation="token_mean", drop_zero_variance=True, mask_truncated=True, filtered_denominator=kept
        )
        plan = step(made, exp, now)[1]
        assert plan.kept.tolist() == [True, False, True, False, False, False]
        assert plan.weights.tolist() == [1 / tokens, 0, 1 / tokens, 0, 0, 0]


def test_rows_that_are_dropped_may_hold_anything() -> None:
    """No forward is needed for them: NaN in their log-probabilities does not spread."""
    exp, now = batch(9, groups=3, size=3, width=4)
    made = Objective.from_recipe("grpo", mask_truncated=True)
    _, plan, out, grad = step(made, exp, now)
    assert plan.active.any()
    assert not plan.active.all()
    now.logprobs = now.logprobs.masked_fill(~plan.active[:, None], float("nan"))
    _, _, again, again_grad = step(made, exp, now)
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(again_grad, grad)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators(kind: str) -> None:
    """In expectation over pi: k1 and k3 are the KL, the gradient of k2 is that of KL(pi || ref)."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, -0.2, 0.9], dtype=torch.float64).log_softmax(0)
    lp = logits.log_softmax(0)
    exact = (lp.exp() * (lp - ref)).sum()
    value = kl_to_reference(kind, lp[None], ref[None], torch.ones(1, 4, dtype=torch.bool))[0]  # type: ignore[arg-type]
    weight = lp.exp().detach()
    if kind != "k2":
        torch.testing.assert_close((weight * value).sum(), exact)
    (grad,) = torch.autograd.grad((weight * value).sum(), logits, retain_graph=True)
    if kind == "k1":
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-12, rtol=0)
    if kind == "k2":
        torch.testing.assert_close(grad, torch.autograd.grad(exact, logits)[0])
    if kind == "k3":
        reverse = (ref.exp() * (ref - lp)).sum()
        torch.testing.assert_close(grad, torch.autograd.grad(reverse, logits)[0])


@settings(max_examples=15, deadline=None)
@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=9), q=st.floats(0, 1), cut=st.integers(0, 9))
def test_quantile_over_ranks_is_the_quantile(values: list[float], q: float, cut: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    want = float(torch.quantile(whole, q))
    assert quantile(whole, q) == pytest.approx(want, abs=1e-9)
    parts = [whole[:cut], whole[cut:]]
    for got in Ranks(2).run(lambda rank, reduce: quantile(parts[rank], q, reduce)):
        assert got == quantile(whole, q)


@pytest.mark.parametrize("kind", ["seq_mean", "token_mean", "token_mean_group", "per_prompt_set"])
def test_weights_of_token_means_add_up_to_one(kind: str) -> None:
    """Means weigh to 1 over the kept tokens; DCPO and GTPO's code have no 1/N on purpose."""
    made = replace(objective("grpo"), aggregation=AGGREGATIONS[kind])
    exp, _ = batch(8, groups=3, size=3, width=4)
    state = made.new_state()
    plan = made.plan(exp, *made.advantages(exp, state))
    assert float((plan.weights * exp.lengths).sum()) == pytest.approx(1.0)
