"""From prompts to rollouts: ids pass unchanged, groups stay whole, order and seeds are a matter of position alone."""

from __future__ import annotations

import itertools
import math
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.errors import StopRun
from lit_grpo.module import make_experience
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import pad_rows, share_prompts
from lit_grpo.rollout.dynamic_sampling import SURE, at_least, prompts_to_ask
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.rollout.loader import EvaluationLoader, PromptOrder, RolloutLoader
from lit_grpo.types import Completion, Prompt, Request, Sampling, Score
from tests import tiny
from tests.tiny import EvenReward, Reward
from tests.waiting import PATIENCE


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


def producer(engine: Any, rewards: Sequence[Reward] | None = None, seed: int = 7) -> RolloutGenerator:
    return RolloutGenerator(engine, Source(), NoDecoder(), rewards or [EvenReward()], seed)


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
        assert experience.token_ids is not None
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
    timeouts, scored = rollout.sums["reward_errors/timeout_frac/constant"]
    assert timeouts / scored == 0.5


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

    # Nor does what is drawn for each completion later: label noise.
    def keys_of(rollout: Any) -> torch.Tensor:
        found = make_experience(rollout, "cpu").sample_keys
        assert found is not None
        return found

    keys = [keys_of(r) for r in loader(EchoEngine(), 1)]
    parts = [keys_of(r) for i in range(2) for r in loader(EchoEngine(), 1, rank=i, world_size=2)]
    assert torch.equal(torch.cat(parts), keys[0])
    assert len(set(keys[0].tolist())) == 8


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
    found: list[Any] = []

    class Measure(tiny.pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            few, many = (trainer.datamodule.initial_completions(n) for n in (3, 1000))
            found.extend([few, many])

    with_it, without = tiny.Recorder(), tiny.Recorder()
    tiny.trainer(callbacks=[Measure(), with_it]).fit(tiny.module(), datamodule=tiny.data())
    tiny.trainer(callbacks=[without]).fit(tiny.module(), datamodule=tiny.data())
    few, many = found
    assert (len(few.prompts), len(few.completions), few.policy_version) == (3, 12, 0)
    assert [p.id for p in few.prompts] == with_it.prompts[0][:3]
    assert [p.id for p in many.prompts[:3]] == [p.id for p in few.prompts]
    assert len(many.prompts) == len({p.id for p in many.prompts}) == 100
    assert [c.token_ids for c in few.completions] != with_it.ids[0][:12], "random numbers of their own"
    assert with_it.ids == without.ids


class SumReward(Reward):
    """The first id of the completion: told by the test through the engine."""

    def score(self, batch: Any) -> list[Score]:
        return [Score(float(item.completion.token_ids[0]) / 2) for item in batch]


class Told(EchoEngine):
    """Answers prompt ``pK`` with rewards ``outcomes[K]`` (in halves); a prompt's only id is its number."""

    def __init__(self, outcomes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.outcomes = outcomes
        self.calls = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.calls += 1
        self.asked.extend(requests)
        for r in requests:
            for s in range(len(r.seeds)):
                ids = (self.outcomes[r.token_ids[0]][s], r.seeds[s] % 1000)
                yield Completion(r.index, s, ids, (-0.5, -0.5), "stop", self.policy_version)


def dynamic(outcomes: Sequence[Sequence[int]], **changes: Any) -> RolloutLoader:
    questions = [Prompt(f"p{i}", "", (i,), "1") for i in range(len(outcomes))]
    settings: dict[str, Any] = {
        "count": 3,
        "prompts_per_rollout": 4,
        "group_size": len(outcomes[0]),
        "sampling": Sampling(),
        "dynamic": True,
    }
    return RolloutLoader(producer(Told(outcomes), [SumReward()]), questions, **(settings | changes))


def on_ranks(make: Any, world: int, rollouts: int) -> list[list[Any]]:
    """What each rank's loader gives, the ranks running as threads that really exchange."""
    meeting, box = threading.Barrier(world, timeout=PATIENCE), [None] * world

    def gather_of(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            box[rank] = value
            meeting.wait()
            out = list(box)
            meeting.wait()
            return out

        return gather

    def work(rank: int) -> list[Any]:
        loader = make(rank=rank, world_size=world, gather=gather_of(rank))
        found = []
        for rollout in itertools.islice(loader, rollouts):
            found.append((rollout, loader.state_dict()))
        return found

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world)))


