"""Causes are told before their signs: the size of steps, the objective's own terms, an end that never comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.callbacks import Diagnosis, HealthMonitor, monitors
from lit_grpo.objectives import Objective
from scripts import false_alarms
from tests.callbacks.synthetic import healthy, replay

Step = dict[str, float]
LARGE = "step_too_large"


def said(monitor: Any, change: Callable[[int], Step], steps: int = 120) -> list[tuple[int, str, str]]:
    """Step, kind and severity of all findings in a healthy run that ``change(t)`` overrides from the beginning."""
    run = [metrics | change(t) for t, metrics in enumerate(healthy(steps), 1)]
    return [(f.step, f.kind, f.severity) for f in replay(monitor, run)]


def knowing(monitor: Any, recipe: str = "grpo", **overrides: Any) -> Any:
    monitor.know(SimpleNamespace(objective=Objective.from_recipe(recipe, **overrides)))
    return monitor


# The size of a step.


@pytest.mark.parametrize(
    ("sizes", "entropy", "expected"),
    [
        ([0.029] * 20, 0.2, []),
        ([0.031] * 20, 0.2, [(5, LARGE, "warning")]),
        ([0.13] * 20, 0.2, [(3, LARGE, "critical")]),
        ([0.13, 0.13, 0.11] * 6, 0.2, [(5, LARGE, "warning")]),
        ([0.001] * 5 + [0.25] + [0.001] * 14, 0.2, [(6, LARGE, "warning")]),
        # One rollout carries the mean: single tokens that a small model was sure of.
        ([0.001] * 4 + [0.2] + [0.001] * 10, 0.2, []),
        # Random weights take off: a large step, and a small share of the entropy.
        ([0.08] * 20, 2.5, []),
        ([0.08] * 20, 0.7, [(5, LARGE, "warning")]),
    ],
    ids=["small", "large", "huge", "not in a row", "one huge", "one outlier", "random weights", "a share of entropy"],
)
def test_a_step_is_too_large_in_nats_and_as_a_share_of_the_entropy(sizes, entropy, expected):
    run = [{"policy/step_kl": size, "policy/entropy": entropy} for size in sizes]
    assert [(f.step, f.kind, f.severity) for f in replay(monitors.StepSizeMonitor(), run)] == expected


def test_a_step_that_is_too_large_needs_no_entropy_and_began_where_the_large_steps_did():
    (found,) = replay(monitors.StepSizeMonitor(), [{"policy/step_kl": s} for s in [0.01] * 6 + [0.05] * 5])
    assert (found.kind, found.severity, found.onset) == (LARGE, "warning", 7)
    assert found.evidence[0].value == pytest.approx((0.01 * 2 + 0.05 * 3) / 5), "raised with three of the five"


def test_a_step_that_left_no_reward_behind_explains_the_lost_signal():
    """Qwen on GSM8K at thirty times the rate: after three steps no answer is right, and no step is taken any more."""
    healthy = {"groups/count": 16.0, "groups/all_correct_frac": 0.0, "policy/entropy": 0.3}
    run = [
        healthy | {"reward": r, "groups/all_wrong_frac": w, "groups/zero_advantage_frac": w, "policy/step_kl": s}
        for r, w, s in ((0.07, 0.6, 0.01), (0.07, 0.5, 0.1), (0.19, 0.4, 0.34), (0.06, 0.6, 0.9))
    ]
    lost = {"reward": 0.0, "groups/all_wrong_frac": 1.0, "groups/zero_advantage_frac": 1.0}
    run += [healthy | lost for _ in range(30)]
    monitor, said = HealthMonitor(), []
    for step, metrics in enumerate(run, 1):
        diagnosis = monitor.observe(step, metrics)[1]
        said += [] if diagnosis is None else [(step, diagnosis.name, diagnosis.severity, diagnosis.onset)]
    assert said[0] == (3, "learning_rate_too_high", "warning", 3)
    critical = [one for one in said if one[2] == "critical"]
    assert critical[0][0] <= 9
    assert {one[1] for one in critical} == {"learning_rate_too_high"}, "and it stays so when no signal is left at 24"


def test_steps_that_were_small_and_have_grown_are_another_finding():
    """The median of the first eight is 2e-3: a mean above ten times that, and above the bound, has grown."""
    for first, kind in ((2e-3, "step_growing"), (6e-3, LARGE)):
        run = [{"policy/step_kl": size} for size in [first] * 8 + [0.05] * 8]
        assert [f.kind for f in replay(monitors.StepSizeMonitor(), run)] == [kind]
    short = [{"policy/step_kl": size} for size in [2e-3] * 3 + [0.2] * 4]
    assert {f.kind for f in replay(monitors.StepSizeMonitor(), short)} == {LARGE}, "too early to say that they grew"


# The objective's own entropy term.


def entropy_moves(factor: float, from_: int = 20) -> Callable[[int], Step]:
    return lambda t: {"policy/entropy": 0.4 * (1 if t < from_ else factor)}


@pytest.mark.parametrize(
    ("coefficient", "factor", "kind"),
    [
        (0.5, 1.4, "entropy_paid"),
        (0.5, 1.2, None),
        (0.5, 0.5, None),
        (-0.5, 0.7, "entropy_punished"),
        (-0.5, 0.84, None),
        (-0.5, 1.4, None),
        (0.0, 1.4, None),
        (0.0, 0.5, None),
    ],
)
def test_an_entropy_that_follows_its_own_term_in_the_loss_is_told(coefficient, factor, kind):
    monitor = knowing(monitors.EntropyMonitor(), entropy_coef=coefficient)
    found = [f for f in said(monitor, entropy_moves(factor), 60) if f[1] in ("entropy_paid", "entropy_punished")]
    assert found == ([] if kind is None else [(22, kind, "warning")])


@pytest.mark.parametrize(("groups", "rollouts"), [(64, 3), (8, 3), (6, 4), (1, 24)])
def test_an_entropy_term_is_blamed_by_24_groups_and_three_rollouts_at_least(groups, rollouts):
    def told(lasting: int) -> list[tuple[int, str, str]]:
        def at(t: int) -> Step:
            moved = 20 <= t < 20 + lasting
            return {"policy/entropy": 0.6 if moved else 0.4, "groups/count": float(groups)}

        found = said(knowing(monitors.EntropyMonitor(), entropy_coef=0.5), at, 60)
        return [f for f in found if f[1] == "entropy_paid"]

    assert told(rollouts - 1) == []
    assert told(rollouts) == [(19 + rollouts, "entropy_paid", "warning")]


@pytest.mark.parametrize("coefficient", [0.01, -0.01])
@pytest.mark.parametrize("prompts", false_alarms.BATCHES)
def test_noise_is_not_taken_for_an_entropy_term(coefficient, prompts):
    found = false_alarms.count(prompts, "0/1", "stationary", 3, 150, coefficient)
    assert not {"entropy_paid", "entropy_punished"} & {kind for kind, _ in found}


@pytest.mark.parametrize("factor", [1.4, 0.5])
def test_without_facts_about_the_objective_no_term_is_blamed(factor):
    kinds = {kind for _, kind, _ in said(monitors.EntropyMonitor(), entropy_moves(factor), 60)}
    assert not kinds & {"entropy_paid", "entropy_punished"}


def test_an_entropy_that_is_the_reward_is_punished():
    """The recipe pays for certainty (``entropy_reward``) and has no coefficient."""
    monitor = knowing(monitors.EntropyMonitor(), "grpo", entropy_reward=True)
    assert monitor.facts.entropy_coef == -1
    assert (22, "entropy_punished", "warning") in said(monitor, entropy_moves(0.5), 60)


def test_an_entropy_term_is_critical_where_the_reward_is_lost_or_the_policy_random():
    draw = random.Random(0)

    def lost(factor: float) -> Callable[[int], Step]:
        return lambda t: entropy_moves(factor)(t) | {"reward": (0.7 if t < 30 else 0.4) + draw.gauss(0, 0.01)}

    for coefficient, factor in ((0.5, 1.5), (-0.5, 0.5)):
        monitor = knowing(monitors.EntropyMonitor(), entropy_coef=coefficient)
        name = "entropy_paid" if coefficient > 0 else "entropy_punished"
        assert [f[2] for f in said(monitor, lost(factor), 60) if f[1] == name] == ["warning", "critical"]
    # Above 2 * 1.25 times its beginning, with the reward as it was.
    for factor, severity in ((2.4, "warning"), (2.6, "critical")):
        monitor = knowing(monitors.EntropyMonitor(), entropy_coef=0.5)
        assert (22, "entropy_paid", severity) in said(monitor, entropy_moves(factor), 60)


# An end that never comes.


def cut(truncated: float, wrong: float, from_: int = 1) -> Callable[[int], Step]:
    def at(t: int) -> Step:
        return {"completions/truncated_frac": truncated, "groups/all_wrong_frac": wrong} if t >= from_ else {}

    return at


def test_completions_that_never_end_are_told_from_those_that_no_longer_do():
    def kinds(change: Callable[[int], Step]) -> list[tuple[int, str, str]]:
        return [f for f in said(monitors.LengthMonitor(), change, 30) if f[1] == "never_ended"]

    assert kinds(cut(0.9, 1.0)) == [(5, "never_ended", "warning")]
    assert kinds(cut(0.9, 1.0, from_=3)) == [], "a policy that ended once has lost it"
    assert kinds(cut(0.4, 1.0)) == [], "most of them end"
    assert kinds(cut(0.9, 0.9)) == [], "some answers are right"


def test_a_limit_that_is_too_low_names_the_lost_signal_and_the_repetition_that_come_of_it():
    watcher = HealthMonitor()
    named = []
    for t, metrics in enumerate(healthy(40), 1):
        lost = {"groups/zero_advantage_frac": 1.0, "groups/all_correct_frac": 0.0, "completions/repetition_frac": 0.8}
        diagnosis = watcher.observe(t, metrics | cut(0.95, 1.0)(t) | lost)[1]
        if diagnosis is not None and diagnosis.severity == "critical":
            named.append(diagnosis.name)
    assert named
    assert set(named) == {"truncation"}


# Objectives of one sign.


def one_sided(upward: float, sizes: Callable[[int], float], **more: float) -> Callable[[int], Step]:
    signs = {"policy/advantage_abs": 1.0, "policy/advantage_abs_max": 1.0, "policy/upward_frac": upward}
    return lambda t: signs | {"policy/step_kl": sizes(t)} | more


def grown(t: int) -> float:
    return 1e-3 if t <= 20 else 9e-3


@pytest.mark.parametrize(("upward", "kind"), [(1.0, "pl"), (0.0, "nl"), (0.5, None)])
@pytest.mark.parametrize("constant", [False, True])
def test_steps_that_grow_under_a_loss_of_one_sign_are_told(upward, kind, constant):
    monitor = monitors.CollapseDetector(token_normalised=constant)
    found = said(monitor, one_sided(upward, grown), 60)
    # The median of three passes 8 times the usual step with the second large one.
    assert found == ([] if kind is None else [(22, f"{'tn' if constant else 'c'}_{kind}", "warning")])


def test_steps_that_stay_or_have_a_baseline_are_left_alone():
    detector = monitors.CollapseDetector
    assert said(detector(), one_sided(0.0, lambda t: 6e-3), 60) == []
    assert said(detector(), one_sided(0.0, lambda t: 1e-4 if t <= 20 else 4e-3), 60) == [], "large enough to matter"
    baseline = {"policy/advantage_abs": 0.6, "policy/advantage_abs_max": 2.5}
    assert said(detector(), lambda t: one_sided(0.0, grown)(t) | baseline, 60) == []


def test_negatives_alone_that_cut_more_and_more_completions_are_told_before_the_reward_falls():
    draw = random.Random(0)

    def at(t: int, reward: float) -> Step:
        share = 0.02 + 0.01 * draw.random() + 0.3 * min(1, max(0, t - 30) / 10)
        return one_sided(0.0, lambda t: 1e-3)(t) | {"completions/truncated_frac": share, "reward": reward}

    found = said(monitors.CollapseDetector(), lambda t: at(t, 0.6 + draw.gauss(0, 0.01)), 50)
    assert [(kind, severity) for _, kind, severity in found] == [("c_nl", "critical")]
    rising = said(monitors.CollapseDetector(), lambda t: at(t, 0.01 * t + draw.gauss(0, 0.01)), 50)
    assert rising == [], "longer answers that pay are how a task is learned"


def test_a_shape_names_its_cause_by_what_the_loss_pushes_and_leaves_the_name_to_causes_where_it_pushes_both_ways():
    """Entropy, length and diversity fall with the reward, and before that the steps had become too large."""

    def at(upward: float, t: int) -> Step:
        done = min(1.0, max(0, t - 20) / 10)
        return {
            "policy/entropy": 1.2 - 0.8 * done,
            "completions/length": 100 - 80 * done,
            "groups/distinct_frac": 0.9 - 0.6 * done,
            "reward": 0.6 - 0.5 * done + 0.01 * (-1) ** t,
            "policy/upward_frac": upward,
            "policy/step_kl": 1e-3 if t < 16 else 0.3,
        }

    def last_critical(upward: float, step_kl: bool) -> Diagnosis:
        monitor = HealthMonitor()
        seen = [{k: v for k, v in at(upward, t).items() if step_kl or k != "policy/step_kl"} for t in range(45)]
        said = [monitor.observe(step, metrics)[1] for step, metrics in enumerate(seen, 1)]
        return [diagnosis for diagnosis in said if diagnosis and diagnosis.severity == "critical"][-1]

    assert last_critical(1.0, step_kl=True).name == "C_PL"
    assert last_critical(0.5, step_kl=True).name == "learning_rate_too_high"
    shapes = {finding.kind for finding in last_critical(0.5, step_kl=True).findings}
    assert "minimal_entropy" in shapes
    assert "c_pl" not in shapes


def test_more_and_more_cut_completions_are_said_although_the_reward_rises():
    draw = random.Random(3)

    def at(rise: float, t: int) -> Step:
        cut = 0.45 + rise * max(0, t - 20) / 20
        return {
            "completions/truncated_frac": min(1.0, cut + draw.gauss(0, 0.05)),
            "completions/length": 230.0 + draw.gauss(0, 5),
            "reward": 2.4 + 0.01 * t,
        }

    found = said(monitors.LengthMonitor(), lambda t: at(0.5, t), 60)
    assert ("length_growing", "warning") in [(kind, severity) for _, kind, severity in found]
    steady = said(monitors.LengthMonitor(), lambda t: at(0.0, t), 60)
    assert "length_growing" not in [kind for _, kind, _ in steady]


# What is learned looks like a collapse.


@pytest.mark.parametrize("scale", [(1.0, 0.0), (20.0, 0.0), (2.0, -1.0), (1.0, -1.0), (1.0, -0.8)])
def test_a_signature_says_nothing_while_the_reward_is_at_its_best(scale):
    """Entropy, length and diversity fall together; the reward rises from 0.3 to 0.8 of its scale, or falls back."""
    factor, shift = scale

    def at(then: float, t: int) -> Step:
        done = min(1.0, max(0, t - 40) / 10)
        return {
            "policy/entropy": 0.4 - 0.37 * done,
            "completions/length": 100 - 80 * done,
            "groups/distinct_frac": 0.9 - 0.6 * done,
            "reward": factor * (0.3 + 0.5 * min(1, t / 40) + then * done + 0.01 * (-1) ** t) + shift,
        }

    assert said(monitors.CollapseDetector(), lambda t: at(0.0, t), 60) == []
    found = said(monitors.CollapseDetector(), lambda t: at(-0.3, t), 60)
    assert ("minimal_entropy", "critical") in [(kind, severity) for _, kind, severity in found]


# The sampler.


def test_a_gap_that_is_meant_must_last_three_rollouts():
    def gaps(*rollouts: int, stale: float) -> list[tuple[int, str, str]]:
        def at(t: int) -> Step:
            return {"rollout/staleness": stale} | ({"sampler_mismatch/kl_k3": 0.3} if t in rollouts else {})

        return said(monitors.MismatchMonitor(), at, 40)

    assert gaps(20, 21, 23, 24, stale=1.0) == []
    assert gaps(20, 21, 22, stale=1.0) == [(22, "sampler_mismatch", "warning")]
    assert gaps(20, stale=0.0) == [(20, "sampler_mismatch", "critical")]


def test_engine_and_learner_that_drift_apart_under_the_same_weights_are_told():
    """The first rollout's gap is 0.01: 2.5 times that for six rollouts is a warning, ten times for three critical."""

    def gap(later: float, rollouts: int, stale: float = 0.0) -> list[tuple[int, str, str]]:
        def at(t: int) -> Step:
            large = 20 <= t < 20 + rollouts
            return {"sampler_mismatch/logprob_abs_diff": later if large else 0.01, "rollout/staleness": stale}

        return said(monitors.MismatchMonitor(), at, 40)

    assert gap(0.03, 20) == [(25, "sampler_mismatch", "warning")]
    assert gap(0.03, 5) == []
    assert gap(0.02, 20) == []
    assert gap(0.03, 20, stale=1.0) == [], "weights that are meant to differ do"
    assert gap(0.11, 20) == [(22, "sampler_mismatch", "critical")]


