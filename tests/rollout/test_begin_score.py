"""Rewards that look at one completion alone are asked as soon as it has ended, the others with its whole group."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import CodeReward, MathReward
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.combine import RewardError
from lit_grpo.rollout.dynamic_sampling import DynamicSampler
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.types import Completion, Prompt, Request, RewardInput, Sampling, Score
from tests.waiting import PATIENCE, wait_until

SAMPLING = Sampling(max_new_tokens=4)


class Alone(Reward):
    """Reward of the completion's first digit, for itself; says which completions it has seen together."""

    by_completion = True
    range = (0.0, 9.0)

    def __init__(self, name: str = "alone") -> None:
        super().__init__(name=name)
        self.seen: list[list[str]] = []

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        self.seen.append([item.text for item in batch])
        if any(item.text.startswith("9") for item in batch):
            raise ValueError("no nines")
        return [Score(float(item.text[0])) for item in batch]


class Together(Alone):
    """Its own way of scoring, which may look at the whole group."""

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        self.seen.append([item.text for item in batch])
        return [Score(float(len(batch))) for _ in batch]


class Engine:
    """Gives the digits of a script, and waits before the last completion of each group until it may go on."""

    policy_version = 0

    def __init__(self, tokenizer: Any, script: dict[int, str]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.before_last: Any = lambda request: None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in requests:
            digits = self.script[request.index]
            # Not in the order of their numbers.
            for number in reversed(range(len(request.seeds))):
                if number == 0:
                    self.before_last(request.index)
                ids = tuple(self.tokenizer(digits[number] + "+1", add_special_tokens=False)["input_ids"])
                yield Completion(request.index, number, ids, (-1.0,) * len(ids), "stop", 0)

    def sync(self, weights: Any, version: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def tokenizer() -> Any:
    return char_tokenizer("0123456789+=")


def generator_of(engine: Engine, *rewards: Reward, **options: Any) -> RolloutGenerator:
    class Policy:
        policy_version = 0

    return RolloutGenerator(engine, Policy(), engine.tokenizer, rewards, 0, **options)  # type: ignore[arg-type]


def prompts_of(tokenizer: Any, count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", "1+1=", tuple(tokenizer("1+1=")["input_ids"]), "2") for n in range(count)]


def test_a_completion_is_scored_before_the_last_of_its_group_has_ended(tokenizer: Any) -> None:
    engine, alone, together = Engine(tokenizer, {0: "1234", 1: "5678"}), Alone(), Together("together")
    before: dict[int, list[str]] = {}

    def before_last(request: int) -> None:
        others = {digit + "+1" for digit in engine.script[request][1:]}
        wait_until(lambda: others <= {text for texts in alone.seen for text in texts}, "the others are scored")
        before[request] = [text for texts in together.seen for text in texts]

    engine.before_last = before_last
    generator = generator_of(engine, together, alone)
    rollout = generator.produce(prompts_of(tokenizer, 2), SAMPLING, 4, index=0)
    generator.close()
    assert all(len(texts) == 1 for texts in alone.seen)
    assert sorted(together.seen) == [["1+1", "2+1", "3+1", "4+1"], ["5+1", "6+1", "7+1", "8+1"]]
    assert not set(before[0]) & {"1+1", "2+1", "3+1", "4+1"}, "the group is asked about when it is whole"
    assert rollout.rewards["alone"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rollout.rewards["together"].tolist() == [4] * 8
    assert rollout.reward.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert rollout.texts == [f"{n}+1" for n in range(1, 9)]


@pytest.mark.parametrize("names", [("alone",), ("together",), ("alone", "together")])
def test_the_rollout_is_that_of_whole_groups(tokenizer: Any, names: tuple[str, ...]) -> None:
    found = []
    for early in (True, False):
        rewards = [{"alone": Alone, "together": Together}[name](name) for name in names]
        for reward in rewards:
            reward.by_completion = reward.by_completion and early
        generator = generator_of(Engine(tokenizer, {0: "1234", 1: "5678"}), *rewards, rejudge_every=1)
        rollout = generator.produce(prompts_of(tokenizer, 2), SAMPLING, 4, index=0)
        generator.close()
        found.append((rollout.texts, {k: v.tolist() for k, v in rollout.rewards.items()}, rollout.sums))
    assert found[0] == found[1]


def test_one_that_fails_alone_ends_the_run_or_is_scored_zero_alone(tokenizer: Any) -> None:
    script = {0: "1294"}
    with pytest.raises(RewardError, match="no nines") as raised:
        generator_of(Engine(tokenizer, script), Alone()).produce(prompts_of(tokenizer, 1), SAMPLING, 4, index=0)
    assert raised.value.sample == "9+1"
    generator = generator_of(Engine(tokenizer, script), Alone(), on_reward_error="zero")
    rollout = generator.produce(prompts_of(tokenizer, 1), SAMPLING, 4, index=0)
    assert rollout.rewards["alone"].tolist() == [1, 2, 0, 4]
    assert rollout.sums["reward_errors/failed_frac/alone"] == (1, 4)


def test_dynamic_sampling_begins_as_early(tokenizer: Any) -> None:
    engine, alone = Engine(tokenizer, dict.fromkeys(range(8), "1111") | {1: "1234", 2: "5678"}), Alone()

    def before_last(request: int) -> None:
        others = {digit + "+1" for digit in engine.script[request][1:]}
        wait_until(lambda: others <= {text for texts in alone.seen for text in texts}, "the others are scored")

    engine.before_last = before_last
    generator = generator_of(engine, alone)
    prompts = prompts_of(tokenizer, 8)
    sampler = DynamicSampler(generator, SAMPLING, 4, 2, max_rounds=3, on_short="error")
    result = sampler.sample(lambda position: prompts[position], index=0)
    generator.close()
    assert result.rollout.rewards["alone"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(len(texts) == 1 for texts in alone.seen)


def test_slow_ones_are_scored_beside_each_other(tokenizer: Any) -> None:
    meet = threading.Barrier(8, timeout=PATIENCE)

    class Slow(Alone):
        by_completion = True

        def score(self, batch: Sequence[RewardInput]) -> list[Score]:
            meet.wait()
            return [Score(1.0) for _ in batch]

    generator = generator_of(Engine(tokenizer, {0: "12345678"}), Slow())
    rollout = generator.produce(prompts_of(tokenizer, 1), SAMPLING, 8, index=0)
    generator.close()
    assert rollout.reward.tolist() == [1.0] * 8


def test_who_scores_in_its_own_way_is_asked_with_whole_groups_unless_it_says_otherwise() -> None:
    class Own(MathReward):
        def score(self, batch: Sequence[RewardInput]) -> list[Score]:
            return [Score(0.0) for _ in batch]

    class Said(Own):
        by_completion = True

        def score(self, batch: Sequence[RewardInput]) -> list[Score]:
            return super().score(batch)

    class Renamed(MathReward):
        pass

    assert all(one.by_completion for one in (MathReward, CodeReward, Renamed, Said))
    assert not any(one.by_completion for one in (Own, Together, Reward))
