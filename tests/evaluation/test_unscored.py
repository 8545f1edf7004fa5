"""Evaluations of samples of which some have no score: they are left out and counted, never taken for wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from lit_grpo.evaluation.evaluator import Evaluator, records
from lit_grpo.evaluation.metrics import AvgAtK, BestOfK, MajAtK, PassAtK
from lit_grpo.report.samples import rollout_view, scored_rewards
from lit_grpo.run.flight import RecordedStep
from lit_grpo.types import Rollout
from tests import tiny

NAN = float("nan")


def unscored() -> Rollout:
    rewards = [1.0, NAN, 0.0, 1.0, NAN, NAN, NAN, NAN, 0.0, 0.0, 0.0, NAN]
    whole = tiny.rollout([1.0] * 12, [3] * 12, 4)
    reward = torch.tensor(rewards)
    return replace(whole, reward=reward, rewards={"even": reward.clone()}, correct=reward == 1, judged=~reward.isnan())


def test_means_and_pass_rates_are_over_the_scored_samples() -> None:
    evaluator = Evaluator("val")
    found = evaluator.update(unscored())
    metrics = evaluator.compute().sets["val"]
    # Two of three are right in the first, none of three in the last, and of the second nothing is known.
    assert metrics["reward"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["pass@1"] == pytest.approx(metrics["reward"])
    assert metrics["avg@4"] == pytest.approx(metrics["pass@1"])
    assert "pass@4" not in metrics  # no prompt has four
    assert metrics["unscored_frac"] == metrics["unjudged_frac"] == pytest.approx((1 / 4 + 1 + 1 / 4) / 3)
    assert metrics["prompts"] == 3
    assert metrics["length"] == 3
    assert [record["reward"] for record in found[:4]] == [1.0, None, 0.0, 1.0]
    assert [record["correct"] for record in found[:4]] == [True, None, False, True]
    json.dumps(found, allow_nan=False)


def test_where_all_have_a_score_nothing_is_said_of_it() -> None:
    evaluator = Evaluator("val")
    evaluator.update(tiny.rollout([1.0, 0.0, 0.0, 0.0], [3] * 4, 4))
    assert not [key for key in evaluator.compute().sets["val"] if key.startswith("un")]


def test_change_is_over_prompts_with_a_reward_both_times() -> None:
    first = Evaluator("val")
    first.update(tiny.rollout([0.0] * 12, [3] * 12, 4))
    first.compute()
    second = Evaluator("val", best=first.best)
    second.update(unscored())
    metrics = second.compute().sets["val"]
    assert metrics["reward/change"] == pytest.approx((2 / 3 + 0) / 2)


def test_each_estimate_is_that_of_the_judged_samples_alone() -> None:
    generator = np.random.default_rng(0)
    correct = torch.tensor(generator.random((20, 5)) < 0.5)
    judged = torch.tensor(generator.random((20, 5)) < 0.6)
    scores, classes = torch.tensor(generator.random((20, 5))), torch.tensor(generator.integers(-1, 3, (20, 5)))
    names = [str(i) for i in range(20)]
    passes, best, majority, average = PassAtK([1, 2]), BestOfK([2], "s"), MajAtK([2]), AvgAtK(5)
    passes.update(correct, names, judged)
    best.update(correct, scores, names, judged)
    majority.update(correct, classes, names, judged)
    average.update(correct, names, judged)
    pass_2, best_2, majority_2, shares = [], [], [], []
    for row in range(20):
        known = judged[row].nonzero()[:, 0].tolist()
        right = correct[row].tolist()
        if known:
            shares.append(np.mean([right[i] for i in known]))
        if len(known) < 2:
            continue
        pairs = list(combinations(known, 2))
        pass_2.append(np.mean([right[i] or right[j] for i, j in pairs]))
        best_2.append(np.mean([right[max(pair, key=lambda i: float(scores[row, i]))] for pair in pairs]))
        alone = MajAtK([2])
        alone.update(correct[row, known][None], classes[row, known][None], ["x"])
        majority_2.append(float(alone.compute()["maj@2"]))
    assert float(passes.compute()["pass@2"]) == pytest.approx(np.mean(pass_2))
    assert float(passes.compute()["pass@1"]) == float(average.compute()["avg@5"]) == pytest.approx(np.mean(shares))
    assert float(best.compute()["best@2/s"]) == pytest.approx(np.mean(best_2))
    assert float(majority.compute()["maj@2"]) == pytest.approx(np.mean(majority_2))


def test_a_record_shows_them_as_without_a_score() -> None:
    count = 4
    step = RecordedStep(
        1,
        {
            "lengths": np.ones(count, np.int32), "tokens": np.arange(count, dtype=np.int32),
            "reward": np.array([NAN, 0.0, 1.0, NAN]), "reward/a": np.array([NAN, 0.0, 1.0, NAN]),
            "reward/b": np.array([NAN, 0.0, NAN, NAN]), "correct": np.array([False, False, True, False]),
            "judged": np.array([False, True, True, False]), "truncated": np.zeros(count, bool),
        },
        [{"question": "q", "answer": "a"}], [str(i) for i in range(count)], count, 1.0, False,
    )  # fmt: skip
    assert scored_rewards(step) == [0.0, 1.0]
    shown = [dict(one.facts) for one in rollout_view("t", step, {}).completions]
    assert [one["reward"] for one in shown] == ["1", "0", "none, left out"]
    assert [one.get("correct") for one in shown] == ["yes", "no", None]
    assert shown[0]["reward/b"] == "none"


def test_records_of_a_scored_rollout_are_as_ever() -> None:
    assert [record["reward"] for record in records(tiny.rollout([1.0, 0.5], [1, 2], 2))] == [1.0, 0.5]
