"""What is said of runs that look unusual is true: each test was a wrong word, or silence, in a run that was trained."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lit_grpo.callbacks import Finding, merge, monitors
from lit_grpo.callbacks.diagnosis.kinds import finding_kind
from lit_grpo.callbacks.monitors.facts import facts_of
from lit_grpo.callbacks.monitors.history import History
from lit_grpo.callbacks.monitors.jump import AFTER, find_jump
from lit_grpo.callbacks.monitors.monitor import Monitor
from lit_grpo.learner.rollout_metrics import reward_length_correlation
from tests.callbacks.synthetic import Change, healthy

STILL = {"policy/step_kl": 1e-4, "completions/length": 100.0}


def said(monitor: Monitor, change: Change) -> list[Finding]:
    run = [metrics | change(step - 61) for step, metrics in enumerate(healthy(), 1)]
    return [f for step, metrics in enumerate(run, 1) for f in monitor.observe(step, metrics)]


def late(**values: float) -> Change:
    """Change from rollout 60 on."""
    return lambda k: STILL | {key.replace("__", "/"): value for key, value in values.items()} if k >= 0 else STILL


# ------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("kind", "untrue"),
    [
        ("gradient_spikes", "updates are too large"),
        ("clipping", "updates are too large"),
        ("entropy_rising", "explosion"),
        ("entropy_spent", "collapse"),
        ("length_gap", "explosion"),
        ("length_paid", "exploded"),
        ("memory", "slow"),
        ("format_lost", "without the thing"),
        ("held_out_flat", "one reward term"),
        ("reward_inverted", "contradict"),
        ("minimal_entropy", "only reinforces"),
        ("maximal_entropy", "only pushes"),
        ("zero_gradient", "hardly any"),
        ("conflicts", "pushed down"),
    ],
)
def test_a_finding_alone_is_not_told_in_the_words_of_a_graver_one(kind: str, untrue: str) -> None:
    told = merge([Finding("Monitor", kind, 10, 5, "warning", (), "what was seen")])
    assert told is not None
    assert untrue not in told.explanation


def test_the_words_are_those_of_the_finding_that_gives_the_name_and_survive_json() -> None:
    mild = Finding("Monitor", "gradient_spikes", 10, 5, "warning", (), "a spike")
    cause = Finding("Monitor", "step_too_large", 10, 5, "warning", (), "a step")
    both = merge([mild, cause])
    assert both is not None
    assert both.explanation.startswith(f"{cause.about.title}, began at step 5")
    again = Finding.from_json(mild.to_json())
    assert (again.about.title, again.about.likely_cause) == (mild.about.title, mild.about.likely_cause)
    assert again.about.title == finding_kind("gradient_spikes").title


def test_advantages_that_differ_are_not_rewards_that_differ() -> None:
    def step(k: int) -> dict[str, float]:
        return {"sanity/advantage_contradiction_frac": 0.4, "critic/value_outside_frac": float("nan")}

    (found,) = [f for f in said(monitors.SignalMonitor(), step) if f.kind == "reward_noise"]
    assert "advantages" in found.about.title
    assert "verifier" not in found.about.likely_cause


def test_completions_that_run_into_the_limit_while_the_reward_rises_are_told_so() -> None:
    found = said(monitors.LengthMonitor(), lambda k: {
        "completions/truncated_frac": min(0.9, max(0.02, k / 30)), "reward": 0.5 + max(0, k) / 100} )  # fmt: skip
    titles = [f.about.title for f in found if f.kind == "length_growing"]
    assert titles
    assert all("limit" in title and "reward" not in title for title in titles)


# ------------------------------------------------------------------------------------------------- jumps


def test_a_verifier_that_dies_is_critical_and_no_learning_rate() -> None:
    change = late(reward=0.0, groups__all_wrong_frac=1.0, groups__zero_std_frac=1.0, groups__zero_advantage_frac=1.0)
    (found,) = [f for f in said(monitors.RewardMonitor(), change) if f.kind == "reward_jumped"]
    assert (found.severity, found.step) == ("critical", 60 + AFTER)
    assert "verifier" in found.about.likely_cause
    assert not [f for f in said(monitors.CollapseDetector(), change) if f.kind in ("unstable", "reward_lost")]


def test_harder_prompts_are_a_warning_and_stop_nothing() -> None:
    for name in monitors.__all__:
        found = said(getattr(monitors, name)(), late(reward=0.3))
        assert not [f for f in found if f.severity == "critical"], name
    (jumped,) = [f for f in said(monitors.RewardMonitor(), late(reward=0.3)) if f.kind == "reward_jumped"]
    assert jumped.severity == "warning"
    assert "prompts" in jumped.about.likely_cause


def test_a_reward_that_a_large_step_has_taken_is_no_jump() -> None:
    def change(k: int) -> dict[str, float]:
        return {"policy/step_kl": 0.2, "reward": 0.3} if k >= 0 else {"policy/step_kl": 0.2}

    assert not [f for f in said(monitors.RewardMonitor(), change) if f.kind == "reward_jumped"]
    assert [f for f in said(monitors.CollapseDetector(), change) if f.severity == "critical"]


def test_a_slope_is_no_jump_and_without_the_size_of_steps_nothing_is_known() -> None:
    steps = list(range(1, 40))
    flat = {key: (steps, [value] * 39) for key, value in
            (("reward/std", 0.4), ("policy/step_kl", 1e-5), ("completions/length", 20.0))}  # fmt: skip
    noise = [0.01 * (-1) ** k for k in steps]
    jump = [0.8 + n if k <= 36 else 0.3 + n for k, n in zip(steps, noise, strict=True)]
    slope = [0.8 - 0.05 * max(0, k - 30) + n for k, n in zip(steps, noise, strict=True)]
    assert find_jump(steps, jump, flat) is not None
    assert find_jump(steps, slope, flat) is None
    assert find_jump(steps, jump, flat | {"policy/step_kl": ([], [])}) is None


def test_rewards_from_before_a_jump_are_forgotten_and_that_survives_a_checkpoint() -> None:
    monitor = monitors.RewardMonitor()
    said(monitor, late(reward=0.3))
    assert max(monitor.history.values["reward"]) < 0.35
    again = monitors.RewardMonitor()
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert again.history.jump == monitor.history.jump is not None
    assert History(["reward"], 5).jump is None


# ------------------------------------------------------------------------------------------------- silence


def test_a_policy_that_stands_still_is_noticed_and_the_end_of_a_schedule_is_not() -> None:
    (found,) = said(monitors.StepSizeMonitor(), lambda k: {"policy/step_kl": 1e-13, "optim/lr": 1e-6})
    assert (found.kind, found.severity) == ("policy_still", "warning")

    def ends(k: int) -> dict[str, float]:
        return {"policy/step_kl": 1e-13 if k > 0 else 1e-3, "optim/lr": 1e-12 if k > 0 else 1e-6}

    assert said(monitors.StepSizeMonitor(), ends) == []


def test_one_of_two_sources_without_signal_is_named() -> None:
    def step(k: int) -> dict[str, float]:
        return {"source/a/reward": 0.6 + 0.01 * (k % 7), "source/a/prompts_frac": 0.5,
                "source/b/reward": 0.0, "source/b/prompts_frac": 0.5}  # fmt: skip

    (found,) = [f for f in said(monitors.SignalMonitor(), step) if f.kind == "source_uniform"]
    assert "of b," in found.explanation
    alone = list(said(monitors.SignalMonitor(), lambda k: {"source/b/reward": 0.0, "source/b/prompts_frac": 1.0}))
    assert not [f for f in alone if f.kind == "source_uniform"]


def test_an_engine_that_leaves_tokens_out_is_noticed_and_an_old_or_hot_one_is_not_called_so() -> None:
    def step(mean: float, square: float) -> dict[str, float]:
        return {"sampler_mismatch/weight": mean, "sampler_mismatch/weight_sq": square, "completions/tokens": 2000.0}

    (found,) = said(monitors.MismatchMonitor(), lambda k: step(0.98, 0.964))
    assert (found.kind, found.severity, found.step) == ("support_cut", "warning", 5)
    assert "top_p" in found.about.likely_cause
    assert said(monitors.MismatchMonitor(), lambda k: step(0.98, 0.99)) == []
    assert said(monitors.MismatchMonitor(), lambda k: step(0.9995, 0.9991)) == []


def test_a_pay_for_brevity_beside_a_form_that_is_longer_is_no_pay_for_length() -> None:
    lengths = [10, 11, 12, 30, 31, 32] * 8
    form = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 8
    brevity = [-0.001 * n for n in lengths]
    total = [f + b for f, b in zip(form, brevity, strict=True)]
    assert reward_length_correlation(total, lengths, [True] * 48, 6)[0] > 7
    assert reward_length_correlation(total, lengths, [True] * 48, 6, [form, brevity])[0] == pytest.approx(-8.0)
    assert reward_length_correlation(total, lengths, [False] * 48, 6, [form, brevity]) == (0.0, 0)


# ------------------------------------------------------------------------------------------------- scales


def test_a_critic_of_rewards_from_minus_one_is_not_below_all_of_them() -> None:
    """Where the module knows the range of its rewards, that is the range."""
    values = {"critic/value_incorrect": -0.8, "critic/value_correct": 0.9, "critic/value_outside_frac": 0.0,
              "critic/explained_variance": 0.5}  # fmt: skip
    monitor = monitors.CriticMonitor()
    assert [f.kind for f in said(monitor, lambda k: values)] == ["value_sign"]
    monitor = monitors.CriticMonitor()
    monitor.facts = facts_of(SimpleNamespace(objective_state=SimpleNamespace(reward_range=(-1.0, 1.0))))
    assert said(monitor, lambda k: values) == []
    assert [f.kind for f in said(monitor, lambda k: values | {"critic/value_incorrect": -1.3})] == ["value_sign"]


def test_rewards_below_zero_on_average_have_a_range_below_zero() -> None:
    values = {"critic/value_incorrect": -0.9, "critic/value_correct": -0.2, "critic/value_outside_frac": 0.0,
              "critic/explained_variance": 0.5, "reward": -0.6, "reward/std": 0.5}  # fmt: skip
    assert said(monitors.CriticMonitor(), lambda k: values) == []


def test_a_loss_with_a_constant_normaliser_that_pushes_both_ways_is_not_called_one_sided() -> None:
    def step(k: int) -> dict[str, float]:
        if k < 0:
            return {}
        part = max(0.01, 1 - k / 20)
        return {"policy/entropy": 0.3 * part, "completions/length": 110 * part, "groups/distinct_frac": 0.8 * part,
                "reward": 0.4}  # fmt: skip

    kinds = {f.kind for f in said(monitors.CollapseDetector(token_normalised=True), step)}
    assert "minimal_entropy" in kinds
    assert not kinds & {"tn_pl", "tn_nl", "c_pl", "c_nl"}


def test_healthy_runs_have_none_of_it() -> None:
    for seed in range(3):
        for name in ("RewardMonitor", "StepSizeMonitor", "SignalMonitor", "CollapseDetector"):
            monitor = getattr(monitors, name)()
            run = [metrics | STILL for metrics in healthy(120, seed)]
            kinds = {f.kind for step, m in enumerate(run, 1) for f in monitor.observe(step, m)}
            assert not kinds & {"reward_jumped", "policy_still", "source_uniform", "reward_lost"}
