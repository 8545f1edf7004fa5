"""What a rollout and its tensors say of each other: exact on small cases, blind to padding, order and splits."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.learner.rollout_metrics import (
    add_audit_metrics,
    gradient_cosine,
    prefix_pushed_down,
    repetition,
    reward_length_correlation,
    update_size,
)
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.types import Completion, Rollout
from tests import tiny


def rollout(ids: list[list[int]], rewards: list[float], group_size: int) -> Rollout:
    rewards = [float(r) for r in rewards]
    plain = tiny.rollout(rewards, [len(i) for i in ids], group_size)
    completions = [
        Completion(i // group_size, i % group_size, tuple(row), tuple([-1.0] * len(row)), "stop", 0)
        for i, row in enumerate(ids)
    ]
    return tiny.rollout(rewards, [len(i) for i in ids], group_size, prompts=plain.prompts, completions=completions)


def audit(batch: Rollout, per_completion: list[float] | None = None, **changes: Any) -> dict[str, float]:
    experience = replace(make_experience(batch, "cpu"), **changes)
    rewards = batch.reward.view(-1, batch.group_size)
    centred = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    mean = torch.tensor(per_completion if per_completion is not None else centred, dtype=torch.float32)
    advantages = mean[:, None].expand(-1, experience.width).clone()
    advantages[~experience.mask] = float("nan")  # never to be read
    metrics = StepMetrics()
    add_audit_metrics(metrics, batch, experience, advantages)
    return metrics.compute()


IDS = [[1, 2, 3], [1, 2, 3], [4], [5, 6], [7], [7], [7], [8, 9]]


def test_a_sound_rollout_has_nothing_to_report():
    found = audit(rollout(IDS, [1, 1, 0, 0, 0, 0, 0, 1], 4))
    for key in (
        "sanity/missing_tokens_frac",
        "sanity/mixed_prompts_frac",
        "sanity/reward_contradiction_frac",
        "sanity/advantage_contradiction_frac",
    ):
        assert found[key] == 0
    assert found["sanity/inverted_advantage_frac"] == 0
    assert found["groups/distinct_frac"] == (3 + 2) / 8
    assert found["groups/equal_pairs"] == 1 + 3
    assert found["groups/count"] == 2


def test_contradicting_rewards_and_advantages_are_counted_in_pairs():
    found = audit(rollout(IDS, [1, 0, 0, 0, 1, 0, 0, 1], 4))
    assert found["sanity/reward_contradiction_frac"] == 3 / 4  # the first pair, and two of the three sevens' pairs
    quiet = audit(rollout(IDS, [1, 1, 0, 0, 0, 0, 0, 1], 4), [1, -1, 0, 0, 0, 0, 0, 1])
    assert quiet["sanity/reward_contradiction_frac"] == 0
    assert quiet["sanity/advantage_contradiction_frac"] == 1 / 4  # labels flipped behind the rewards' back


def test_inverted_advantages():
    batch = rollout(IDS, [1, 1, 0, 0, 0, 0, 0, 1], 4)
    assert audit(batch, [-1, -1, 1, 1, 1, 1, 1, -1])["sanity/inverted_advantage_frac"] == 1
    assert audit(batch, [1, 1, -1, -1, 1, 1, 1, -1])["sanity/inverted_advantage_frac"] == 0.5
    assert "sanity/inverted_advantage_frac" not in audit(rollout(IDS, [1.0] * 8, 4))


def test_lost_end_tokens_and_shuffled_groups():
    batch = rollout(IDS, [1, 1, 0, 0, 0, 0, 0, 1], 4)
    lengths = torch.tensor([len(i) - 1 for i in IDS])
    assert audit(batch, lengths=lengths)["sanity/missing_tokens_frac"] == pytest.approx(8 / sum(map(len, IDS)))
    assert audit(batch, group_ids=torch.tensor([0, 1] * 4))["sanity/mixed_prompts_frac"] == 0.5
    batch = replace(batch, completions=[batch.completions[i] for i in (4, 1, 2, 3, 0, 5, 6, 7)])
    assert audit(batch)["sanity/mixed_prompts_frac"] == 2 / 8


def test_truncation_by_reward():
    batch = rollout(IDS, [1, 1, 0, 0, 0, 0, 0, 1], 4)
    batch.completions[2] = Completion(0, 2, (4,), (-1.0,), "length", 0)
    found = audit(batch)
    assert found["completions/correct_truncated_frac"] == 0
    assert found["completions/incorrect_truncated_frac"] == 1 / 5


def plain_repetition(ids: list[int]) -> tuple[float, float, float]:
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    run = best = 1
    for a, b in itertools.pairwise(ids):
        run = run + 1 if a == b else 1
        best = max(best, run)
    return 1 - len(set(grams)) / len(grams), best / len(ids), max(map(ids.count, ids)) / len(ids)


def test_repetition_equals_a_plain_count_whatever_the_padding():
    draw = random.Random(0)
    ids = [[draw.randrange(3) for _ in range(draw.randrange(1, 30))] for _ in range(60)]
    width = max(map(len, ids)) + 3
    table = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    found = repetition(table, torch.tensor([len(row) for row in ids]))
    want = [plain_repetition(row) for row in ids if len(row) >= 8]
    got = list(
        zip(
            *(
                found[k].tolist()
                for k in ("completions/repetition_frac", "completions/longest_run_frac", "completions/top_token_frac")
            ),
            strict=True,
        )
    )
    assert len(got) == len(want) > 20
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other)


def test_short_completions_have_no_repetition():
    assert "completions/repetition_frac" not in audit(rollout(IDS, [1, 1, 0, 0, 0, 0, 0, 1], 4))
    assert audit(rollout([[1] * 9, [2]], [1, 0], 2))["completions/repetition_frac"] == pytest.approx(5 / 6)


def test_a_shared_prefix_is_pushed_down_where_right_answers_are_longer():
    def share(ids: list[list[int]], pushes: list[list[float]]) -> tuple[int, int]:
        return prefix_pushed_down(make_experience(rollout(ids, [1, 0], 2), "cpu"), torch.tensor(pushes))

    # GRPO with 1/|o|: the right answer of 4 tokens gets +1/4 a token, the wrong one of 2 gets -1/2.
    long_is_right = [[0.25] * 4, [-0.5, -0.5, 0, 0]]
    assert share([[1, 2, 3, 4], [1, 5]], long_is_right) == (1, 1)
    assert share([[1, 5], [1, 2, 3, 4]], [[0.5, 0.5, 0, 0], [-0.25] * 4]) == (0, 1)
    assert share([[1, 2], [3, 4]], [[0.5, 0.5], [-0.5, -0.5]]) == (0, 0)
    # A loss without 1/|o| gives both the same weight, and one that spares conflicts the wrong one none: nothing is
    # pushed down by the very same completions.
    assert share([[1, 2, 3, 4], [1, 5]], [[0.1] * 4, [-0.1, -0.1, 0, 0]]) == (0, 1)
    assert share([[1, 2, 3, 4], [1, 5]], [[0.5, 0.25, 0.25, 0.25], [0, -0.5, 0, 0]]) == (0, 1)


def test_update_size_is_the_step_that_was_taken():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    assert update_size(optimizer) is None
    for _ in range(3):
        before = model.weight.detach().clone()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (model.weight.detach() - before).norm() / model.weight.norm()
    found = update_size(optimizer)
    assert found is not None
    assert math.isclose(found, float(moved.detach()), rel_tol=0.02)  # weight decay acts on the weights before the step


@pytest.mark.parametrize(("recipe", "share"), [("pl", 1.0), ("nl", 0.0), ("grpo", 0.5)])
def test_upward_tells_which_half_of_the_signal_is_learned_from(recipe, share):
    module = tiny.module(objective=ObjectiveConfig(recipe=recipe))
    tiny.trainer().fit(module, datamodule=tiny.data(rollouts=1))
    assert module.step_metrics["policy/upward_frac"] == pytest.approx(share)


def test_the_cosine_is_that_of_the_gradient_with_the_mean_of_those_before():
    weights = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, betas=(0.5, 0.9))
    gradients = [[[1.0, 0.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]], [[-1.0, -1.0], [0.0, 0.0]]]
    mean, found = torch.zeros(2, 2), []
    for gradient in gradients:
        weights[0].grad = torch.tensor(gradient)
        weights[1].grad = torch.ones(3)  # a vector is none of the matrices that are looked at
        found.append(gradient_cosine(optimizer))
        if mean.any():
            expected = (weights[0].grad * mean).sum() / (weights[0].grad.norm() * mean.norm())
            assert found[-1] == pytest.approx(float(expected))
        optimizer.step()
        mean = 0.5 * mean + 0.5 * weights[0].grad
    assert found[0] is None
    assert found[2] is not None
    assert found[2] < -0.9


def paid(per_token: float, groups: int = 4, size: int = 6, seed: int = 0) -> tuple[list[float], list[int], list[bool]]:
    """Rewards of 1 for every right answer and some for each token; half of each group is right."""
    draw = random.Random(seed)
    lengths = [n for _ in range(groups) for n in draw.sample(range(1, 41), size)]
    verdicts = [i % 2 == 0 for i in range(groups * size)]
    return [right + per_token * n for right, n in zip(verdicts, lengths, strict=True)], lengths, verdicts


@pytest.mark.parametrize(("per_token", "expected"), [(0.01, 1.0), (5.0, 1.0), (-0.01, -1.0)])
def test_a_reward_of_each_token_goes_with_length_whatever_its_size(per_token: float, expected: float):
    rewards, lengths, verdicts = paid(per_token)
    total, sets = reward_length_correlation(rewards, lengths, verdicts, 6)
    assert sets == 8
    assert total / sets == pytest.approx(expected)


def test_right_answers_that_are_longer_are_not_paid_for_length():
    verdicts = [True, True, True, False, False, False] * 4
    lengths = [30, 31, 32, 1, 2, 3] * 4
    assert reward_length_correlation([float(v) for v in verdicts], lengths, verdicts, 6) == (0.0, 0)


def test_a_form_that_makes_answers_longer_is_no_pay_for_length():
    lengths = [10, 11, 12, 30, 31, 32] * 8
    form = [0.0, 0.0, 0.0, 0.2, 0.2, 0.2] * 8
    assert reward_length_correlation(form, lengths, [True] * 48, 6) == (0.0, 0)
    graded = [0.01 * n for n in lengths]
    assert reward_length_correlation(graded, lengths, [True] * 48, 6) == (pytest.approx(8.0), 8)


def test_rewards_that_go_by_chance_hardly_correlate_with_length():
    draw = random.Random(1)
    lengths = [draw.randint(1, 40) for _ in range(640)]
    total, sets = reward_length_correlation([draw.random() for _ in lengths], lengths, [True] * 640, 8)
    assert sets == 80
    assert abs(total / sets) < 0.2


def test_what_is_not_judged_and_what_is_too_few_is_left_out():
    rewards, lengths, verdicts = paid(0.01)
    nobody_knows = [None if i % 6 else verdict for i, verdict in enumerate(verdicts)]
    assert reward_length_correlation(rewards, lengths, nobody_knows, 6) == (0.0, 0)
    assert reward_length_correlation(rewards[:6], lengths[:6], verdicts[:6], 6) == (0.0, 0)
    assert reward_length_correlation([math.nan, *rewards[1:]], lengths, verdicts, 6)[1] == 7
    assert reward_length_correlation([0.1 + 0.2, 0.3, 0.3] * 8, [1, 2, 3] * 8, [False] * 24, 3) == (0.0, 0)


def test_a_rollout_reports_what_length_is_paid_only_where_something_judges():
    rewards, lengths, verdicts = paid(0.01)
    ids = [list(range(1, n + 1)) for n in lengths]
    batch = rollout(ids, rewards, 6)
    assert audit(replace(batch, correct=torch.tensor(verdicts)))["groups/reward_length_corr"] == pytest.approx(1.0)
    assert "groups/reward_length_corr" not in audit(replace(batch, correct=None))
