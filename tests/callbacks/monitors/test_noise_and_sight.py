"""What is healthy is left alone on any scale and with any batch, and what was sampled is seen apart from what was kept.

Each case is one that the monitors of an earlier state got wrong (see docs/monitors.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.callbacks import HealthMonitor, monitors
from lit_grpo.callbacks.monitors.facts import UNKNOWN, facts_of
from lit_grpo.objectives import Objective
from scripts import false_alarms
from tests.callbacks.synthetic import healthy, replay

Step = dict[str, float]


def with_facts(monitor: Any, objective: Any) -> Any:
    monitor.know(SimpleNamespace(objective=objective))
    return monitor


def found(monitor: Any, change: Callable[[int], Step], steps: int = 120, seed: int = 0) -> list[tuple[str, str]]:
    run = [metrics | change(t) for t, metrics in enumerate(healthy(steps, seed), 1)]
    return [(f.kind, f.severity) for f in replay(monitor, run)]


def test_facts_are_those_of_the_objective_and_unknown_elsewhere():
    assert facts_of(SimpleNamespace()) == UNKNOWN
    assert facts_of(SimpleNamespace(objective="mse")) == UNKNOWN
    for recipe, constant, sequence in (
        ("grpo", False, False),
        ("dr_grpo", True, False),
        ("tnpl", True, False),
        ("gspo", False, True),
    ):
        facts = facts_of(SimpleNamespace(objective=Objective.from_recipe(recipe)))
        assert (facts.token_normalised, facts.sequence_ratio, facts.label_noise) == (constant, sequence, False), recipe
    own = Objective.from_recipe("pl", aggregation="per_prompt_set_const")
    assert facts_of(SimpleNamespace(objective=own)).token_normalised, "by what it does, not by its name"
    assert facts_of(SimpleNamespace(objective=Objective.from_recipe("grpo", label_noise=0.1))).label_noise
    assert facts_of(SimpleNamespace(objective=Objective.from_recipe("olmo3"))).sampler_corrected


@pytest.mark.parametrize("prompts", false_alarms.BATCHES)
@pytest.mark.parametrize("scale", false_alarms.SCALES)
def test_false_alarms_are_rare(prompts, scale):
    """900 healthy rollouts of each batch and scale: no critical finding, at most two untrue warnings (gradients)."""
    for trend in false_alarms.TRENDS:
        said = false_alarms.count(prompts, scale, trend, 3, 150)
        untrue = {pair: n for pair, n in said.items() if false_alarms.is_false(pair[0], prompts, trend)}
        assert [pair for pair in untrue if pair[1] == "critical"] == []
        assert sum(n for (_, severity), n in untrue.items() if severity == "warning") <= 2, untrue


def test_one_token_that_contradicts_among_200_000_is_silence():
    one = {
        "sampler_mismatch/prob_abs_diff_max": 0.94,
        "sampler_mismatch/logprob_abs_diff": 0.008,
        "sampler_mismatch/ess": 0.9999,
        "sampler_mismatch/impossible_frac": 1 / 200_000,
        "completions/tokens": 200_000.0,
    }
    assert found(monitors.MismatchMonitor(), lambda t: one) == []


def test_sampling_in_another_precision_with_tis_runs_and_is_told():
    """The chi-square bound is left all the time; what is applied has nearly all of its effective sample size."""
    quantized = {"sampler_mismatch/chi2_token": 1.5, "sampler_mismatch/ess": 0.4}
    corrected = quantized | {"sampler_mismatch/applied_ess": 0.93}
    cases: list[tuple[Any, Step, str]] = [
        (monitors.MismatchMonitor(), quantized | {"sampler_mismatch/applied_ess": 1.0}, "critical"),
        (monitors.MismatchMonitor(), corrected, "warning"),
        (monitors.MismatchMonitor(), corrected | {"sampler_mismatch/applied_ess": 0.05}, "critical"),
        (with_facts(monitors.MismatchMonitor(), Objective.from_recipe("olmo3")), corrected, "warning"),
        (with_facts(monitors.MismatchMonitor(), Objective.from_recipe("grpo")), corrected, "critical"),
    ]
    for monitor, numbers, severity in cases:

        def step(t: int, numbers: Step = numbers) -> Step:
            return numbers

        assert found(monitor, step) == [("sampler_mismatch", severity)]


def test_gspo_clips_twelve_percent_of_the_tokens_and_is_left_alone():
    gspo = {"policy/clip_frac/low": 0.06, "policy/clip_frac/high": 0.12, "policy/ratio_gap": 4e-4}
    assert found(monitors.RatioMonitor(), lambda t: gspo) == []
    assert found(with_facts(monitors.RatioMonitor(), Objective.from_recipe("gspo")), lambda t: gspo) == []
    token = gspo | {"policy/ratio_gap": 0.05}
    assert found(monitors.RatioMonitor(), lambda t: token) == [("clipping", "info")]
    wild = gspo | {"policy/clip_frac/high": 0.5}
    assert found(monitors.RatioMonitor(), lambda t: wild) == [("clipping", "info")]


def evaluations(truth: Callable[[int], float], seed: int, n: int = 100) -> Callable[[int], Step]:
    """Every tenth rollout a held-out set of n questions, drawn anew, with its standard error."""
    draw = random.Random(seed)
    now: Step = {}

    def at(t: int) -> Step:
        if t % 10 == 1:
            right = sum(draw.random() < truth(t) for _ in range(n)) / n
            error = max(right * (1 - right), 0.01) ** 0.5 / n**0.5
            now.update({"val/reward": right, "val/set/reward": right, "val/set/reward/se": error})
        return dict(now)

    return at


@pytest.mark.parametrize("n", [30, 100])
def test_flat_held_out_accuracy_is_no_fall(n):
    """20 evaluations each; 89 to 100 % of such runs were called reward hacking."""
    called = [
        any(kind == "held_out_falls" for kind, _ in found(monitors.RewardHackingMonitor(), run, 200))
        for run in (evaluations(lambda t: 0.5, seed, n) for seed in range(20))
    ]
    assert not any(called)


def test_held_out_accuracy_that_falls_under_a_flat_training_reward_is_noticed():
    at = evaluations(lambda t: 0.6 if t < 100 else 0.3, 0)
    said = found(monitors.RewardHackingMonitor(), lambda t: {"reward": 0.5 + 0.01 * (-1) ** t} | at(t), 200)
    assert said == [("held_out_falls", "critical")]


def test_held_out_accuracy_that_stays_while_training_gains_is_noticed():
    at = evaluations(lambda t: 0.4, 1, 1000)
    said = found(monitors.RewardHackingMonitor(), lambda t: {"reward": 0.4 + 0.002 * t + 0.01 * (-1) ** t} | at(t), 200)
    assert said == [("held_out_flat", "warning")]


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_reward_terms_that_stay_do_not_diverge_and_those_that_do_are_noticed_on_any_scale(scale, noise):
    draw = random.Random(5)

    def terms(t: int, moved: float) -> Step:
        return {
            "reward/exact_match": scale * (0.6 - 0.5 * moved + draw.gauss(0, noise)),
            "reward/format": scale * (0.4 + 0.5 * moved + draw.gauss(0, noise)),
        }

    monitor = monitors.RewardHackingMonitor
    assert "reward_terms_diverge" not in dict(found(monitor(), lambda t: terms(t, 0.0), 300))
    if noise < 0.1:
        said = found(monitor(), lambda t: terms(t, min(1.0, max(0, t - 40) / 20)), 120)
        assert dict(said)["reward_terms_diverge"] == "critical"


def test_a_critic_of_rewards_up_to_20_is_judged_on_their_scale():
    large = {"reward": 14.0, "reward/std": 5.0, "critic/value_correct": 17.0, "critic/value_incorrect": 6.0}
    assert found(monitors.CriticMonitor(), lambda t: large) == []
    assert found(monitors.CriticMonitor(), lambda t: large | {"critic/value_incorrect": -0.5}) == []
    assert found(monitors.CriticMonitor(), lambda t: large | {"critic/value_incorrect": -4.0}) == [
        ("value_sign", "warning")
    ]


DAPO = {"groups/all_wrong_frac": 0.0, "groups/all_correct_frac": 0.0, "groups/zero_advantage_frac": 0.0, "reward": 0.5}


@pytest.mark.parametrize("logged", [True, False])
def test_under_dynamic_sampling_a_collapse_of_entropy_is_not_taken_for_solved_prompts(logged):
    sampled = {"sampling/prompts": 320.0, "sampling/kept": 64.0, "sampling/surplus": 0.0}
    failing = DAPO | sampled | {"sampling/reward": 0.3}
    solved = DAPO | sampled | {"sampling/reward": 0.88}
    if logged:
        failing |= {"sampling/all_wrong_frac": 0.6, "sampling/all_correct_frac": 0.2}
        solved |= {"sampling/all_wrong_frac": 0.02, "sampling/all_correct_frac": 0.78}
    for numbers, kind, severity in ((failing, "entropy_low", "critical"), (solved, "exploration_over", "info")):
        low = [{"policy/entropy": 0.4} | numbers] * 30 + [{"policy/entropy": 0.01} | numbers] * 30
        said = {f.kind: f.severity for f in replay(monitors.EntropyMonitor(), low)}
        assert said == {kind: severity}


def test_under_dynamic_sampling_a_reward_that_is_lost_is_seen_in_what_was_sampled():
    def step(t: int) -> Step:
        return DAPO | {"sampling/reward": (0.7 if t < 60 else 0.2) + 0.01 * (-1) ** t, "sampling/prompts": 320.0}

    fallen = [kind for kind, _ in found(monitors.CollapseDetector(), step)]
    assert {"unstable", "reward_lost"} & set(fallen)
    assert found(monitors.CollapseDetector(), lambda t: DAPO) == []


def test_labels_that_are_flipped_on_purpose_are_no_broken_verifier():
    def step(t: int) -> Step:
        return {"sanity/advantage_contradiction_frac": 0.45, "critic/value_outside_frac": float("nan")}

    noisy = with_facts(monitors.SignalMonitor(), Objective.from_recipe("grpo", label_noise=0.25))
    assert ("reward_noise", "critical") not in found(noisy, step)
    assert ("reward_noise", "critical") in found(monitors.SignalMonitor(), step)
    broken = with_facts(monitors.SignalMonitor(), Objective.from_recipe("grpo", label_noise=0.25))
    assert ("reward_noise", "critical") in found(broken, lambda t: {"sanity/reward_contradiction_frac": 0.3})


@pytest.mark.parametrize("recipe", ["tnnl", "dr_grpo"])
def test_the_collapse_detector_knows_a_token_normaliser_from_the_objective(recipe):
    detector = with_facts(monitors.CollapseDetector(), Objective.from_recipe(recipe))
    assert detector.token_normalised
    assert not with_facts(detector, Objective.from_recipe("grpo")).token_normalised, "a remedy changed it"
    assert monitors.CollapseDetector(token_normalised=True).token_normalised


def signs(change: Callable[[int], Step], steps: int = 300) -> dict[str, str]:
    watcher = HealthMonitor()
    said: dict[str, str] = {}
    for t, metrics in enumerate(healthy(steps), 1):
        for finding in watcher.observe(t, metrics | change(t))[0]:
            said[finding.kind] = finding.severity
    return said


def test_a_reward_that_never_rises_is_told_and_one_that_has_risen_is_only_information():
    draw = random.Random(0)
    assert signs(lambda t: {"reward": 0.4 + draw.gauss(0, 0.03)})["reward_flat"] == "warning"
    assert signs(lambda t: {"reward": 0.4 + 0.2 * min(1, t / 60) + draw.gauss(0, 0.03)}).get("reward_flat") != "warning"


@pytest.mark.parametrize("sd", [0.15, 0.23])
def test_a_chaotic_reward_is_told(sd):
    draw = random.Random(0)
    said = signs(lambda t: {"reward": 0.5 + draw.uniform(-1, 1) * sd * 3**0.5})
    assert said["reward_chaotic"] == "warning"


def test_a_slow_loss_of_entropy_that_buys_no_reward_is_told():
    draw = random.Random(0)

    def step(t: int) -> Step:
        entropy = 0.6 - 0.5 * min(1, t / 200)
        return {"policy/entropy": entropy, "reward": 0.4 + draw.gauss(0, 0.03), "groups/all_wrong_frac": 0.4}

    assert signs(step)["entropy_spent"] == "warning"


@pytest.mark.parametrize(("stay", "truth", "falls"), [(0.0, 0.5, False), (0.8, 0.5, False), (0.8, 0.35, True)])
def test_held_out_questions_that_repeat_are_compared_in_pairs(stay, truth, falls):
    """A share of the verdicts stays from one evaluation to the next; 100 questions, 20 evaluations, 10 runs."""
    called = []
    for seed in range(10):
        draw = random.Random(seed)
        right = [float(draw.random() < 0.5) for _ in range(300)]
        best = list(right)
        now: Step = {}

        def at(t: int, draw: random.Random = draw, now: Step = now, right: list[float] = right) -> Step:
            nonlocal best
            if t % 10 == 1:
                wanted = 0.5 if t < 100 else truth
                right[:] = [r if draw.random() < stay else float(draw.random() < wanted) for r in right]
                changes = [r - b for r, b in zip(right, best, strict=True)]
                change = sum(changes) / 300
                error = (sum((c - change) ** 2 for c in changes) / 299 / 300) ** 0.5
                if change > 0:
                    best = list(right)
                now.update({"val/reward": sum(right) / 300, "val/set/prompts": 300.0})
                now.update({"val/set/reward/change": change, "val/set/reward/change/se": error})
                now.update({"val/set/reward/se": 0.029})
            return dict(now)

        called.append("held_out_falls" in dict(found(monitors.RewardHackingMonitor(), at, 200)))
    assert sum(called) >= 9 if falls else not any(called)
