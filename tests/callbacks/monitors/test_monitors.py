"""Each monitor speaks of its own trouble and is silent on a healthy run. Replayed without Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from lit_grpo.callbacks import Finding, HealthMonitor, monitors
from lit_grpo.callbacks.diagnosis.diagnosis import merge
from lit_grpo.callbacks.diagnosis.kinds import finding_kind
from lit_grpo.callbacks.monitors.rules import RULES
from lit_grpo.errors import UserError
from tests.callbacks.synthetic import Change, changed, healthy, replay

NAN = float("nan")


def ramp(then: float, now: float, over: int = 10) -> Any:
    return lambda k: then + (now - then) * min(1.0, k / over)


def grows(**changes: Any) -> Change:
    """Each key: a number, or a function of the rollouts since the trouble began."""
    return lambda k: {
        key.replace("__", "/"): float(value(k) if callable(value) else value) for key, value in changes.items()
    }


SIGNS: dict[str, Any] = {"policy__advantage_abs": 1.0, "policy__advantage_abs_max": 1.0}


def without_critic(change: Change) -> Change:
    """The same in a run that has no critic."""
    return lambda k: change(k) | {"critic/value_correct": NAN, "critic/value_outside_frac": NAN}


TROUBLES: list[tuple[str, str, str, Change]] = [
    # monitor, kind, severity, what goes wrong from rollout 60 on
    ("EntropyMonitor", "entropy_high", "warning", grows(policy__entropy=ramp(0.3, 2.0))),
    ("EntropyMonitor", "entropy_rising", "info", grows(policy__entropy=ramp(0.45, 0.75, 30))),
    ("EntropyMonitor", "entropy_low", "critical", grows(policy__entropy=0.01, groups__all_wrong_frac=0.5)),
    ("EntropyMonitor", "exploration_over", "info", grows(policy__entropy=0.01, reward=0.99)),
    ("GradientNormMonitor", "non_finite", "warning", lambda k: {"optim/grad_norm": NAN} if k == 5 else {}),
    ("GradientNormMonitor", "non_finite", "critical", grows(optim__grad_norm=NAN)),
    ("GradientNormMonitor", "non_finite", "critical", lambda k: {"policy/entropy": NAN} if k == 5 else {}),
    ("GradientNormMonitor", "gradient_spikes", "warning", lambda k: {"optim/grad_norm": 15.0} if k == 5 else {}),
    ("GradientNormMonitor", "gradient_spikes", "critical", grows(optim__grad_norm=7.0)),
    ("GradientNormMonitor", "gradient_spikes", "critical", grows(critic__grad_norm=14.0)),
    ("GradientNormMonitor", "gradient_spikes", "critical", grows(optim__grad_norm=7.0, reward=ramp(0.9, 0.4))),
    ("GradientNormMonitor", "gradient_vanished", "warning", grows(optim__grad_norm=1e-5)),
    ("GradientNormMonitor", "updates_too_large", "critical", grows(optim__update_to_weight_ratio=0.4)),
    (
        "CollapseDetector",
        "minimal_entropy",
        "critical",
        grows(
            policy__entropy=ramp(0.3, 0.02),
            completions__length=ramp(110, 20),
            groups__distinct_frac=ramp(0.8, 0.1),
            reward=ramp(0.8, 0.1),
        ),
    ),
    (
        "CollapseDetector",
        "maximal_entropy",
        "critical",
        grows(
            policy__entropy=ramp(0.3, 3),
            completions__length=ramp(110, 480),
            optim__grad_norm=ramp(1, 9),
            reward=ramp(0.8, 0),
        ),
    ),
    (
        "CollapseDetector",
        "maximal_entropy",
        "critical",
        grows(
            policy__entropy=ramp(0.3, 3),
            completions__truncated_frac=ramp(0, 0.9),
            completions__repetition_frac=ramp(0.1, 0.9),
            reward=ramp(0.8, 0),
        ),
    ),
    (
        "CollapseDetector",
        "c_pl",
        "critical",
        grows(
            policy__entropy=ramp(0.3, 0.02),
            completions__length=ramp(110, 20),
            groups__distinct_frac=ramp(0.8, 0.1),
            reward=ramp(0.8, 0.1),
            policy__upward_frac=1,
        ),
    ),
    (
        "CollapseDetector",
        "c_nl",
        "critical",
        grows(
            policy__entropy=ramp(0.3, 3),
            completions__length=ramp(110, 480),
            optim__grad_norm=ramp(1, 9),
            reward=ramp(0.8, 0),
            policy__upward_frac=0,
        ),
    ),
    (
        "CollapseDetector",
        "c_nl",
        "critical",
        grows(
            policy__entropy=ramp(0.3, 3),
            completions__truncated_frac=ramp(0, 0.9),
            completions__repetition_frac=ramp(0.1, 0.9),
            reward=ramp(0.8, 0),
            policy__upward_frac=0,
        ),
    ),
    ("CollapseDetector", "unstable", "critical", grows(reward=ramp(0.8, 0.3), val__reward=NAN)),
    ("CollapseDetector", "reward_lost", "warning", grows(reward=ramp(0.8, 0.3))),
    (
        "CollapseDetector",
        "reward_lost",
        "critical",
        grows(reward=ramp(0.8, 0.3), val__reward=NAN, policy__step_kl=1e-3),
    ),
    ("StepSizeMonitor", "policy_still", "warning", grows(policy__step_kl=1e-12)),
    (
        "RewardMonitor",
        "reward_jumped",
        "warning",
        grows(reward=0.3, policy__step_kl=1e-4, completions__length=100.0, groups__zero_std_frac=0.4),
    ),
    (
        "RewardMonitor",
        "reward_jumped",
        "critical",
        grows(reward=0.0, policy__step_kl=1e-4, completions__length=100.0, groups__zero_std_frac=1.0),
    ),
    (
        "SignalMonitor",
        "source_uniform",
        "warning",
        grows(source__a__reward=0.0, source__a__prompts_frac=0.5, source__b__reward=0.7, source__b__prompts_frac=0.5),
    ),
    ("SignalMonitor", "none_right", "info", grows(groups__all_wrong_frac=0.9)),
    (
        "MismatchMonitor",
        "support_cut",
        "warning",
        grows(sampler_mismatch__weight=0.98, sampler_mismatch__weight_sq=0.964, completions__tokens=5000.0),
    ),
    (
        "CollapseDetector",
        "advantage_inverted",
        "critical",
        grows(reward=ramp(0.8, 0.3), sanity__inverted_advantage_frac=0.4),
    ),
    ("CollapseDetector", "c_pl", "critical", grows(reward=ramp(0.8, 0.3), policy__upward_frac=1, **SIGNS)),
    ("CollapseDetector", "c_nl", "critical", grows(reward=ramp(0.8, 0.3), policy__upward_frac=0, **SIGNS)),
    ("CollapseDetector", "c_nl", "critical", grows(reward=ramp(0.8, 0.3), policy__entropy=ramp(0.25, 0.4), **SIGNS)),
    ("CollapseDetector", "c_pl", "critical", grows(reward=ramp(0.8, 0.3), policy__entropy=ramp(0.25, 0.2), **SIGNS)),
    (
        "CollapseDetector",
        "c_pl",
        "critical",
        grows(reward=ramp(0.8, 0.6), optim__grad_norm=1.8, policy__upward_frac=1, **SIGNS),
    ),
    (
        "CollapseDetector",
        "c_nl",
        "critical",
        grows(
            policy__entropy=ramp(0.25, 0.6),
            completions__length=ramp(110, 140),
            completions__truncated_frac=0.1,
            policy__upward_frac=0,
            **SIGNS,
        ),
    ),
    (
        "LengthMonitor",
        "length_growing",
        "critical",
        grows(
            completions__length=ramp(110, 140),
            completions__truncated_frac=0.1,
            policy__entropy=ramp(0.25, 0.6),
            reward=ramp(0.8, 1.5),
        ),
    ),
    (
        "LengthMonitor",
        "length_growing",
        "critical",
        grows(completions__length=ramp(110, 300), completions__truncated_frac=0.4, reward=ramp(0.8, 0.5)),
    ),
    ("LengthMonitor", "length_growing", "warning", grows(completions__length=ramp(110, 300), reward=ramp(0.8, 0.5))),
    ("LengthMonitor", "length_growing", "warning", grows(completions__length=ramp(110, 300, 40), reward=0.76)),
    ("LengthMonitor", "length_falling", "critical", grows(completions__length=ramp(110, 20), reward=ramp(0.8, 0.5))),
    ("LengthMonitor", "length_gap", "warning", grows(completions__incorrect_length=ramp(110, 300))),
    ("LengthMonitor", "length_gap", "info", grows(completions__incorrect_length=ramp(110, 180, 30), reward=0.76)),
    ("LengthMonitor", "truncated", "warning", lambda k: {"completions/truncated_frac": 0.4} if k == 5 else {}),
    ("LengthMonitor", "truncated", "warning", grows(completions__truncated_frac=0.15)),
    ("RatioMonitor", "policy_change", "warning", grows(policy__approx_kl_k3=0.1)),
    ("RatioMonitor", "policy_change", "warning", grows(policy__ratio_gap=0.3)),
    ("RatioMonitor", "policy_change", "info", grows(policy__delta_prob_abs=ramp(0.01, 0.05))),
    (
        "RatioMonitor",
        "clipping",
        "info",
        grows(policy__clip_frac__low=0.2, policy__clip_frac__high=0.15, policy__ratio_gap=0.1),
    ),
    ("RatioMonitor", "clipping", "info", grows(policy__clip_frac__high=0.08)),
    ("MismatchMonitor", "sampler_mismatch", "critical", grows(sampler_mismatch__kl_k3=0.3)),
    ("MismatchMonitor", "sampler_mismatch", "critical", grows(sampler_mismatch__logprob_abs_diff=0.15)),
    ("MismatchMonitor", "sampler_mismatch", "critical", grows(sampler_mismatch__learner_perplexity=1.8)),
    ("MismatchMonitor", "sampler_mismatch", "warning", grows(sampler_mismatch__kl_k3=0.3, rollout__staleness=1)),
    ("MismatchMonitor", "sampler_mismatch", "critical", grows(sampler_mismatch__ess=0.05, rollout__staleness=1)),
    ("MismatchMonitor", "impossible_tokens", "critical", grows(sampler_mismatch__impossible_frac=0.01)),
    (
        "MismatchMonitor",
        "impossible_tokens",
        "warning",
        lambda k: {"sampler_mismatch/impossible_frac": 1e-4} if k == 5 else {},
    ),
    ("ThresholdMonitor", "tokens_missing", "critical", grows(sanity__missing_tokens_frac=0.02)),
    ("ThresholdMonitor", "groups_mixed", "critical", grows(sanity__mixed_prompts_frac=0.5)),
    ("SignalMonitor", "zero_gradient", "warning", grows(groups__zero_advantage_frac=0.8, groups__all_wrong_frac=0.45)),
    (
        "SignalMonitor",
        "solved",
        "info",
        grows(groups__zero_advantage_frac=0.8, groups__all_wrong_frac=0.0, groups__all_correct_frac=0.8),
    ),
    ("SignalMonitor", "all_wrong", "warning", grows(groups__zero_advantage_frac=0.8, groups__all_wrong_frac=0.7)),
    ("SignalMonitor", "all_wrong", "critical", grows(groups__zero_advantage_frac=1, groups__all_wrong_frac=1)),
    ("SignalMonitor", "small_batch", "info", grows(groups__count=16)),
    ("SignalMonitor", "reward_noise", "critical", grows(sanity__reward_contradiction_frac=0.37)),
    ("SignalMonitor", "reward_noise", "critical", without_critic(grows(sanity__advantage_contradiction_frac=0.37))),
    ("SignalMonitor", "reward_inverted", "critical", grows(sanity__inverted_advantage_frac=1)),
    ("SignalMonitor", "reward_failures", "warning", grows(reward_errors__timeout_frac__exact_match=0.3)),
    ("SignalMonitor", "reward_failures", "critical", grows(reward_errors__failed_frac__exact_match=0.8)),
    (
        "ConflictMonitor",
        "prefix_pushed_down",
        "warning",
        grows(groups__prefix_pushed_down_frac=0.9, reward__format=ramp(0.95, 0.7)),
    ),
    ("ConflictMonitor", "conflicts", "info", grows(policy__conflict_frac=0.6)),
    ("CriticMonitor", "value_sign", "warning", grows(critic__value_incorrect=-0.3)),
    ("CriticMonitor", "value_sign", "critical", grows(critic__value_incorrect=-0.3, reward=ramp(0.8, 0.5))),
    ("CriticMonitor", "value_out_of_range", "critical", grows(critic__value_outside_frac=0.9, critic__value_correct=4)),
    ("CriticMonitor", "value_unexplained", "warning", grows(critic__explained_variance=-2)),
    ("CriticMonitor", "value_unexplained", "critical", grows(critic__explained_variance=-40)),
    ("CriticMonitor", "values_contradict", "critical", grows(sanity__advantage_contradiction_frac=1)),
    (
        "RewardHackingMonitor",
        "reward_terms_diverge",
        "critical",
        grows(reward__format=1.1, reward__exact_match=ramp(0.8, 0.4)),
    ),
    ("RewardHackingMonitor", "held_out_falls", "critical", grows(val__reward=0.3)),
    ("RewardHackingMonitor", "format_lost", "warning", grows(reward__format=0.7)),
    ("ThresholdMonitor", "repetition", "critical", grows(completions__repetition_frac=0.8)),
    ("ThresholdMonitor", "repetition", "critical", grows(completions__top_token_frac=0.9)),
    (
        "ThresholdMonitor",
        "repetition",
        "warning",
        lambda k: {"completions/longest_run_frac": 0.9} if 5 <= k < 8 else {},
    ),
    ("RewardMonitor", "reward_gone", "critical", grows(reward=0.0, groups__all_wrong_frac=1.0)),
    ("RewardMonitor", "reward_falling", "warning", grows(reward=ramp(0.8, 0.65, 30))),
    ("RewardMonitor", "reward_chaotic", "warning", lambda k: {"reward": 0.5 + 0.3 * (-1) ** k}),
    ("EntropyMonitor", "entropy_spent", "info", grows(policy__entropy=ramp(0.25, 0.1, 40), reward=0.75)),
    (
        "EntropyMonitor",
        "entropy_spent",
        "warning",
        grows(policy__entropy=ramp(0.25, 0.1, 40), reward=0.5, groups__all_wrong_frac=0.4),
    ),
    ("StepSizeMonitor", "step_growing", "warning", grows(policy__step_kl=lambda k: 4e-4 if k <= 8 else 0.1)),
    ("StepSizeMonitor", "step_too_large", "critical", grows(policy__step_kl=0.5, reward=0.1)),
    ("StepSizeMonitor", "step_too_large", "warning", grows(policy__step_kl=0.05, policy__entropy=0.3)),
    ("ThresholdMonitor", "empty_completions", "warning", grows(completions__empty_frac=0.8)),
    ("ThresholdMonitor", "no_answer", "info", grows(completions__no_answer_frac=0.95)),
    ("ThresholdMonitor", "length_paid", "warning", grows(groups__reward_length_corr=0.7)),
    ("ThresholdMonitor", "updates_turn_back", "warning", grows(optim__update_cosine=-0.7)),
    ("ThroughputMonitor", "slow", "warning", grows(time__tokens_per_second=500, time__generate=12)),
    ("ThroughputMonitor", "memory", "warning", grows(memory__peak_gib=lambda k: 10 * 1.02**k)),
    (
        "KLMonitor",
        "kl_late",
        "info",
        grows(policy__kl_ref_k3=ramp(0.06, 2), policy__entropy=ramp(0.3, 1.5), reward=ramp(0.8, 0.4)),
    ),
]


def make(name: str) -> Any:
    return getattr(monitors, name)()


@pytest.mark.parametrize(
    ("name", "kind", "severity", "change"),
    TROUBLES,
    ids=[f"{n}-{k}-{s}-{i}" for i, (n, k, s, _) in enumerate(TROUBLES)],
)
def test_trouble_is_noticed(name, kind, severity, change):
    findings = replay(make(name), changed(change))
    grave = [f for f in findings if f.kind == kind and f.severity == severity]
    assert grave, [(f.kind, f.severity, f.step) for f in findings]
    first = grave[0]
    assert first.step > 60
    assert first.onset <= first.step
    assert first.monitor == name
    assert first.evidence
    assert first.remedies
    for evidence in first.evidence:
        assert evidence.window >= 1


@pytest.mark.parametrize("name", monitors.__all__)
@pytest.mark.parametrize("seed", range(3))
def test_silent_on_a_healthy_run(name, seed):
    findings = replay(make(name), healthy(seed=seed))
    assert [f for f in findings if f.severity != "info"] == []


def test_a_fall_without_a_fall_of_entropy_is_called_no_entropy_collapse():
    """As in the first rollouts of an objective that pays for certainty: the reward is lost, entropy still rises."""
    watcher, said = HealthMonitor(), []
    run = changed(grows(reward=ramp(0.8, 0.3), sanity__inverted_advantage_frac=0.4, policy__entropy=ramp(0.25, 0.35)))
    for step, metrics in enumerate(run, 1):
        said.append(watcher.observe(step, metrics)[1])
    critical = next(d for d in said if d is not None and d.severity == "critical")
    assert critical.name == "advantage_inverted"
    assert "the advantages do not follow the rewards" in critical.explanation
    assert "entropy collapse" not in critical.explanation
    assert watcher.remedies[critical.name].adds == "pay_for_reward"


def test_a_run_that_learns_the_format_first_is_not_stopped_for_having_no_right_answer_yet():
    run = changed(grows(groups__zero_std_frac=0.1, groups__all_correct_frac=0.0, groups__all_wrong_frac=1.0))
    found = [f.severity for f in replay(make("SignalMonitor"), run) if f.kind in ("all_wrong", "none_right")]
    assert found == ["info"]


def test_a_critic_that_explains_a_little_less_than_nothing_is_not_worse_than_a_constant():
    run = changed(grows(critic__explained_variance=-0.05))
    said = [f for f in replay(make("CriticMonitor"), run) if f.kind == "value_unexplained"]
    assert said == []


def test_without_a_verdict_nothing_is_said_of_solved_prompts():
    run = changed(grows(policy__entropy=0.01, groups__all_wrong_frac=NAN, groups__all_correct_frac=NAN))
    without = [{k: v for k, v in metrics.items() if not k.startswith("groups/all_")} for metrics in run]
    (first, *_) = [f for f in replay(make("EntropyMonitor"), without) if f.kind == "entropy_low"]
    assert first.severity == "info"
    assert "solved" not in first.explanation
    assert not [f for f in replay(make("SignalMonitor"), without) if f.kind == "all_wrong"]


def test_a_norm_that_grows_with_the_share_of_groups_that_have_a_gradient_is_no_spike():
    """A policy takes off from nothing: 10 % of its groups have an advantage, then nearly all, and the norm follows."""

    def run(rate: float) -> list[Finding]:
        steps = changed(lambda k: {})[:50] + changed(lambda k: {})[:10]
        for step, metrics in enumerate(steps):
            share, per_group = (0.1, 1.0) if step < 50 else (0.7, rate)
            metrics |= {"groups/zero_advantage_frac": 1 - share, "optim/grad_norm": per_group * share}
        return [f for f in replay(make("GradientNormMonitor"), steps) if f.kind == "gradient_spikes"]

    assert run(1.0) == []
    # Six times more for each group as well: that is a spike.
    assert [f.onset for f in run(6.0)][:1] == [51]
    # What a critic's gradient is made of is every group.
    without = changed(lambda k: {"groups/zero_advantage_frac": 0.3, "critic/grad_norm": 14.0} if k >= 0 else {})
    assert [f for f in replay(make("GradientNormMonitor"), without) if f.kind == "gradient_spikes"]


def test_the_title_of_a_diagnosis_is_true_of_each_finding_that_speaks_for_it():
    for monitor, kind, _, change in TROUBLES:
        (first, *_) = [f for f in replay(make(monitor), changed(change)) if f.kind == kind]
        if first.about.diagnosis.name == "no_signal":
            assert kind in ("all_wrong", "zero_gradient")
        if "solved" in first.explanation and "unsolved" not in first.explanation:
            assert first.about.diagnosis.name == "solved", kind


def test_every_monitor_and_every_kind_is_tried():
    assert {name for name, *_ in TROUBLES} == set(monitors.__all__)
    tried = {kind for _, kind, *_ in TROUBLES}
    # What has tests of its own, below or in test_causes.py, is left out here; a kind that nothing tries shows.
    declared = {kind.name for name in monitors.__all__ for kind in getattr(monitors, name).findings}
    declared |= {rule.name for rule in RULES}
    assert declared - tried == {
        "first_update_ratio",
        "first_update_clip",
        "tn_pl",
        "tn_nl",
        "held_out_flat",
        "reward_flat",
        "never_ended",
        "entropy_paid",
        "entropy_punished",
    }
    assert tried <= declared


def test_the_order_of_decision_is_clear_and_every_diagnosis_is_described():
    kinds = [kind for name in monitors.__all__ for kind in getattr(monitors, name).findings]
    kinds += {rule.name: rule.kind for rule in RULES}.values()
    ranks = [kind.rank for kind in kinds]
    assert len(set(ranks)) == len(ranks)
    for kind in kinds:
        assert finding_kind(kind.name) == kind, "two monitors declare it"
        assert kind.diagnosis.title
        assert kind.diagnosis.likely_cause
    described = {kind.diagnosis.name: kind.diagnosis for kind in kinds}
    assert all(described[kind.diagnosis.name] is kind.diagnosis for kind in kinds), "two descriptions of one diagnosis"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("tn_pl", grows(policy__entropy=ramp(0.3, 3), completions__length=ramp(110, 480), optim__grad_norm=ramp(1, 9))),
        ("tn_nl", grows(policy__entropy=ramp(0.3, 3), completions__length=ramp(110, 20))),
        ("tn_pl", grows(policy__entropy=ramp(0.3, 0.01), completions__length=ramp(110, 480))),
        (
            "tn_pl",
            grows(
                policy__entropy=ramp(0.3, 0.01),
                completions__length=ramp(110, 20),
                groups__distinct_frac=ramp(0.8, 0.1),
                policy__upward_frac=1.0,
            ),
        ),
    ],
)
def test_a_token_normaliser_swaps_the_sign_of_the_length(kind, change):
    """The reward stands a sixth below its best: at its best these would be signs of learning."""

    def lost(k: int) -> dict[str, float]:
        return {"policy/upward_frac": 1.0 if kind == "tn_pl" else 0.0} | change(k) | signs | {"reward": 0.68}

    signs = {"policy/advantage_abs": 1.0, "policy/advantage_abs_max": 1.0}
    findings = replay(monitors.CollapseDetector(token_normalised=True), changed(lost))
    assert [f.kind for f in findings] == [kind]
    assert replay(monitors.CollapseDetector(token_normalised=True), changed(change)) == []


@pytest.mark.parametrize("key", ["policy/ratio_gap", "policy/clip_frac/low"])
def test_the_only_update_of_a_rollout_has_ratio_one(key):
    single = {"policy/ratio_gap": 0.0, "policy/clip_frac/low": 0.0, "policy/clip_frac/high": 0.0}
    run = [m | single | {"optim/steps": float(t)} for t, m in enumerate(healthy(20), 1)]
    assert replay(monitors.RatioMonitor(), run) == []
    run[12][key] = 0.1
    found = replay(monitors.RatioMonitor(), run)
    assert [(f.step, f.severity) for f in found] == [(13, "critical")]
    assert found[0].kind == ("first_update_ratio" if key == "policy/ratio_gap" else "first_update_clip")


def test_several_updates_may_move_the_ratio():
    run = [m | {"policy/ratio_gap": 0.1} for m in healthy(30)]  # four optimizer steps a rollout
    assert replay(monitors.RatioMonitor(), run) == []


def limits(monitor: monitors.GradientNormMonitor, *norms: float) -> list[dict[str, float]]:
    return [monitor.limit_update(None, None, {"optim/grad_norm": norm, "loss": 0.0}) for norm in norms]


def test_a_spike_is_clipped_to_the_median_before_the_step_and_nothing_else_is():
    monitor = monitors.GradientNormMonitor()
    assert limits(monitor, *(1.0 + 0.1 * (t % 3) for t in range(20))) == [{}] * 20
    assert limits(monitor, 50.0) == [{"optim/grad_norm": 1.1}]
    assert monitor.limit_update(None, None, {"optim/grad_norm": 1.0, "critic/grad_norm": 3.0}) == {}
    assert limits(monitors.GradientNormMonitor(), 50.0) == [{}], "nothing to compare with"
    silent = monitors.GradientNormMonitor(clip_spikes=False)
    assert limits(silent, *[1.0] * 20, 50.0) == [{}] * 21
    assert not hasattr(monitor, "veto_update"), "what is not finite is left out by the learner itself"


@pytest.mark.parametrize("stays", [17.7, 1e6])
def test_a_norm_that_stays_is_the_new_normal_after_three_steps(stays):
    """It used to be vetoed until max_skipped_steps ended the run."""
    monitor = monitors.GradientNormMonitor()
    limits(monitor, *[1.0] * 20)
    assert limits(monitor, *[stays] * 30) == [{"optim/grad_norm": 1.0}] * 3 + [{}] * 27
    assert limits(monitor, 100 * stays) == [{"optim/grad_norm": stays}], "and spikes are those of the new normal"
    assert limits(monitor, 0.6, stays) == [{}] * 2


def test_spikes_that_are_not_in_a_row_make_no_new_normal():
    monitor = monitors.GradientNormMonitor()
    limits(monitor, *[1.0] * 20)
    for _ in range(10):
        assert limits(monitor, 50.0, 50.0, 1.0) == [{"optim/grad_norm": 1.0}] * 2 + [{}]


def test_a_monitor_that_is_cut_while_the_norm_jumps_clips_the_same_steps():
    whole, cut = monitors.GradientNormMonitor(), monitors.GradientNormMonitor()
    limits(whole, *[1.0] * 20, 20.0, 20.0)
    cut.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert limits(cut, *[20.0] * 3) == limits(whole, *[20.0] * 3) == [{"optim/grad_norm": 1.0}, {}, {}]


def test_an_alarm_that_goes_on_is_one_finding_and_one_that_returns_is_another():
    monitor = monitors.LengthMonitor()
    run = healthy(120)
    for t in [*range(20, 40), *range(80, 90)]:
        run[t]["completions/truncated_frac"] = 0.4
    assert [f.step for f in replay(monitor, run)] == [21, 81]


def test_missing_keys_are_silence():
    for name in monitors.__all__:
        assert replay(make(name), [{"something/else": 1.0}] * 40) == []


def test_the_initial_entropy_is_that_of_the_first_prompts():
    monitor = monitors.EntropyMonitor(initial_prompts=100)
    for t in range(1, 10):
        monitor.observe(t, {"policy/entropy": float(t), "policy/entropy_sequence": 9.0, "groups/count": 64.0})
    assert monitor.initial_entropy == 1.5
    assert monitors.EntropyMonitor().observe(1, {"policy/entropy": 1.0, "policy/entropy_initial": 0.7}) == []


@pytest.mark.parametrize("measured", [True, False])
def test_the_entropy_is_compared_with_the_same_kind_of_mean(measured):
    """Long completions of low entropy beside short ones of high: the mean over tokens is a quarter of the other."""
    monitor = monitors.EntropyMonitor()
    still = {"policy/entropy": 0.2, "policy/entropy_sequence": 0.8, "groups/count": 64.0, "reward": 0.5}
    if measured:
        still["policy/entropy_initial"] = 0.2 / 0.25
    assert [f for t in range(1, 40) for f in monitor.observe(t, still)] == []
    doubled = still | {"policy/entropy": 0.45, "policy/entropy_sequence": 1.8}
    found = [f for t in range(40, 60) for f in monitor.observe(t, doubled)]
    (high,) = [finding for finding in found if finding.kind == "entropy_high"]
    assert high.evidence[0].metric == ("policy/entropy_sequence" if measured else "policy/entropy")


def test_plumbing_is_named_before_theory_and_the_rest_is_evidence():
    trouble = {
        "policy/entropy": ramp(0.3, 3),
        "completions/length": ramp(110, 480),
        "optim/grad_norm": ramp(1, 9),
        "reward": ramp(0.8, 0),
    }
    run = changed(grows(**trouble, sampler_mismatch__kl_k3=0.3), steps=75)
    crew = [make(name) for name in monitors.__all__]
    for t, metrics in enumerate(run, 1):
        for monitor in crew:
            monitor.observe(t, metrics)
    together = [f for monitor in crew for f in monitor.active()]
    diagnosis = merge(together)
    assert diagnosis is not None
    assert diagnosis.name == "stale_or_mismatched_sampler"
    assert "maximal_entropy" in {f.kind for f in diagnosis.findings}
    without = merge([f for f in together if f.monitor != "MismatchMonitor"])
    assert without is not None
    assert without.name == "entropy_explosion"
    assert "entropy" in without.explanation
    assert "→" in without.explanation


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: monitors.EntropyMonitor(threshold=0),
        lambda: monitors.EntropyMonitor(actions={"fatal": "stop"}),
        lambda: monitors.EntropyMonitor(actions={"critical": "explode"}),
        lambda: monitors.EntropyMonitor(actions={"critical": "rollback"}),
    ],
)
def test_bad_arguments_are_refused_by_name(wrong):
    with pytest.raises(UserError, match="EntropyMonitor"):
        wrong()


def test_a_policy_that_takes_off_has_steep_gradients_and_is_not_stopped():
    """Seen with random weights: the gradient norm is six times its median while the reward doubles."""

    def run(reward: Callable[[int], float]) -> list[dict[str, float]]:
        steep = [step | {"optim/grad_norm": 7.0} if t > 60 else step for t, step in enumerate(healthy(66), 1)]
        return [step | {"reward": reward(t) * step["reward"]} for t, step in enumerate(steep, 1)]

    monitor = "GradientNormMonitor"
    assert {f.severity for f in replay(make(monitor), run(lambda t: 0.1 + 0.1 * max(0, t - 58)))} == {"warning"}
    assert "critical" in {f.severity for f in replay(make(monitor), run(lambda t: 0.1))}
