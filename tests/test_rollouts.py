"""From prompts to rollouts: ids pass unchanged, groups stay whole, order and seeds are a matter of position alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.module import make_experience
from lit_grpo.policy import pad_rows, share_prompts
from lit_grpo.rollouts import EvaluationLoader, PromptOrder, RolloutLoader, RolloutProducer
from lit_grpo.types import Completion, Prompt, Request, Sampling, Score
from tests import tiny
from tests.tiny import EvenReward, Reward


class EchoEngine:
    """Gives back random ids, in random order, and remembers what it was asked."""

    def __init__(self, ids: dict[tuple[int, int], tuple[int, ...]] | None = None) -> None:
        self.policy_version = -1
        self.ids = ids
        self.asked: list[Request] = []
        self.synced: list[int] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.asked.extend(requests)
        jobs = [(r.index, s, seed) for r in requests for s, seed in enumerate(r.seeds)]
        random.Random(0).shuffle(jobs)
        for index, sample, seed in jobs:
            draw = random.Random(seed)
            ids = self.ids[(index, sample)] if self.ids else tuple(draw.choices(range(50), k=draw.randint(0, 6)))
            yield Completion(index, sample, ids, tuple([-0.5] * len(ids)), "stop", self.policy_version)

    def sync(self, weights: Any, version: int) -> None:
        self.policy_version = version
        self.synced.append(version)

    def close(self) -> None:
        self.asked = []


class Source:
    policy_version = 0

    def named_weights(self) -> Any:
        return iter(())


class NoDecoder:
    """A tokenizer that can be read but cannot encode: no path may lead back from text to ids."""

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def producer(engine: Any, rewards: Sequence[Reward] | None = None, seed: int = 7) -> RolloutProducer:
    return RolloutProducer(engine, Source(), NoDecoder(), rewards or [EvenReward()], seed)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"question {i}", tuple(range(i % 5 + 1)), "1") for i in range(count)]


ids = st.lists(st.integers(0, 99), max_size=7).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4),
    st.integers(1, 4),
    st.data(),
)
def test_ids_go_from_the_engine_into_the_loss_unchanged(prompt_ids, group_size, data):
    sampled = {(g, s): data.draw(ids) for g in range(len(prompt_ids)) for s in range(group_size)}
    questions = [Prompt(f"p{g}", "", p, None) for g, p in enumerate(prompt_ids)]
    engine = EchoEngine(sampled)
    rollout = producer(engine).produce(questions, Sampling(), group_size, index=0)
    assert [r.token_ids for r in engine.asked] == prompt_ids
    experience = make_experience(rollout, "cpu")
    flat_prompts = [p for p in prompt_ids for _ in range(group_size)]
    flat = [sampled[(g, s)] for g in range(len(prompt_ids)) for s in range(group_size)]
    width = max(1, experience.width)
    for build in (pad_rows, share_prompts):
        batch = build(flat_prompts, flat, width=width)
        back: list[list[int]] = [[] for _ in flat]
        for row, token, source in zip(batch.row, batch.target, batch.source, strict=True):
            back[int(row)].append(int(token))
            before = batch.input_ids.flatten()[source]
            place = len(back[int(row)]) - 1
            assert int(before) == (flat_prompts[int(row)][-1] if place == 0 else flat[int(row)][place - 1])
        assert [tuple(row) for row in back] == flat
    for i, expected in enumerate(flat):
        assert tuple(experience.token_ids[i, : int(experience.lengths[i])].tolist()) == expected
        assert int(experience.mask[i].sum()) == len(expected)


def test_groups_are_whole_and_in_order_whatever_order_the_engine_answers_in():
    rollout = producer(EchoEngine()).produce(prompts(3), Sampling(), 4, index=5)
    assert [(c.request, c.sample) for c in rollout.completions] == [(g, s) for g in range(3) for s in range(4)]
    assert rollout.reward.tolist() == [float(sum(c.token_ids) % 2 == 0) for c in rollout.completions]
    assert rollout.texts[5] == " ".join(map(str, rollout.completions[5].token_ids))


def test_rewards_are_weighted_and_kept_apart():
    class Constant(Reward):
        def score(self, batch: Any) -> Any:
            return [Score(2.0, timed_out=item.completion.sample == 0) for item in batch]

    rewards = [EvenReward(weight=0.5), Constant(weight=-1.0)]
    rollout = producer(EchoEngine(), rewards).produce(prompts(2), Sampling(), 2, index=0)
    assert set(rollout.rewards) == {"even_reward", "constant"}
    torch.testing.assert_close(rollout.reward, 0.5 * rollout.rewards["even_reward"] - 2.0)
    assert rollout.metrics["timeouts/constant"] == 0.5


@pytest.mark.parametrize("fault", ["twice", "missing"])
def test_a_faulty_engine_is_noticed(fault):
    class Faulty(EchoEngine):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
            answers = list(super().generate(requests, sampling))
            yield from answers[1:] if fault == "missing" else [*answers[:1], *answers]

    with pytest.raises(RuntimeError, match=fault):
        producer(Faulty()).produce(prompts(2), Sampling(), 2, index=0)


def loader(engine: Any, count: int = 4, **changes: Any) -> RolloutLoader:
    settings: dict[str, Any] = {
        "count": count,
        "prompts_per_rollout": 4,
        "group_size": 2,
        "sampling": Sampling(),
    }
    return RolloutLoader(producer(engine), prompts(10), **(settings | changes))


def content(rollout: Any) -> Any:
    return [p.id for p in rollout.prompts], [c.token_ids for c in rollout.completions]


def test_a_loader_restored_from_its_state_goes_on_where_the_other_would_have():
    straight = [content(r) for r in loader(EchoEngine())]
    first = loader(EchoEngine())
    iterator = iter(first)
    begun = [content(next(iterator)) for _ in range(2)]
    second = loader(EchoEngine())
    second.load_state_dict(first.state_dict())
    assert begun + [content(r) for r in second] == straight


def test_another_epoch_is_another_set_of_rollouts():
    one = loader(EchoEngine(), 2)
    first, second = [content(r) for r in one], [content(r) for r in one]
    assert len(first) == len(second) == 2
    assert first != second


def test_what_is_sampled_does_not_depend_on_the_number_of_ranks():
    whole = [content(r) for r in loader(EchoEngine())]
    halves = [[content(r) for r in loader(EchoEngine(), rank=rank, world_size=2)] for rank in range(2)]
    for k, (ids_of_prompts, tokens) in enumerate(whole):
        assert halves[0][k][0] + halves[1][k][0] == ids_of_prompts
        assert halves[0][k][1] + halves[1][k][1] == tokens


def test_every_prompt_once_an_epoch_in_another_order_each_time():
    order = PromptOrder(10, 3)
    epochs = [[order[e * 10 + i] for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [PromptOrder(10, 4)[i] for i in range(10)] != epochs[0]
    assert [PromptOrder(10, 3)[25], order[25]] == [epochs[2][5]] * 2


def test_evaluation_sees_each_prompt_once_over_all_ranks_with_the_same_seeds_each_time():
    def evaluate(rank: int, world: int) -> dict[str, Any]:
        engine = EchoEngine()
        batches = EvaluationLoader(
            producer(engine),
            prompts(7),
            batch_prompts=2,
            group_size=1,
            sampling=Sampling(),
            rank=rank,
            world_size=world,
        )
        assert len(batches) == len(list(batches))
        return {p.id: r.completions[i].token_ids for r in batches for i, p in enumerate(r.prompts)}

    whole = evaluate(0, 1)
    assert len(whole) == 7
    assert evaluate(0, 2) | evaluate(1, 2) == whole
    assert not set(evaluate(0, 2)) & set(evaluate(1, 2))


def test_initial_completions_are_of_the_first_training_prompts_and_change_nothing_that_follows():
    class Measure(tiny.pl.Callback):
        found: list[Any] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            few, many = (trainer.datamodule.initial_completions(n) for n in (3, 1000))
            self.found.extend([few, many])

    with_it, without = tiny.Recorder(), tiny.Recorder()
    tiny.trainer(callbacks=[Measure(), with_it]).fit(tiny.module(), datamodule=tiny.data())
    tiny.trainer(callbacks=[without]).fit(tiny.module(), datamodule=tiny.data())
    few, many = Measure.found
    assert (len(few.prompts), len(few.completions), few.policy_version) == (3, 12, 0)
    assert [p.id for p in few.prompts] == with_it.prompts[0][:3]
    assert [p.id for p in many.prompts[:3]] == [p.id for p in few.prompts]
    assert len(many.prompts) == len({p.id for p in many.prompts}) == 100
    assert [c.token_ids for c in few.completions] != with_it.ids[0][:12], "random numbers of their own"
    assert with_it.ids == without.ids
