"""Completions that no reward scored: a rollout with them trains as the rollout without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.errors import StopRun, UserError
from lit_grpo.learner.batch import make_experience, minibatches, scored_rows
from lit_grpo.learner.metric_sums import StepMetrics, add_rollout_metrics
from lit_grpo.learner.rollout_metrics import add_audit_metrics
from lit_grpo.learner.unscored import UnscoredRollouts
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig
from lit_grpo.rewards import Reward
from lit_grpo.types import Completion, Rollout
from tests import tiny
from tests.learner.helpers import fit, rollout, vector
from tests.objectives.random_batches import NAMES, Ranks, batch, objective, step

NAN = float("nan")
# Adam's first step is the sign of the gradient, which rounding decides where it is 0.
RATE = OptimizerConfig(lr=1e-2, eps=1e-3)
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"overlong_penalty": False},
    "rloo": {},
    "litepo_like": {"recipe": "grpo", "advantage": "batch_std"},
    "reinforce_pp": {"recipe": "grpo", "advantage": "group_mean_then_whiten"},
    "gspo": {},
}


def settings_of(name: str) -> dict[str, Any]:
    return {"objective": ObjectiveConfig(**({"recipe": name} | RECIPES[name])), "optimizer": RATE}


def holed(whole: Rollout, holes: list[int], *, seed: int = 0, size: int = 4) -> Rollout:
    """Put ``holes`` unscored completions, of random tokens, into each group of a rollout, at random places."""
    generator = torch.Generator().manual_seed(seed)
    completions, texts, index = [], [], []
    for group in range(len(whole.prompts)):
        order = torch.randperm(size, generator=generator).tolist()
        own = list(range(group * whole.group_size, (group + 1) * whole.group_size))
        scored = sorted(order[: len(own)])
        for place in range(size):
            if place in scored:
                row = own[scored.index(place)]
                index.append(row)
                completions.append(replace(whole.completions[row], sample=place))
            else:
                ids = tuple(torch.randint(0, 12, (holes[group % len(holes)],), generator=generator).tolist())
                index.append(-1)
                completions.append(Completion(group, place, ids, (NAN,) * len(ids), "length", 0))
            texts.append("")

    def spread(values: torch.Tensor, missing: Any) -> torch.Tensor:
        return torch.stack([values.new_tensor(missing) if row < 0 else values[row] for row in index])

    assert whole.correct is not None
    return replace(
        whole,
        completions=completions,
        texts=texts,
        group_size=size,
        rewards={name: spread(values, NAN) for name, values in whole.rewards.items()},
        reward=spread(whole.reward, NAN),
        correct=spread(whole.correct, False),
        judged=torch.tensor([row >= 0 for row in index]),
        flipped_reward=None,
    )


@pytest.mark.parametrize("name", RECIPES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1000), holes=st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_training_is_that_of_the_rollout_without_them(name: str, seed: int, holes: list[int]) -> None:
    whole = tiny.rollout([1.0, 0.0, 0.25, 1.0, 1.0, 0.0], [3, 1, 5, 2, 4, 4], 3, seed=seed, flipped_reward=None)
    with_holes = holed(whole, holes, seed=seed)
    one, seen = fit(batches=[whole], **settings_of(name))
    other, seen_other = fit(batches=[with_holes], **settings_of(name))
    start, _ = fit(batches=[replace(whole, reward=torch.zeros(6))], **settings_of("grpo"))
    assert not torch.equal(vector(start.policy), vector(one.policy))
    # What the monitors of single tokens read: as much as without the others.
    assert one.step_result is not None
    assert other.step_result is not None
    whole_logprobs, logprobs = one.step_result.snapshot.logprobs, other.step_result.snapshot.logprobs
    assert (logprobs is None) == (whole_logprobs is None)
    torch.testing.assert_close(vector(other.policy), vector(one.policy), rtol=1e-5, atol=1e-6)
    same = ["loss", "optim/grad_norm", "reward", "reward/std", "groups/zero_std_frac", "groups/all_correct_frac"]
    same += ["completions/correct_length", "completions/incorrect_length", "policy/advantage_abs", "policy/entropy"]
    same += ["groups/distinct_frac", "groups/zero_advantage_frac", "completions/filtered_frac"]
    for key in same:
        assert seen_other.metrics[0].get(key) == pytest.approx(seen.metrics[0].get(key), rel=1e-4, abs=1e-6), key


def test_a_critic_learns_from_what_was_scored_and_is_measured_on_it() -> None:
    whole = tiny.rollout([1.0, 0.0, 0.25, 1.0, 1.0, 0.0], [3, 1, 5, 2, 4, 4], 3, seed=5, flipped_reward=None)
    given: dict[str, Any] = {
        "objective": ObjectiveConfig(recipe="ppo"),
        "critic": CriticConfig(optimizer=RATE),
        "optimizer": RATE,
    }
    one, seen = fit(batches=[whole], **given)
    other, seen_other = fit(batches=[holed(whole, [4, 7], seed=5)], **given)
    torch.testing.assert_close(vector(other.policy), vector(one.policy), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vector(other.critic), vector(one.critic), rtol=1e-5, atol=1e-6)
    for metrics, expected in zip(seen_other.metrics, seen.metrics, strict=True):
        keys = {key for key in expected if key.startswith("critic/")}
        assert any(key.endswith("_after") for key in keys)
        for key in keys:
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def without(whole: Rollout, rows: list[int]) -> Rollout:
    """Return the rollout with some completions unscored."""
    reward = whole.reward.clone()
    reward[rows] = NAN
    judged = torch.ones(len(reward), dtype=torch.bool)
    judged[rows] = False
    return replace(whole, reward=reward, rewards={"even": reward.clone()}, judged=judged)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(0, 7), unique=True, max_size=8), prompts=st.sampled_from([None, 1]))
def test_groups_of_unequal_size_by_hand(rows: list[int], prompts: int | None) -> None:
    given = without(rollout(), rows)
    module, watch = fit(batches=[given], optimizer=RATE)
    assert module.step_result is not None
    advantages = module.step_result.snapshot.advantages
    for group in range(2):
        left = [i for i in range(4 * group, 4 * group + 4) if i not in rows]
        values = given.reward[left]
        flat = len(left) < 2 or bool((values == values[0]).all())
        for i, value in zip(left, values, strict=True):
            expected = 0.0 if flat else float((value - values.mean()) / (values.std() + 1e-6))
            assert advantages[i].tolist() == pytest.approx([expected] * advantages.shape[1], rel=1e-5)
    assert not advantages[rows].any()
    steps = list(minibatches(given, prompts, 2, 0))
    assert {i for chosen in steps for i in chosen.tolist()} == set(range(8)) - set(rows)
    metrics = watch.metrics[0]
    assert ("reward" in metrics) == (len(rows) < 8)
    assert all(value == value for value in metrics.values())
    assert bool(torch.isfinite(vector(module.policy)).all())


def test_what_they_hold_is_never_read() -> None:
    one = without(rollout(), [1, 6])
    completions = [replace(c, token_ids=(3,) * 9, logprobs=(0.0,) * 9) if i in (1, 6) else c
                   for i, c in enumerate(one.completions)]  # fmt: skip
    assert one.correct is not None
    other = replace(one, completions=completions, correct=one.correct ^ ~one.judged)  # type: ignore[operator]
    (a, seen), (b, seen_other) = fit(batches=[one], optimizer=RATE), fit(batches=[other], optimizer=RATE)
    torch.testing.assert_close(vector(a.policy), vector(b.policy), rtol=1e-6, atol=1e-7)
    keys = ("groups/all_wrong_frac", "completions/correct_length", "completions/incorrect_truncated_frac", "reward")
    assert [seen.metrics[0][k] for k in keys] == pytest.approx([seen_other.metrics[0][k] for k in keys])


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], list(range(8))])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_group_or_a_rollout_that_is_left_out_ends_nothing(rows: list[int], updates: int) -> None:
    batches = [without(rollout(), rows), rollout(seed=1)]
    module, watch = fit(batches=batches, optimizer=RATE, updates_per_rollout=updates, minibatch_prompts=2 // updates)
    first, second = watch.metrics
    assert all(value == value for value in (*first.values(), *second.values()))
    assert module.empty_steps == (updates if len(rows) == 8 else updates - 1)
    assert ("reward" in first, "reward" in second) == (len(rows) < 8, True)
    assert module.optimizer_steps + module.empty_steps == 2 * updates
    assert bool(torch.isfinite(vector(module.policy)).all())


def test_a_run_in_which_nothing_is_ever_scored_ends_and_one_that_had_a_score_goes_on() -> None:
    """The share of all ranks decides, of training alone, whatever else the metrics hold."""
    watch = UnscoredRollouts()
    with pytest.warns(UserWarning, match="Rollout 1: every reward gave None"):
        watch.check(0, {"completions/unscored_frac": 1.0})
    with pytest.warns(UserWarning, match="teaches nothing"):
        watch.check(1, {"completions/unscored_frac": 1.0})
    with pytest.warns(UserWarning, match="teaches nothing"), pytest.raises(StopRun, match="first 3 rollouts") as stop:
        watch.check(2, {"completions/unscored_frac": 1.0})
    assert stop.value.diagnosis == "verifier_failure"
    scored = UnscoredRollouts()
    scored.check(0, {"completions/unscored_frac": 0.99})
    for index in range(1, 6):
        with pytest.warns(UserWarning, match="teaches nothing"):
            scored.check(index, {"completions/unscored_frac": 1.0})
    # Demonstrations have no rewards.
    UnscoredRollouts().check(0, {})


class Forgetful(Reward):
    """A reward without its return."""

    def score(self, batch: Any) -> list[Any]:
        return [None] * len(batch)


@pytest.mark.filterwarnings("ignore:Rollout|The reward")
def test_a_forgotten_return_ends_the_fit() -> None:
    recorder = tiny.Recorder()
    with pytest.raises(StopRun, match="a `return` is missing"):
        tiny.trainer(callbacks=[recorder]).fit(tiny.module(), datamodule=tiny.data(rewards=[Forgetful()], rollouts=9))
    assert len(recorder.metrics) <= 3


def test_metrics_are_over_what_was_scored() -> None:
    given = without(rollout(), [0, 1, 2, 3, 5])
    metrics, experience = StepMetrics(), make_experience(given, "cpu")
    add_rollout_metrics(metrics, given)
    add_audit_metrics(metrics, given, experience, torch.zeros(8, experience.width))
    found = metrics.compute()
    assert found["reward"] == found["reward/even"] == pytest.approx(1 / 3)
    assert found["groups/zero_std_frac"] == 0  # of the second group alone
    assert found["groups/all_wrong_frac"] == 0
    assert found["completions/correct_length"] == 6
    assert found["completions/incorrect_length"] == 2.5
    assert found["completions/length"] == pytest.approx(26 / 8)
    assert found["groups/distinct_frac"] == 1
    assert scored_rows(given).tolist() == [4, 6, 7]  # type: ignore[union-attr]
    assert scored_rows(rollout()) is None


def test_equal_completions_of_which_one_has_no_score_contradict_nothing() -> None:
    whole = rollout()
    twin = replace(
        whole.completions[1], token_ids=whole.completions[0].token_ids, logprobs=whole.completions[0].logprobs
    )
    given = without(replace(whole, completions=[whole.completions[0], twin, *whole.completions[2:]]), [1])
    metrics, experience = StepMetrics(), make_experience(given, "cpu")
    add_audit_metrics(metrics, given, experience, torch.zeros(8, experience.width))
    assert metrics.compute().get("sanity/reward_contradiction_frac", 0) == 0


def test_an_objective_by_verdicts_refuses_one_that_is_missing() -> None:
    judged = torch.ones(8, dtype=torch.bool)
    judged[5] = False
    given = rollout()
    given = replace(given, judged=judged, rewards={**given.rewards, "math": given.reward.masked_fill(~judged, NAN)})
    with pytest.raises(UserError, match="'math' gave None for a completion of prompt 'p1' that another"):
        fit(batches=[given], objective=ObjectiveConfig(recipe="psr"))
    fit(batches=[given])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1000), left=st.lists(st.integers(0, 8), unique=True, min_size=1))
def test_every_objective_takes_unequal_groups_on_ranks_and_a_rank_without_any(
    name: str, seed: int, left: list[int]
) -> None:
    made = objective(name)
    exp, now = batch(seed, groups=3, size=3, width=4)
    shares = [torch.arange(9)[:0], torch.tensor(sorted(left))]
    _, _, out, grad = step(made, exp.select(shares[1]), now.select(shares[1]))
    assert torch.isfinite(grad).all()

    def work(rank: int, reduce: Any) -> Any:
        return step(made, exp.select(shares[rank]), now.select(shares[rank]), reduce=reduce)

    results = Ranks(2).run(work)
    total = torch.stack([result[2].loss.detach() for result in results]).sum()
    torch.testing.assert_close(total, out.loss.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([result[3] for result in results]), grad, rtol=1e-9, atol=1e-12)
