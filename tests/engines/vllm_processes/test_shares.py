"""Groups are shared out whole and balanced, every sample comes once, whoever dies in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.engines.vllm_processes.shares import LengthEstimate, Share, Shares
from lit_grpo.types import Request, Sampling

SAMPLING = Sampling(max_new_tokens=100)


def group(index: int, samples: int = 8) -> Request:
    return Request(index, (index + 1, 7), tuple(range(100 * index, 100 * index + samples)))


def samples_of(given: dict[int, Share]) -> int:
    return sum(len(share.missing) for share in given.values())


def test_groups_stay_whole_and_processes_get_the_same() -> None:
    shares = Shares(4, 128)
    assert shares.add("one", [group(i) for i in range(64)], SAMPLING) == 512
    news = shares.hand_out()
    assert [sum(len(share.request.seeds) for _, share in news[i]) for i in range(4)] == [128] * 4
    indices = [share.request.index for given in news.values() for _, share in given]
    assert sorted(indices) == list(range(64)), "no group is in two processes"
    assert shares.hand_out() == {}


def test_at_most_one_group_waits_in_a_process_and_the_tail_goes_to_whoever_is_free() -> None:
    shares = Shares(2, 16)
    shares.add("one", [group(i) for i in range(10)], SAMPLING)
    news = shares.hand_out()
    assert [samples_of(given) for given in shares.given] == [16, 16]
    # The first process ends all it has, the other nothing: what is left goes to the first.
    order = []
    while True:
        for number, share in news.get(0, []):
            order.append(share.request.index)
            for position in range(8):
                assert shares.finish(0, number, position, 50) is share
        news = shares.hand_out()
        if not news:
            break
        assert set(news) == {0}
    assert order == [0, 2, 4, 5, 6, 7, 8, 9]
    assert samples_of(shares.given[1]) == 16


def test_the_longest_prompts_come_first_and_are_balanced_by_what_was_learned() -> None:
    shares = Shares(2, 64)
    for index, length in ((0, 10), (1, 10), (2, 90), (3, 10)):
        shares.lengths.update(group(index).token_ids, length)
    shares.add("one", [group(i) for i in range(4)], SAMPLING)
    news = shares.hand_out()
    assert [[share.request.index for _, share in news[i]] for i in range(2)] == [[2], [0, 1, 3]]


def test_what_no_process_can_hold_at_once_is_cut_and_few_groups_leave_none_idle() -> None:
    shares = Shares(2, 16)
    shares.add("one", [group(0, 40), group(1, 40)], SAMPLING)
    sizes: list[int] = []
    for news in shares.hand_out().values():
        for _, share in news:
            sizes.append(len(share.samples))
            assert share.request.seeds == tuple(100 * share.request.index + sample for sample in share.samples)
    assert max(sizes) == 16
    lonely = Shares(4, 128)
    lonely.add("one", [group(0, 8)], SAMPLING)
    assert [samples_of(given) for given in lonely.given] == [0] * 4
    lonely.hand_out()
    assert [samples_of(given) for given in lonely.given] == [2] * 4


def test_a_few_groups_reach_every_process() -> None:
    """The check of the first sync asks 4 prompts: no process may go unasked, whatever lengths are known."""
    for processes in range(1, 9):
        shares = Shares(processes, 64)
        shares.lengths.update(group(0).token_ids, 100)
        shares.lengths.update(group(1).token_ids, 1)
        shares.add("check", [group(i, 4) for i in range(4)], SAMPLING)
        shares.hand_out()
        assert all(given for given in shares.given), processes


def test_what_a_dead_process_had_not_finished_comes_again_first_with_its_seeds() -> None:
    shares = Shares(2, 8)
    shares.add("one", [group(i) for i in range(4)], SAMPLING)
    news = shares.hand_out()
    ((number, share),) = news[0]
    for position in (0, 3):
        shares.finish(0, number, position, 5)
    shares.take_back(0)
    assert samples_of(shares.given[0]) == 0
    (_, again), (_, behind) = shares.hand_out()[0]
    assert len(behind.samples) == 8
    assert again.request == Request(0, share.request.token_ids, (1, 2, 4, 5, 6, 7))
    assert again.samples == (1, 2, 4, 5, 6, 7)


def test_a_cancelled_generation_is_forgotten_and_the_others_stay() -> None:
    shares = Shares(2, 8)
    shares.add("one", [group(i) for i in range(4)], SAMPLING)
    shares.add("two", [group(i) for i in range(4, 6)], SAMPLING)
    news = shares.hand_out()
    assert shares.drop("one") == {i: [number for number, _ in news[i]] for i in range(2)}
    ((number, _),) = news[0]
    assert shares.finish(0, number, 0, 5) is None, "what was on its way is dropped"
    assert {share.request.index for given in shares.hand_out().values() for _, share in given} == {4, 5}


def test_a_sample_that_comes_twice_is_noticed() -> None:
    shares = Shares(1, 8)
    shares.add("one", [group(0)], SAMPLING)
    ((number, _),) = shares.hand_out()[0]
    shares.finish(0, number, 2, 5)
    with pytest.raises(KeyError):
        shares.finish(0, number, 2, 5)


def test_lengths_are_those_of_the_prompt_or_of_all_within_the_limit() -> None:
    lengths = LengthEstimate()
    assert lengths.tokens((1,), 50) == 50
    for length in (10, 20, 30):
        lengths.update((1,), length)
    assert lengths.tokens((1,), 50) == 20
    assert lengths.tokens((1,), 15) == 15
    assert 10 < lengths.tokens((2,), 50) < 20, "a running mean of all"


@settings(max_examples=200, deadline=None)
@given(
    processes=st.integers(1, 5),
    capacity=st.integers(1, 20),
    groups=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_every_sample_comes_once_in_any_order_and_through_any_deaths(
    processes: int, capacity: int, groups: list[int], seed: int
) -> None:
    draw, shares = random.Random(seed), Shares(processes, capacity)
    asked = [group(i, samples) for i, samples in enumerate(groups)]
    missing = shares.add("one", asked, SAMPLING)
    assert missing == sum(groups)
    seen: dict[tuple[int, int], int] = {}
    while missing:
        shares.hand_out()
        busy = [i for i, given in enumerate(shares.given) if given]
        assert busy, "something is always under way"
        assert all(samples_of(given) < 2 * capacity for given in shares.given)
        i = draw.choice(busy)
        if draw.random() < 0.1:
            shares.take_back(i)
            continue
        number = draw.choice(list(shares.given[i]))
        share = shares.given[i][number]
        position = draw.choice(sorted(share.missing))
        assert shares.finish(i, number, position, draw.randrange(1, 100)) is share
        key = share.request.index, share.samples[position]
        assert key not in seen
        seen[key] = share.request.seeds[position]
        missing -= 1
    assert seen == {(r.index, s): seed for r in asked for s, seed in enumerate(r.seeds)}