# Signal and reward.


def test_a_task_that_is_solved_for_good_is_told_and_one_that_is_nearly_solved_is_information():
    def solved(share: float) -> list[tuple[str, str]]:
        groups = {"groups/zero_advantage_frac": share, "groups/all_correct_frac": share, "groups/all_wrong_frac": 0.0}
        found = said(monitors.SignalMonitor(), lambda t: groups if t > 20 else {}, 80)
        return [(kind, severity) for _, kind, severity in found if kind in ("zero_gradient", "solved")]

    assert solved(0.9) == [("solved", "info")]
    assert solved(1.0) == [("solved", "info"), ("solved", "warning")]


def test_terms_that_diverge_while_the_whole_reward_falls_are_no_hacking():
    draw = random.Random(3)

    def at(t: int, whole: float) -> Step:
        done = min(1.0, max(0, t - 60) / 10)
        return {
            "reward/exact_match": 0.8 - 0.6 * done + draw.gauss(0, 0.01),
            "reward/format": 0.4 + 0.3 * done + draw.gauss(0, 0.01),
            "reward": 0.6 + whole * done + draw.gauss(0, 0.01),
        }

    def kinds(whole: float) -> set[str]:
        return {kind for _, kind, _ in said(monitors.RewardHackingMonitor(), lambda t: at(t, whole), 100)}

    assert "reward_terms_diverge" in kinds(0.1)
    assert "reward_terms_diverge" not in kinds(-0.3)


