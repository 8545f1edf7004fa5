"""A few completions are judged a second time, and a verifier that changes its mind is noticed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import lightning.pytorch as pl
import pytest

from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.rewards import ExactMatch, GatedReward, Reward, score_all
from lit_grpo.rewards.combine import judge_again
from lit_grpo.types import Completion, Prompt, RewardInput, Score
from tests import tiny


class Flaky(Reward):
    """Gives 1 and, the second time that it is asked for a completion, what is given for it."""

    def __init__(self, second: dict[str, float], deterministic: bool = True, failing: bool = False) -> None:
        super().__init__(name="flaky")
        self.second, self.deterministic, self.failing = second, deterministic, failing
        self.asked: list[str] = []

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        scores = []
        for item in batch:
            again = item.text in self.asked
            self.asked.append(item.text)
            scores.append(Score(self.second.get(item.text, 1.0) if again else 1.0, timed_out=again and self.failing))
        return scores


def items(*texts: str) -> list[RewardInput]:
    completion = Completion(
        request=0, sample=0, token_ids=(1,), logprobs=(0.0,), finish_reason="stop", policy_version=0
    )
    return [RewardInput(Prompt("p", "q", (1,)), completion, text) for text in texts]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Flaky({}), (0, 3)),
        (Flaky({"b": 0.0}), (1, 3)),
        (Flaky({"b": 0.0, "c": 0.5}), (2, 3)),
        (Flaky({"b": 0.0}, failing=True), (0, 0)),
        (Flaky({"b": 0.0}, deterministic=False), (0, 0)),
    ],
    ids=["the same", "one", "two", "timed out", "drawn on purpose"],
)
def test_another_verdict_is_counted(reward, expected):
    batch = items("a", "b", "c")
    assert judge_again([reward], batch, score_all([reward], batch)) == expected


def test_a_tenth_of_the_range_is_no_other_verdict():
    batch = items("a", "b")
    for range_, second, changed in (((0.0, 1.0), 0.91, 0), ((0.0, 1.0), 0.89, 1), ((0.0, 10.0), 0.5, 0)):
        reward = Flaky({"a": second})
        reward.range = range_
        assert judge_again([reward], batch, score_all([reward], batch)) == (changed, 2)


def test_a_reward_around_one_that_is_drawn_is_drawn_too():
    inner = Flaky({}, deterministic=False)
    assert not GatedReward(inner, gate=ExactMatch()).deterministic
    assert not GatedReward(ExactMatch(), gate=inner, at_least=1.0).deterministic
    assert GatedReward(ExactMatch(), gate=ExactMatch()).deterministic


class Coin(Reward):
    def __init__(self) -> None:
        super().__init__(name="coin")
        self.draw = random.Random(0)

    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        return [float(self.draw.random() < 0.5) for _ in batch]


@pytest.mark.parametrize(("every", "recipe"), [(1, "grpo"), (1, "dapo"), (0, "grpo")])
def test_a_coin_toss_is_seen_in_the_metrics_of_a_run(tmp_path, every, recipe):
    seen: list[dict[str, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(dict(pl_module.step_metrics))

    data = tiny.data(rewards=[Coin()], group_size=4, prompts_per_rollout=4, rollouts=3, rejudge_every=every)
    module = tiny.module(objective=ObjectiveConfig(recipe=recipe))
    tiny.trainer(callbacks=[Watch()], default_root_dir=tmp_path).fit(module, datamodule=data)
    if not every:
        assert all("sanity/rejudged_diff_frac" not in one for one in seen)
        return
    # Of 16 coin tosses or more, made twice, none or all are another once in 30,000 runs.
    assert all(0 < one["sanity/rejudged_diff_frac"] < 1 for one in seen)
    assert all(one["groups/equal_pairs"] >= 16 and one["sanity/reward_contradiction_frac"] > 0 for one in seen)