outcomes = st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=12, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    outcomes, st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.sampled_from(["reward", "correct"])
)
def test_dynamic_sampling_takes_every_mixed_group_and_no_other(table, max_rounds, world, seed, uniform_by):
    """Equal rewards (also equal 0.5) never, unequal always; whole groups, bounded, no prompt twice, on any ranks.

    By what is correct only 2 (a reward of 1) differs from the others: 0 and 0.5 are both wrong.
    """

    def make(**changes: Any) -> RolloutLoader:
        loader = dynamic(table, max_rounds=max_rounds, uniform_by=uniform_by, **changes)
        loader.order = PromptOrder(len(table), seed)
        return loader

    order = [PromptOrder(len(table), seed)[i] for i in range(200)]
    told = {k: {halves == 2 for halves in row} if uniform_by == "correct" else set(row) for k, row in enumerate(table)}
    mixed = [len(told[k]) > 1 for k in order]
    if not any(mixed):
        with pytest.raises(StopRun, match="0 of 4"):
            next(iter(make()))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ranks = on_ranks(make, world, 1)
        except StopRun:
            assert not any(mixed[: 4 * max_rounds])
            return
        one = next(iter(make()))
    rollouts, state = [rank[0][0] for rank in ranks], ranks[0][0][1]
    assert all(rank[0][1] == state for rank in ranks)
    metrics = rollouts[0].metrics
    taken = state["position"]
    assert metrics["sampling/prompts"] == taken <= 4 * max_rounds
    assert metrics["sampling/rounds"] >= 1
    # The same groups, sampled with the same seeds, as one process takes.
    by_prompt = {p.id: r.completions[3 * g : 3 * g + 3] for r in rollouts for g, p in enumerate(r.prompts)}
    for g, prompt in enumerate(one.prompts):
        if taken <= len(table):
            ids = [c.token_ids for c in one.completions[3 * g : 3 * g + 3]]
            assert [c.token_ids for c in by_prompt[prompt.id]] == ids
    assert sorted(p.id for p in one.prompts) == sorted(p.id for r in rollouts for p in r.prompts)
    positions = [(p.id, at) for r in rollouts for p, at in zip(r.prompts, r.positions, strict=True)]
    assert sorted(positions) == sorted(zip((p.id for p in one.prompts), one.positions, strict=True))
    assert one.metrics["sampling/prompts"] == taken
    assert all(len(r.prompts) == 4 // world for r in rollouts), "the same number on each rank"
    used = sorted(p.id for r in rollouts for p in r.prompts)
    good = [f"p{order[i]}" for i in range(taken) if mixed[i]]
    if len(good) >= 4:
        assert used == sorted(good[:4])
        assert (metrics["sampling/kept"], metrics["sampling/short"]) == (4, 0)
        # What lies behind the last prompt chosen counts as not used.
        assert metrics["sampling/surplus"] >= len(good) - 4 == 0
        assert mixed[taken - 1]
    else:
        assert taken == 4 * max_rounds
        flat = [f"p{order[i]}" for i in range(taken) if not mixed[i]]
        assert used == sorted(good + flat[: 4 - len(good)])
        assert (metrics["sampling/kept"], metrics["sampling/short"]) == (len(good), 4 - len(good))
    if uniform_by == "correct":
        # What was sampled for the rollout, counted apart from what was kept.
        correct = [[halves == 2 for halves in table[k]] for k in order[:taken]]
        for rollout in (*rollouts, one):
            assert rollout.metrics["sampling/all_correct_frac"] == pytest.approx(sum(map(all, correct)) / taken)
            nothing = sum(not any(of_group) for of_group in correct)
            assert rollout.metrics["sampling/all_wrong_frac"] == pytest.approx(nothing / taken)
    if taken <= len(table):
        assert len(set(used)) == 4
    for rollout in rollouts:
        assert [(c.request, c.sample) for c in rollout.completions] == [
            (g, s) for g in range(len(rollout.prompts)) for s in range(3)
        ]
        for i, c in enumerate(rollout.completions):
            assert c.token_ids[0] == table[rollout.prompts[i // 3].token_ids[0]][i % 3]
            assert float(rollout.reward[i]) == c.token_ids[0] / 2
            assert bool(rollout.correct[i]) == (c.token_ids[0] == 2)


def test_dynamic_sampling_asks_for_as_many_as_nearly_always_suffice():
    assert prompts_to_ask(8, 1.0, 24) == 8
    assert prompts_to_ask(64, 0.5, 192) == 153, "128 on average"
    assert prompts_to_ask(4, 0.5, 24) == 16
    assert prompts_to_ask(8, 0.0, 24) == prompts_to_ask(8, 0.04, 24) == 24, "at most three times the rollout"
    for share in (0.3, 0.5, 0.9):
        for missing in (1, 7, 64):
            asked = prompts_to_ask(missing, share, 1000)
            enough = [k for k in range(missing, 1000) if at_least(k, share, SURE) >= missing]
            assert asked == enough[0]
            odds = (math.comb(asked, k) * share**k * (1 - share) ** (asked - k) for k in range(missing, asked + 1))
            assert 0.975 < sum(odds) <= 1


def test_a_dynamic_rollout_is_asked_for_at_once_by_the_share_of_the_one_before():
    """Half of the groups are mixed: the first rollout finds it out, and the others come in about one round."""
    draw = random.Random(1)
    table = [[0, 1] if draw.random() < 0.5 else [1, 1] for _ in range(400)]
    loader = dynamic(table, count=6, prompts_per_rollout=32)
    rounds = [rollout.metrics["sampling/rounds"] for rollout in loader]
    assert rounds[0] > 1
    assert sum(rounds[1:]) <= 8
    assert loader.tried[0] == 32
    assert 50 <= loader.tried[1] <= 80
    again = dynamic(table, count=6, prompts_per_rollout=32)
    again.load_state_dict(loader.state_dict())
    assert again.tried == loader.tried


def test_what_is_to_be_done_meanwhile_is_done_once_in_the_main_thread_beside_the_first_completions():
    done, begun = [], threading.Event()

    class Begins(EchoEngine):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
            threads.append(threading.current_thread())
            begun.set()
            yield from super().generate(requests, sampling)

    def meanwhile() -> None:
        assert begun.wait(PATIENCE), "nothing is sampled beside it"
        done.append(threading.current_thread())

    threads: list[threading.Thread] = []
    made = RolloutGenerator(Begins(), Source(), NoDecoder(), [EvenReward()], 7, meanwhile=meanwhile)
    with ThreadPoolExecutor(1) as pool:
        # Beside the learner it is not its turn.
        pool.submit(made.produce, prompts(2), Sampling(), 2, index=0).result()
    assert done == []
    first = made.produce(prompts(2), Sampling(), 2, index=1)
    second = made.produce(prompts(2), Sampling(), 2, index=2)
    assert done == [threading.main_thread()]
    assert threads[1] is not threads[2] is threading.main_thread()
    plain = producer(EchoEngine())
    for index, rollout in ((1, first), (2, second)):
        assert content(rollout) == content(plain.produce(prompts(2), Sampling(), 2, index=index))


def test_every_round_samples_with_seeds_of_its_own():
    table = [[1, 1]] * 8 + [[0, 1]] * 4
    loader = dynamic(table)
    rollouts = list(loader)
    engine = cast(Any, loader.source).engine
    seeds = [seed for request in engine.asked for seed in request.seeds]
    assert len(seeds) == len(set(seeds)) > 3 * 8
    # What was begun behind the last prompt chosen is not used up: the next rollout begins with it.
    assert sum(r.metrics["sampling/prompts"] for r in rollouts) == loader.position <= len(seeds) / 2


def test_a_dynamic_loader_restored_from_its_state_goes_on_where_the_other_would_have():
    draw = random.Random(5)
    table = [[draw.randint(0, 1) for _ in range(3)] for _ in range(20)]
    straight = [content(r) for r in dynamic(table, count=6)]
    for cut in (1, 2, 5):
        first = dynamic(table, count=6)
        begun = [content(r) for r in itertools.islice(first, cut)]
        second = dynamic(table, count=6)
        second.load_state_dict(first.state_dict())
        assert begun + [content(r) for r in second] == straight
        assert second.position == sum(len(r[0]) for r in straight) + sum(second.skipped.values())


def test_a_short_rollout_is_loud_or_ends_the_run():
    table = [[0, 1]] + [[1, 1]] * 19
    with pytest.warns(UserWarning, match="1 of 4 groups with unequal rewards"):
        (rollout,) = itertools.islice(dynamic(table, max_rounds=5), 1)
    assert (len(rollout.prompts), rollout.metrics["sampling/short"]) == (4, 3)
    with pytest.raises(StopRun, match="1 of 4 groups"):
        next(iter(dynamic(table, max_rounds=5, on_short="error")))
    with pytest.raises(StopRun, match="0 of 4 groups"):
        next(iter(dynamic([[1, 1]] * 20, max_rounds=2)))


def test_metrics_of_all_rounds_are_added_up():
    table = [[0, 1]] * 2 + [[1, 1]] * 10
    loader = dynamic(table)
    rollout = next(iter(loader))
    metrics, asked = rollout.metrics, len(cast(Any, loader.source).engine.asked)
    # Groups that were whole before it was known that they are not needed count too.
    groups = (rollout.sampled_tokens or 0) / (2 * 2)
    assert 4 < metrics["sampling/prompts"] <= groups == asked - metrics["sampling/cancelled"]
    assert rollout.sums["reward_errors/timeout_frac/sum_reward"][0] == 0
    assert 0.5 <= rollout.metrics["sampling/reward"] * 2 <= 1.0


def test_objectives_with_dynamic_sampling_get_rollouts_of_mixed_groups_and_resume_to_the_bit(tmp_path):
    def run(rollouts: int, folder: str, path: Any = None) -> tuple[Any, Any]:
        recorder, checkpoint = tiny.Recorder(), RolloutCheckpoint(dirpath=str(tmp_path / folder))
        module = tiny.module(objective=ObjectiveConfig(recipe="dapo", overlong_penalty=False))
        trainer = tiny.trainer(callbacks=[recorder, checkpoint], enable_checkpointing=True)
        trainer.fit(module, datamodule=tiny.data(rollouts=rollouts, group_size=2), ckpt_path=path)
        return recorder, tiny.weights(module)

    whole, expected = run(4, "whole")
    assert all(m["groups/zero_std_frac"] == 0 and m["sampling/short"] == 0 for m in whole.metrics)
    assert max(m["sampling/rounds"] for m in whole.metrics) > 1
    run(2, "cut")
    rest, weights = run(4, "cut", tmp_path / "cut" / "last.ckpt")
    assert rest.ids == whole.ids[2:]
    assert rest.prompts == whole.prompts[2:]
    assert torch.equal(weights, expected)
