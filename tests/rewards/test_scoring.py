"""Scoring a batch with several rewards, and what becomes of rewards that break their contract."""

import concurrent.futures
import math
import pickle

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.rewards import ExactMatch, Reward, RewardError, check_rewards, primary_reward, score_all
from lit_grpo.types import Score


class Length(Reward):
    def score(self, batch):
        return [len(item.text) for item in batch]


class Given(Reward):
    """Gives each text the value that ``values`` has for it; an exception is raised."""

    def __init__(self, values, **kwargs):
        super().__init__(**kwargs)
        self.values = values

    def score(self, batch):
        scores = [self.values.get(item.text, 1.0) for item in batch]
        for score in scores:
            if isinstance(score, Exception):
                raise score
        return scores


class Short(Reward):
    def score(self, batch):
        return [1.0] * (len(batch) - 1)


@pytest.fixture
def batch(reward_input):
    return [
        reward_input("a", "a", prompt_id="p/1"),
        reward_input("bad" * 500, "b", prompt_id="p/2"),
        reward_input("ccc", "ccc"),
    ]


def test_each_reward_gives_one_score_each_in_order(batch):
    scores = score_all([ExactMatch(), Length(name="size", weight=0.1)], batch)
    assert scores == {
        "exact_match": [Score(1.0), Score(0.0), Score(1.0)],
        "size": [Score(1.0), Score(1500.0), Score(3.0)],
    }
    assert all(isinstance(s.value, float) for column in scores.values() for s in column)
    assert score_all([Length()], []) == {"length": []}


@pytest.mark.parametrize("value", [True, 1, torch.tensor(1.0), Score(1.0, timed_out=True)])
def test_every_kind_of_number_is_taken(batch, value):
    (score, *_) = score_all([Given({"a": value})], batch)["given"]
    assert score.value == 1.0
    assert isinstance(score.value, float)
    assert score.timed_out is isinstance(value, Score)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "gave nan"),
        (math.inf, "gave inf"),
        (Score(-math.inf), "gave -inf"),
        ("x" * 900, "which is not a number"),
        (torch.ones(3), "which is not a number"),
        (KeyError("no such column"), "raised KeyError: 'no such column'"),
    ],
)
def test_a_bad_score_stops_the_run_and_shows_the_sample(batch, value, problem):
    reward = Given({"bad" * 500: value})
    with pytest.raises(RewardError, match="reward 'given'") as caught:
        score_all([reward], batch)
    assert problem in str(caught.value)
    assert caught.value.prompt_id == "p/2"
    assert caught.value.sample is not None
    assert len(caught.value.sample) < 500
    assert caught.value.sample.startswith("badbad")
    assert len(str(caught.value)) < 1500
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    scores = score_all([reward], batch, on_error="zero")["given"]
    assert scores == [Score(1.0), Score(0.0, failed=True), Score(1.0)]


def test_a_reward_that_fails_only_on_the_batch_still_stops_the_run(batch):
    class Batchless(Reward):
        def score(self, batch):
            if len(batch) > 1:
                raise RuntimeError("one at a time")
            return [2.0]

    with pytest.raises(RewardError, match="on a batch of 3"):
        score_all([Batchless()], batch)
    assert score_all([Batchless()], batch, on_error="zero")["batchless"] == [Score(2.0)] * 3


@pytest.mark.parametrize("on_error", ["raise", "zero"])
def test_a_wrong_number_of_scores_always_stops_the_run(batch, on_error):
    with pytest.raises(RewardError, match="gave 2 scores for 3 completions"):
        score_all([Short()], batch, on_error=on_error)


def test_an_interrupt_is_no_bad_score(batch):
    class Interrupted(Reward):
        def score(self, batch):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_all([Interrupted()], batch, on_error="zero")


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(UserError, match="two rewards are named 'length'"):
        check_rewards([Length(), Length()])
    with pytest.raises(UserError, match="no reward"):
        check_rewards([])
    with pytest.raises(UserError, match="weight of reward 'length' is nan"):
        check_rewards([Length(weight=math.nan)])


def test_from_several_threads(batch):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: score_all([Length(), ExactMatch()], batch), range(20)))
    assert all(result == results[0] for result in results)


def test_which_reward_says_what_is_right():
    class Form(Reward):
        correct_threshold = None

    full, form = ExactMatch(), Form()
    assert (full.correct(1.0), full.correct(1 / 3 * 3), full.correct(0.999), form.correct(10.0)) == (
        True,
        True,
        False,
        False,
    )
    assert primary_reward([form, full, Length()]) is full
    assert primary_reward([form]) is None
