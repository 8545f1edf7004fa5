"""When a run began to be wrong, and what the monitors are given credit for."""

from __future__ import annotations

import random

import pytest

from scripts.diagnosis.cases import CASES, SEEDS, Case, find, plan
from scripts.diagnosis.scoring import fall_beside, judge, judge_rollback, onset_of, reward_fall, smoothed, summary
from scripts.diagnosis.table import misses, report

FALLING = [0.6] * 30 + [0.6 - 0.02 * k for k in range(30)]
BY_REWARD = Case("x", "nl", right=frozenset({"C_NL"}), onset="reward")
BY_SABOTAGE = Case("y", "grpo", right=frozenset({"reward_noise"}))
HEALTHY = Case("z", "grpo")


def said(step: int, name: str = "C_NL", severity: str = "critical") -> dict[str, object]:
    return {"step": step, "diagnosis": name, "severity": severity}


def test_the_onset_is_the_last_rollout_near_the_best():
    fall = reward_fall(FALLING)
    means = smoothed(FALLING)
    assert fall is not None
    assert means[fall.onset - 1] >= 0.95 * 0.6 > means[fall.onset]
    assert means[fall.lost - 1] < 0.8 * 0.6 <= means[fall.lost - 2]
    assert 30 < fall.onset < fall.lost < 60


@pytest.mark.parametrize(
    "correct", [[], [0.6] * 50, [0.6 - 0.002 * k for k in range(50)], [0.1 + 0.01 * k for k in range(50)]]
)
def test_a_run_that_keeps_four_fifths_of_its_best_has_not_fallen(correct):
    assert reward_fall(correct) is None


def test_the_onset_comes_from_reward_or_sabotage_and_healthy_runs_have_none():
    fall = reward_fall(FALLING)
    assert fall is not None
    assert onset_of(BY_REWARD, FALLING, start=0) == fall.onset
    assert onset_of(BY_SABOTAGE, FALLING, start=7) == 8
    assert onset_of(HEALTHY, FALLING, start=0) is None
    assert onset_of(BY_REWARD, [0.6] * 50, start=0) is None


def test_a_run_is_judged_by_its_first_critical_diagnosis():
    out = judge(
        BY_REWARD, FALLING, 0, [said(35, "other", "info"), said(36, "conflict", "warning"), said(40), said(41, "other")]
    )
    assert (out["step"], out["diagnosis"], out["verdict_step"]) == (36, "C_NL", 40)
    assert out["right"]
    assert out["in_time"]
    assert out["delay"] == 36 - out["onset"]


def test_late_wrong_and_missing_alarms_are_told_apart():
    late = judge(BY_REWARD, FALLING, 0, [said(59)])
    assert late["right"]
    assert not late["in_time"]
    wrong = judge(BY_REWARD, FALLING, 0, [said(36, "C_PL")])
    assert wrong["detected"]
    assert not wrong["right"]
    missing = judge(BY_REWARD, FALLING, 0, [said(36, severity="info")])
    assert not missing["detected"]
    assert not missing["right"]
    assert not missing["in_time"]


def test_alarms_before_the_sabotage_and_on_healthy_runs_are_false():
    early = judge(BY_SABOTAGE, [0.6] * 50, 40, [said(40), said(41, "reward_noise")])
    assert early["false_alarms"] == 1
    assert early["false_stop"]
    assert early["right"]
    warned = judge(HEALTHY, FALLING, 0, [said(10, severity="warning")])
    assert warned["false_alarms"] == 1
    assert not warned["false_stop"]
    assert not warned["detected"]


def test_a_rollback_saves_a_run_that_ends_near_its_best():
    back = [{"event": "rollback", "step": 45, "target": 20, "diagnosis": "C_NL"}]
    assert judge_rollback(FALLING[:45] + [0.6] * 30, back)["saved"]
    assert not judge_rollback(FALLING[:45] + [0.5] * 30, back)["saved"]
    never = judge_rollback([0.6] * 60, [])
    assert not never["saved"]
    assert not never["collapsed"]
    unseen = judge_rollback(FALLING, [])
    assert unseen["collapsed"]
    assert not unseen["saved"]


def test_the_summary_counts_what_it_says():
    def entry(case: Case, name: str, *diagnoses: dict[str, object]) -> dict[str, object]:
        base = {"part": "diagnosis", "name": name, "seed": 0, "status": "done", "reason": ""}
        return base | judge(case, FALLING, 0, diagnoses)

    runs = [entry(BY_REWARD, "a", said(36)), entry(BY_REWARD, "b", said(59, "C_PL")), entry(BY_REWARD, "c")]
    runs += [entry(HEALTHY, "d", said(5)), entry(HEALTHY, "e")]
    done = {"part": "rollback", "name": "a", "seed": 0, "status": "done", "reason": ""}
    runs += [done | judge_rollback(FALLING, []), done | judge_rollback([0.6], [])]  # the second did not collapse
    totals = summary(runs)
    assert totals["recall"] == pytest.approx(2 / 3)
    assert totals["right_class"] == pytest.approx(1 / 3)
    assert totals["in_time"] == pytest.approx(1 / 3)
    assert (totals["rollback_saved"], totals["rollback_runs"]) == (0.0, 1)
    assert (totals["false_stops"], totals["false_alarms"], totals["sabotaged"], totals["healthy"]) == (1, 1, 3, 2)
    text = report(runs, totals)
    assert len(misses(runs)) == 5
    for line in (
        "b seed 0: called C_PL",
        "b seed 0: first alarm at 59",
        "c seed 0: no alarm",
        "d seed 0: healthy, but",
    ):
        assert line in text


def test_the_plan_is_as_large_as_promised_and_its_seeds_are_apart():
    assert not set(SEEDS["tuning"]) & set(SEEDS["heldout"])
    for seeds in SEEDS:
        jobs = [job for job in plan(seeds) if job.part == "diagnosis"]
        assert sum(find(job.name).healthy for job in jobs) >= 12
        assert sum(not find(job.name).healthy for job in jobs) >= 24
    assert all(case.healthy or case.seeds >= 2 for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_expected_diagnosis_is_one_there_is():
    from lit_grpo.callbacks.diagnosis.kinds import diagnosis_kinds

    assert {name for case in CASES for name in case.right} <= set(diagnosis_kinds())


def test_beside_a_twin_the_difficulty_of_the_questions_is_no_fall_and_a_fall_is_found():
    draw = random.Random(4)
    difficulty = [draw.uniform(0.02, 0.4) for _ in range(60)]
    twin = [min(1.0, max(0.0, d + draw.gauss(0, 0.02))) for d in difficulty]
    healthy = [min(1.0, max(0.0, d + draw.gauss(0, 0.02))) for d in difficulty]
    assert reward_fall(healthy) is not None, "by itself it looks like a collapse"
    assert fall_beside(healthy, twin) is None
    sick = [value if k < 30 else 0.3 * value for k, value in enumerate(healthy)]
    fall = fall_beside(sick, twin)
    assert fall is not None
    assert 25 <= fall.onset <= fall.lost
    assert 31 <= fall.lost <= 38
    # A difference that is one of chance alone: as often above as below.
    unsure = [value * (0.2 if k % 2 else 1.3) for k, value in enumerate([0.2] * 60)]
    assert fall_beside(unsure, [0.2] * 60) is None
