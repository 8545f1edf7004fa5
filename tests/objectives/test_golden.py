"""Every golden case through the public API: loss, gradient, advantages and whatever else the case knows.

``GOLDEN_OBJECTIVES=FILE`` runs the cases of another file of the same format.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_grpo.learner.metric_sums import StepMetrics, add_rollout_metrics
from lit_grpo.objectives import diagnostics
from lit_grpo.objectives.advantages import AdvantageInputs, GroupMean, GroupStd, LeaveOneOut
from lit_grpo.objectives.pass_at_k import pass_at_k
from lit_grpo.objectives.ratios import importance_ratio
from lit_grpo.objectives.sampler_correction import geometric_mean
from lit_grpo.objectives.shaping import flip_labels, soft_overlong
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.objectives.tensors import Groups, masked
from lit_grpo.objectives.token_advantages import GaeLength, gae, length_adaptive_lambda
from lit_grpo.objectives.token_weights import EntropySignal, conflict_masks, mean_entropy
from lit_grpo.objectives.trust_regions import Clip, Dcpo, Gmpo, Rspo, SurrogateInputs, dcpo_bounds, router_factor
from lit_grpo.policy.forward.head import head_stats
from lit_grpo.types import Completion, Experience, LossOutput, Prompt, Rollout
from tests.evaluation.votes import maj_at_k
from tests.objectives import golden_cases as golden

pytestmark = pytest.mark.skipif(not golden.PATH.exists(), reason=f"golden numbers are not at {golden.PATH}")

RAW = golden.cases()
DTYPES = [torch.float64, torch.float32]


def close(actual: Any, expected: Any, dtype: torch.dtype, what: str) -> None:
    """1e-9 absolute in float64; 2e-6 relative with floor 1e-7 in float32."""
    got = actual.detach().double() if isinstance(actual, Tensor) else torch.tensor(actual, dtype=torch.float64)
    want = torch.as_tensor(expected, dtype=torch.float64)
    assert got.shape == want.shape, what
    limit = torch.full_like(want, 1e-9) if dtype == torch.float64 else (2e-6 * want.abs()).clamp_min(1e-7)
    wrong = ~((got - want).abs() <= limit)
    assert not wrong.any(), f"{what}: got {got.tolist()}, want {want.tolist()}"


def run(case: golden.Case, dtype: torch.dtype, *, junk: float | None = None) -> tuple[Any, ...]:
    """Advantages, plan, loss and gradient of a case."""
    exp, state = case.experience(dtype), case.state()
    logprobs, values = case.tensor("logp", dtype), case.tensor("values_new", dtype)
    assert logprobs is not None
    if junk is not None:
        for name in ("old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy", "values", "sum_squared_probs"):
            if (value := getattr(exp, name)) is not None:
                changed: dict[str, Any] = {name: masked(value, exp.mask, junk)}
                exp = replace(exp, **changed)
        logprobs = masked(logprobs, exp.mask, junk)
        values = None if values is None else masked(values, exp.mask, junk)
    logprobs.requires_grad_()
    advantages, state = case.objective.advantages(exp, state)
    plan = case.objective.plan(exp, advantages, state, pass_index=case.pass_index)
    out = case.objective.loss(logprobs, plan, entropy=exp.entropy, values=values, router_logscores=case.router(dtype))
    out.loss.backward()
    assert logprobs.grad is not None
    return exp, state, advantages, plan, out, logprobs.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("raw", RAW, ids=[c["name"] for c in RAW])
def test_case(raw: dict[str, Any], dtype: torch.dtype) -> None:
    case = golden.make(raw)
    exp, state, advantages, plan, out, grad = run(case, dtype)
    expected = case.expected
    value_loss = expected.get("value_loss", 0.0)
    close(out.loss, expected["loss"] + value_loss, dtype, "loss")
    close(grad, expected["grad"], dtype, "gradient")
    close(out.token_weights, expected["grad"], dtype, "token weights")
    if "advantages" in expected:
        check_advantages(case, exp, advantages, plan.kept, dtype)
    check_rest(case, exp, state, plan, out, dtype)


def check_advantages(case: golden.Case, exp: Experience, advantages: Tensor, kept: Tensor, dtype: torch.dtype) -> None:
    want = torch.tensor(case.expected["advantages"], dtype=torch.float64)
    if want.ndim == 2:
        close(masked(advantages, exp.mask), want, dtype, "advantages")
        return
    # A completion that a filter took out for its reward has no advantage to speak of.
    filters = case.objective.filters
    rows = kept if filters.zero_variance or filters.keep_sign != "all" else torch.ones_like(kept)
    close(advantages[rows, 0], want[rows], dtype, "advantages")


def check_rest(
    case: golden.Case, exp: Experience, state: ObjectiveState, plan: Any, out: LossOutput, dtype: torch.dtype
) -> None:
    """The other numbers that a case knows; a key without a check here fails."""
    o, expected, mask = case.objective, dict(case.expected), exp.mask
    for key in ("loss", "grad", "advantages"):
        expected.pop(key, None)
    logprobs = masked(case.tensor("logp", dtype), mask)  # type: ignore[arg-type]
    old = masked(exp.old_logprobs, mask)  # type: ignore[arg-type]
    for key, want in expected.items():
        if key == "value_loss":
            close(out.metrics["loss/value"].total, want, dtype, key)
        elif key in ("returns", "value_targets"):
            returns = GaeLength.returns if key == "value_targets" else type(o.advantage).returns
            got = returns(o.advantage, o.advantage_inputs(exp, case.state(), None))  # type: ignore[arg-type]
            for row, values in enumerate(want):
                close(got[row, : len(values)], values, dtype, key)
        elif key == "lambda_policy":
            assert isinstance(o.advantage, GaeLength)
            close(length_adaptive_lambda(exp.lengths, o.advantage.length_alpha), want, dtype, key)
        elif key == "rewards_shaped":
            close(o.advantage_inputs(exp, case.state(), None).rewards, want, dtype, key)
        elif key == "baseline":
            advantages, _ = o.advantages(exp, case.state())
            for group, value in want.items():
                rows = exp.group_ids == int(group)
                got = (exp.rewards[rows] - advantages[rows, 0]).double()
                close(got, [value] * len(got), dtype, key)
        elif key == "sampler_weights":
            close(o.sampler(old, exp.sampler_logprobs, mask).weights, want, dtype, key)  # type: ignore[arg-type]
        elif key == "seq_ratio":
            ratio = importance_ratio("sequence", logprobs, old, mask)
            for row, value in want.items():
                close(ratio[int(row), 0], value, dtype, key)
        elif key in ("geo_ratio", "router_gamma"):
            check_geometric(case, exp, plan, logprobs, old, key, want, dtype)
        elif key == "cumulative":
            for group, (mean, std) in want.items():
                close(state.prompts[group][:2], [mean, std], dtype, key)
        elif key == "bounds":
            assert isinstance(o.trust_region, Dcpo)
            low, high = dcpo_bounds(
                old.exp(), o.trust_region.clip_low, o.trust_region.clip_high, o.trust_region.dual_clip
            )
            for place, pair in want.items():
                i, t = map(int, place.split(","))
                close(torch.stack([low[i, t], high[i, t]]), pair, dtype, key)
        elif key == "mean_entropy":
            close(mean_entropy(exp.entropy, mask), want, dtype, key)  # type: ignore[arg-type]
        elif key == "delta":
            assert state.initial_entropy is not None
            mean = mean_entropy(exp.entropy, mask)  # type: ignore[arg-type]
            close(o.entropy_signal.delta(mean, torch.ones_like(mean), state.initial_entropy), want, dtype, key)
        elif key == "signal":
            close(plan.advantages[:, 0], want, dtype, key)
        elif key == "lambda":
            close(masked(plan.token_weights, mask), want, dtype, key)
        else:
            pytest.fail(f"no check for the expected value {key!r}")


def check_geometric(
    case: golden.Case,
    exp: Experience,
    plan: Any,
    logprobs: Tensor,
    old: Tensor,
    key: str,
    want: Any,
    dtype: torch.dtype,
) -> None:
    region = case.objective.trust_region
    assert isinstance(region, Gmpo)
    gamma = None
    if isinstance(region, Rspo):
        gamma = router_factor(case.router(dtype), exp.router_logscores_old, region.router_floor)  # type: ignore[arg-type]
    if key == "router_gamma":
        close(masked(gamma, exp.mask), want, dtype, key)  # type: ignore[arg-type]
        return
    log_router = None if gamma is None else masked(gamma, exp.mask, 1.0).log()
    ratio = importance_ratio("geometric", logprobs, old, exp.mask)
    inputs = SurrogateInputs(ratio, plan.advantages, logprobs, old, exp.mask, log_router)
    y, _, _ = region.log_terms(inputs)
    geometric = masked(y, exp.mask).sum(1) / exp.lengths.clamp_min(1)
    if case.objective.sampler.kind != "none":  # the case's number holds the sampler weights
        weights = case.objective.sampler(old, exp.sampler_logprobs, exp.mask).weights  # type: ignore[arg-type]
        geometric = geometric + geometric_mean(weights, exp.mask)[:, 0].log()
    for row, value in want.items():
        close(geometric[int(row)].exp(), value, dtype, key)


@pytest.mark.parametrize("raw", RAW, ids=[c["name"] for c in RAW])
def test_nan_in_padding_changes_nothing(raw: dict[str, Any]) -> None:
    case = golden.make(raw)
    *_, out, grad = run(case, torch.float64)
    *_, out_nan, grad_nan = run(case, torch.float64, junk=float("nan"))
    assert torch.equal(out.loss, out_nan.loss)
    assert torch.equal(grad, grad_nan)
    assert torch.equal(out.token_weights, out_nan.token_weights)
    for key, (total, count) in out.metrics.items():
        assert torch.equal(torch.as_tensor(total), torch.as_tensor(out_nan.metrics[key].total)), key
        assert torch.equal(torch.as_tensor(count), torch.as_tensor(out_nan.metrics[key].weight)), key


# ------------------------------------------------------------------------------------------------ diagnostics

BATCHES = sorted(golden.load().get("diagnostics", {})) if golden.PATH.exists() else []


def mean(pair: Any) -> float:
    return float(pair.total) / float(pair.weight) if float(pair.weight) else float("nan")


def batch_inputs(batch: str) -> golden.Case:
    """The inputs of a golden batch, from any case that uses it and changes nothing."""
    raw = next(c for c in RAW if c["batch"] == batch and "old_logp" in c["inputs"])
    return golden.Case(raw["name"], golden.make(raw).objective, {}, dict(raw["inputs"]), {}, 0)


def length_gap(exp: Experience) -> float:
    """Mean length of incorrect minus correct completions, as the run logs them; those without a token left out."""
    rows = [i for i, length in enumerate(exp.lengths.tolist()) if length]
    completions = [Completion(i, 0, (0,) * int(exp.lengths[i]), (), "stop", 0) for i in rows]
    prompts = [Prompt(str(i), "", (0,)) for i in rows]
    reward = exp.rewards[rows]
    metrics = StepMetrics()
    add_rollout_metrics(
        metrics, Rollout(0, prompts, completions, [""] * len(rows), {"r": reward}, reward, 1, correct=reward > 0)
    )
    values = metrics.compute()
    return values.get("completions/incorrect_length", math.nan) - values.get("completions/correct_length", math.nan)


@pytest.mark.parametrize("batch", BATCHES)
def test_diagnostics(batch: str) -> None:
    want = dict(golden.load()["diagnostics"][batch])
    config = want.pop("config")
    if not any(c["batch"] == batch for c in RAW):
        pytest.skip(f"no case holds the inputs of batch {batch}")
    case = batch_inputs(batch)
    exp, mask = case.experience(torch.float64), case.experience(torch.float64).mask
    lp, old, ref, sampled = (case.tensor(k, torch.float64) for k in ("logp", "old_logp", "ref_logp", "sampler_logp"))
    assert lp is not None
    assert old is not None
    assert ref is not None
    assert sampled is not None
    assert exp.entropy is not None
    assert exp.token_ids is not None
    groups = Groups.of(exp.group_ids)
    advantages = GroupStd()(AdvantageInputs(exp, exp.rewards, groups))
    spread = masked(advantages[:, None].expand(mask.shape), mask)
    lp, old = masked(lp, mask), masked(old, mask)
    region = Clip(config["eps_low"], config["eps_high"], config["dual"])
    inputs = SurrogateInputs(importance_ratio("token", lp, old, mask), spread, lp, old, mask)
    clips = diagnostics.clip_fractions(region(inputs), mask)
    change = diagnostics.policy_change(lp, old, mask)
    mismatch, peaks = diagnostics.sampler_mismatch(old, sampled, mask)
    derived = diagnostics.derive({k: mean(v) for k, v in mismatch.items()})
    shares = diagnostics.entropies(exp.entropy, mask)
    conflicts = conflict_masks(exp.token_ids, exp.lengths, mask, advantages, groups)
    c = masked(old - sampled, mask).exp()
    got = {
        "clip_frac_low": mean(clips["policy/clip_frac/low"]),
        "clip_frac_high": mean(clips["policy/clip_frac/high"]),
        "dual_clip_frac": mean(clips["policy/clip_frac/dual"]),
        "kl_old_new_k1": mean(change["policy/approx_kl_k1"]),
        "kl_old_new_k3": mean(change["policy/approx_kl_k3"]),
        "kl_new_ref_k3": mean(diagnostics.reference_kl(lp, ref, mask)["policy/kl_ref_k3"]),
        "delta_pi_signed": mean(change["policy/delta_prob"]),
        "delta_pi_abs": mean(change["policy/delta_prob_abs"]),
        "mismatch_prob_mean": mean(mismatch["sampler_mismatch/prob_abs_diff"]),
        "mismatch_prob_max": float(peaks["sampler_mismatch/prob_abs_diff_max"]),
        "mismatch_logp_mean": mean(mismatch["sampler_mismatch/logprob_abs_diff"]),
        "mismatch_logp_max": float(peaks["sampler_mismatch/logprob_abs_diff_max"]),
        "mismatch_kl_k1": mean(mismatch["sampler_mismatch/kl_k1"]),
        "mismatch_kl_k3": mean(mismatch["sampler_mismatch/kl_k3"]),
        "ppl_learner": mean(mismatch["sampler_mismatch/learner_perplexity"]),
        "ppl_sampler": mean(mismatch["sampler_mismatch/sampler_perplexity"]),
        "chi2_token": derived["sampler_mismatch/chi2_token"],
        "chi2_seq": derived["sampler_mismatch/chi2_sequence"],
        "ess_token": derived["sampler_mismatch/ess"],
        "tis_truncated_frac": mean(diagnostics.mean_of((c > config["tis_cap"]).double(), mask)),
        "entropy_token_mean": mean(diagnostics.mean_of(exp.entropy, mask)),
        "entropy_seq_mean": mean(shares["policy/entropy_sequence"]),
        "high_entropy_seq_frac": mean(shares["policy/entropy_high_frac"]),
        "zero_gradient_group_frac": float(groups.uniform(exp.rewards).double().mean()),
        "conflict_token_rate": mean(diagnostics.mean_of(conflicts.either.double(), mask)),
        "length_gap_incorrect_minus_correct": length_gap(exp),
        "truncation_rate": mean(diagnostics.mean_of(exp.truncated.double(), torch.ones_like(exp.truncated))),
    }
    assert set(got) == set(want)
    for key, value in want.items():
        if value is None:
            assert math.isnan(got[key]), key
        else:
            assert got[key] == pytest.approx(value, abs=1e-9), key


# ------------------------------------------------------------------------------------------------ functions


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    found = golden.load().get("functions")
    if not found:
        pytest.skip(f"{golden.PATH} has no section 'functions'")
    return dict(found)


def test_soft_overlong(functions: dict[str, Any]) -> None:
    f = functions["soft_overlong"]
    got = soft_overlong(torch.tensor(f["lengths"]), f["L_max"], f["L_cache"])
    close(got, f["penalty"], torch.float64, "penalty")


def test_dcpo_bounds(functions: dict[str, Any]) -> None:
    for f in functions["dcpo_bounds"]:
        low, high = dcpo_bounds(torch.tensor(f["q"], dtype=torch.float64), f["eps_low"], f["eps_high"], f["r_max"])
        close(torch.stack([low, high]), f["bounds"], torch.float64, "bounds")


def test_length_adaptive_lambda(functions: dict[str, Any]) -> None:
    for f in functions["length_adaptive_lambda"]:
        close(length_adaptive_lambda(torch.tensor([f["length"]]), f["alpha"])[0], f["lambda"], torch.float64, "lambda")


def test_pass_at_k(functions: dict[str, Any]) -> None:
    for f in functions["pass_at_k"]:
        assert pass_at_k(f["n"], f["c"], f["k"]) == pytest.approx(f["value"], abs=1e-12)


def test_maj_at_k(functions: dict[str, Any]) -> None:
    for f in functions["maj_at_k"]:
        assert maj_at_k(f["answers"], f["correct"], f["k"]) == pytest.approx(f["value"], abs=1e-12)


def test_entropy_of_the_head(functions: dict[str, Any]) -> None:
    f = functions["entropy_of_logits"]
    logits = torch.tensor(f["logits"], dtype=torch.float64, requires_grad=True)
    first = torch.zeros(1, dtype=torch.long)
    logprobs, entropy, _ = head_stats(
        torch.nn.Identity(), logits[None], first, 1.0, entropy=True, entropy_gradient=True, squares=False, chunk=1
    )
    close(entropy[0], f["entropy"], torch.float32, "entropy")
    close(logprobs[0].exp(), f["probs"][0], torch.float32, "probability")
    gradient, score = (torch.autograd.grad(value[0], logits, retain_graph=True)[0] for value in (entropy, logprobs))
    close(gradient, f["d_entropy_d_logits"], torch.float32, "gradient")
    close(score, f["d_logp0_d_logits"], torch.float32, "score")


def test_group_advantages(functions: dict[str, Any]) -> None:
    f = functions["group_advantages"]
    r = torch.tensor(f["rewards"], dtype=torch.float64)
    ids = torch.zeros(len(r), dtype=torch.long)
    exp = Experience(torch.ones_like(ids), ids, r, ids.bool(), width=1)
    inputs = AdvantageInputs(exp, r, Groups.of(ids))
    for key, estimator in {
        "std_sample": GroupStd(), "std_population": GroupStd(std_ddof=0), "no_std": GroupMean(), "rloo": LeaveOneOut()
    }.items():  # fmt: skip
        close(estimator(inputs), f[key], torch.float64, key)


def test_gae(functions: dict[str, Any]) -> None:
    f = functions["gae"]
    rewards, values = (torch.tensor([f[k]], dtype=torch.float64) for k in ("rewards", "values"))
    for key, want in f.items():
        if key.startswith("lambda_"):
            got = gae(rewards, values, torch.ones_like(values).bool(), f["gamma"], float(key.removeprefix("lambda_")))
            close(got[0], want, torch.float64, key)


def test_gtpo_filter(functions: dict[str, Any]) -> None:
    for f in functions["gtpo_filter"]:
        signal = EntropySignal(entropy_filter="all")
        assert signal.delta(torch.tensor([f["H_i"]]), torch.ones(1), f["H_init"]).item() == f["delta"]


def test_label_flip(functions: dict[str, Any]) -> None:
    f = functions["label_flip"]
    got = flip_labels(torch.tensor(f["rewards"]), torch.tensor(f["flip"]))
    assert got.tolist() == f["noisy"]