def test_a_rule_on_a_count_needs_three_rollouts_and_is_critical_after_five():
    def repeated(rollouts: int) -> list[tuple[int, str, str]]:
        def at(t: int) -> Step:
            return {"completions/repetition_frac": 0.9} if 20 <= t < 20 + rollouts else {}

        return said(monitors.ThresholdMonitor(), at, 40)

    assert repeated(2) == []
    assert repeated(4) == [(22, "repetition", "warning")]
    assert repeated(5) == [(22, "repetition", "warning"), (24, "repetition", "critical")]


def test_steps_of_any_size_are_worth_having_while_the_reward_is_at_its_best():
    """The first rollouts of SmolLM2 on sums: three huge steps that teach it the task, and then the same without."""
    kl = [0.79, 0.84, 1.55, 0.9, 0.8]
    for rewards, severities in (
        ([0.09, 0.5, 0.84, 0.86, 0.9], {"warning"}),
        ([0.5, 0.3, 0.1, 0.0, 0.0], {"warning", "critical"}),
    ):
        monitor = monitors.StepSizeMonitor()
        found = [
            finding
            for step, (value, reward) in enumerate(zip(kl, rewards, strict=True), 1)
            for finding in monitor.observe(step, {"policy/step_kl": value, "reward": reward, "policy/entropy": 0.3})
        ]
        assert {finding.severity for finding in found} == severities
