"""The order of prompts: shares, epochs, what is passed over; resumed to the bit, alike on all ranks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.data import AdditionPrompts, InMemoryPrompts, MixedPrompts
from lit_grpo.errors import UserError
from lit_grpo.rollout.curriculum import Curriculum, CurriculumConfig
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.rollout.loader import RolloutLoader
from lit_grpo.rollout.prompt_order import MixedOrder, PromptCursor, PromptOrder, first_drawn, make_order
from lit_grpo.types import Prompt, Sampling
from tests import tiny
from tests.rollout.test_loader import NoDecoder, Source, SumReward, Told, on_ranks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 10)), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(1, 12),
)
def test_every_source_gets_its_share_and_each_of_its_prompts_equally_often(sources, seed, blocks):
    starts = itertools.accumulate([size for size, _ in sources], initial=0)
    members = [list(range(start, start + size)) for (size, _), start in zip(sources, starts, strict=False)]
    total = sum(weight for _, weight in sources)
    shares = [weight / total for _, weight in sources]
    order = MixedOrder(members, shares, seed)
    seen = [order[p] for p in range(64 * blocks)]
    assert MixedOrder(members, shares, seed)[64 * blocks - 1] == seen[-1], "the position alone is the state"
    assert [order[p] for p in range(7)] == seen[:7], "also backwards"
    counts = Counter(seen)
    for own, share in zip(members, shares, strict=True):
        given = [counts[number] for number in own]
        assert abs(sum(given) - share * 64 * blocks) <= max(1, len(sources) - 1)
        assert max(given) - min(given) <= 1


def test_one_source_without_weights_is_in_the_order_it_always_was():
    prompts = [Prompt(f"p{i}", "", (1,)) for i in range(10)]
    order = make_order(prompts, 3)
    assert [order[p] for p in range(20)] == [PromptOrder(10, 3)[p] for p in range(20)]


def test_picks_pass_over_and_know_how_far_they_went():
    order = PromptOrder(10, 0)
    picks = PromptCursor(order, 5, lambda number, position: number % 2 == 0)
    expected = [(p, order[p]) for p in range(5, 40) if order[p] % 2 == 0]
    assert picks[3] == expected[3][1]
    assert [picks[i] for i in range(4)] == [number for _, number in expected[:4]]
    assert [picks.used(n) for n in range(5)] == [0, *(position + 1 - 5 for position, _ in expected[:4])]
    plain = PromptCursor(order, 5)
    assert [plain[i] for i in range(9)] == [order[5 + i] for i in range(9)]
    assert plain.used(9) == 9


# Difficulty.


def loader(outcomes: Any, config: CurriculumConfig | None, **changes: Any) -> RolloutLoader:
    prompts = [Prompt(f"p{i}", "", (i,), "1") for i in range(len(outcomes))]
    producer = RolloutGenerator(Told(outcomes), Source(), NoDecoder(), [SumReward()], 7)
    difficulty = None if config is None else Curriculum(config, prompts, [SumReward()], 7)
    options: dict[str, Any] = {
        "count": 40, "prompts_per_rollout": 4, "group_size": len(outcomes[0]), "sampling": Sampling(),
        "curriculum": difficulty,
    }  # fmt: skip
    return RolloutLoader(producer, prompts, **(options | changes))


SOLVED, MIXED, FAILED = [2, 2, 2, 2], [0, 2, 2, 0], [0, 0, 1, 0]
TABLE = [SOLVED] * 6 + [MIXED] * 6 + [FAILED] * 6


def test_what_left_the_band_is_sampled_less_and_never_less_than_the_floor():
    floor = 0.25
    counted: Counter[str] = Counter()
    rollouts = list(loader(TABLE, CurriculumConfig(floor=floor), count=200))
    for rollout in rollouts[10:]:
        counted.update(prompt.id for prompt in rollout.prompts)
    inside = [counted[f"p{i}"] for i in range(6, 12)]
    outside = [counted[f"p{i}"] for i in (*range(6), *range(12, 18))]
    expected = sum(inside) / len(inside) * floor
    assert 0.7 * expected < sum(outside) / len(outside) < 1.3 * expected
    assert min(outside) > 0, "none is given up"
    last = rollouts[-1].metrics
    assert last["curriculum/known_frac"] == 1
    assert last["curriculum/in_band_frac"] == pytest.approx(1 / 3)
    assert last["curriculum/pass_rate"] == pytest.approx(0.5)
    assert sum(r.metrics["curriculum/passed_over"] for r in rollouts) > 0
    first = rollouts[0].metrics
    assert (first["curriculum/known_frac"], first["curriculum/passed_over"]) == (0, 0)
    assert "curriculum/in_band_frac" not in first


def test_the_rate_runs_and_visits_are_counted():
    prompts = [Prompt("a", "", (1,)), Prompt("b", "", (1,))]
    running = Curriculum(CurriculumConfig(above=0.2, below=0.8, smoothing=0.5, min_visits=2), prompts, [SumReward()], 0)
    running.update([(0, "a", 1.0)])
    assert running.chance("a") == 1.0, "one visit says little"
    running.update([(1, "a", 0.0), (0, "a", 1.0)])
    assert running.rates["a"] == (3, 0.5), "in the order of the places"
    running.update([(0, "a", 1.0), (1, "a", 1.0)])
    assert running.rates["a"] == (5, 0.875)
    assert running.chance("a") == 0.1
    assert running.chance("b") == 1.0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.slow
def test_a_loader_with_difficulty_goes_on_where_the_other_would_have(dynamic, ahead):
    config = CurriculumConfig(floor=0.2)
    make = lambda: loader(TABLE, config, count=12, dynamic=dynamic, num_prefetch=ahead)  # noqa: E731
    names = lambda rollouts: [[p.id for p in r.prompts] for r in rollouts]  # noqa: E731
    straight = names(make())
    assert straight != names(loader(TABLE, None, count=12, dynamic=dynamic, num_prefetch=ahead)), (
        "something is passed over"
    )
    for cut in (1, 5, 11):
        first = make()
        iterator = iter(first)  # held, or what is sampled ahead would be cancelled
        begun = names(itertools.islice(iterator, cut))
        if ahead:
            time.sleep(0.5)  # what is sampled ahead is done by then, and must not have touched the state
        second = make()
        second.load_state_dict(first.state_dict())
        assert begun + names(second) == straight


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_ranks_pass_over_the_same_prompts(dynamic):
    def make(**changes: Any) -> RolloutLoader:
        return loader(TABLE, CurriculumConfig(floor=0.2), dynamic=dynamic, **changes)

    whole = [[p.id for p in r.prompts] for r in itertools.islice(make(), 10)]
    two = on_ranks(make, 2, 10)
    for (first, state), (second, other) in zip(*two, strict=True):
        assert state == other, "rates and position are those of all ranks"
        assert first.metrics["curriculum/known_frac"] == second.metrics["curriculum/known_frac"]
    if not dynamic:  # with it, several ranks drop what one process begins the next rollout with
        both = [[p.id for p in (*a.prompts, *b.prompts)] for (a, _), (b, _) in zip(*two, strict=True)]
        assert both == whole


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"above": 0.5, "below": 0.5}, "data.curriculum"),
        ({"above": -0.1}, "data.curriculum.above"),
        ({"floor": 0.0}, "data.curriculum.floor"),
        ({"smoothing": 1.5}, "data.curriculum.smoothing"),
        ({"min_visits": 0}, "data.curriculum.min_visits"),
    ],
)
def test_bad_settings_are_refused(arguments, key):
    with pytest.raises(UserError) as caught:
        CurriculumConfig(**arguments)
    assert caught.value.where == key


# Whole runs.


def mixture() -> MixedPrompts:
    signs = [
        {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)} for a in range(3) for b in range(3) for c in range(3)
    ]
    return MixedPrompts([AdditionPrompts(digits=1, n=20), InMemoryPrompts(signs, name="three")], [3, 1])


def fit(rollouts: int, folder: Any, path: Any = None, **changes: Any) -> tuple[tiny.Recorder, Any]:
    recorder, checkpoint = tiny.Recorder(), RolloutCheckpoint(dirpath=str(folder))
    module = tiny.module()
    settings: dict[str, Any] = {"rollouts": rollouts, "prompts": mixture(), "curriculum": CurriculumConfig()}
    data = tiny.data(**(settings | changes))
    trainer = tiny.trainer(callbacks=[recorder, checkpoint], enable_checkpointing=True)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return recorder, tiny.weights(module)


def test_a_run_with_mixing_and_difficulty_resumes_to_the_bit_and_refuses_other_data(tmp_path):
    whole, expected = fit(9, tmp_path / "whole")
    fit(4, tmp_path / "cut")
    last = tmp_path / "cut/last.ckpt"
    rest, weights = fit(9, tmp_path / "cut", last)
    assert rest.ids == whole.ids[4:]
    assert rest.metrics == whole.metrics[4:]
    assert torch.equal(weights, expected)
    assert any(m["curriculum/passed_over"] for m in whole.metrics)
    assert {"source/addition/reward", "source/three/reward", "source/three/prompts_frac"} <= whole.metrics[0].keys()
    shares = [m["source/addition/prompts_frac"] + m["source/three/prompts_frac"] for m in whole.metrics]
    assert shares == [1.0] * 9
    counted = Counter(name.partition("/")[0] for names in whole.prompts for name in names)
    assert counted["addition"] > counted["three"] > 0

    last = tmp_path / "cut/last.ckpt"
    with pytest.raises(UserError, match="another question_format") as caught:
        fit(10, tmp_path / "cut", last, format=tiny.PromptFormat(question_format="{question}="))
    assert caught.value.where == "data.format.question_format"
    with pytest.raises(UserError, match="on other prompts: 47 prompts, not 20"):
        fit(10, tmp_path / "cut", last, prompts=AdditionPrompts(digits=1, n=20))


def test_the_first_drawn_are_those_of_the_order_and_no_more_than_there_are():
    prompts = [Prompt(f"{i}", "", (i,), "0", source="a" if i else "b") for i in range(5)]
    order = make_order(prompts, 3)
    assert first_drawn(prompts, 3, None, 2) == [order[0], order[1]]
    assert sorted(first_drawn(prompts, 3, None, 100)) == list(range(5))
    mixed = first_drawn(prompts, 3, {"b": 0.5, "a": 0.5}, 100)
    assert len(mixed) == 5
    assert mixed.count(0) > 1, "half of the positions are of the source with one prompt"
