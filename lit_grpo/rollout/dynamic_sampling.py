"""Active sampling: keep the engine busy with prompts until enough groups have unequal rewards, then drop the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from lit_grpo.rollout.generator import RolloutProducer, Scored
from lit_grpo.rollout.refill import OnShort, Refilled, ask, choose, join, split
from lit_grpo.types import Completion, Prompt, Sampling

LAG = 4
"""A group's score is looked at when so many later groups have been sampled. Nearly always it is ready by then, and the
moment depends on the order of sampling alone, not on how fast a reward was: what is asked for next, and with it the
batches of an engine in this process, are the same in every run."""


def active_sampling(
    producer: RolloutProducer,
    prompt_at: Callable[[int], Prompt],
    sampling: Sampling,
    group_size: int,
    *,
    index: int,
    groups: int,
    max_rounds: int = 10,
    on_short: OnShort = "fill",
    sync: bool = True,
) -> Refilled:
    """A rollout of the first ``groups`` prompts, in their order, whose groups have unequal rewards.

    As :func:`lit_grpo.rollout.refill.refill` for one process, without rounds: as soon as it can be foreseen that the
    prompts
    under way will not do, more are given to the engine, and what is no longer needed is cancelled. "First" is by the
    prompts' order and not by who finished first, which would favour short completions; prompts behind the last one
    chosen count as not used, whatever was sampled for them, and begin the next rollout.

    Args:
        producer: engine and rewards.
        prompt_at: the prompt so many places after the start of the rollout.
        sampling: how to draw.
        group_size: samples of each prompt.
        index: number of the rollout.
        groups: of the rollout.
        max_rounds: at most ``max_rounds * groups`` prompts are tried.
        on_short: what happens if they do not suffice.
        sync: bring the engine's weights up to date first.

    Raises:
        StopRun: see :func:`lit_grpo.rollout.refill.refill`.
    """
    seconds_sync = producer.sync() if sync else 0.0
    started = time.perf_counter()
    most = max_rounds * groups
    stream = _Groups(producer, prompt_at, sampling, group_size, index)
    flags: dict[int, bool] = {}
    rewards: list[float] = []
    asked, waves, settled = 0, 0, 0
    results: dict[int, Scored] = {}
    try:
        while True:
            mixed = sum(flags.values())
            under_way = asked - len(flags)
            # Groups to be expected of those under way, at the share seen so far; all of them while nothing is known.
            expected = under_way * (mixed / len(flags) if flags else 1.0)
            if asked < most and mixed + expected < groups and (under_way == 0 or len(flags) >= groups // 2):
                more = min(most - asked, ask(groups, mixed, len(flags)) - under_way if flags else groups)
                if more > 0:
                    stream.add(range(asked, asked + more))
                    asked, waves = asked + more, waves + 1
            found = stream.next()
            if found is None:
                if asked >= most:
                    break
                continue
            place, result = found
            results[place] = result
            totals = producer.totals(result)
            rewards += totals
            flags[place] = any(value != totals[0] for value in totals)
            while settled in flags:
                settled += 1
            if sum(flags[p] for p in range(settled)) >= groups:
                break
    finally:
        stream.close()
    sampled = time.perf_counter()
    known = {place: flags[place] for place in range(settled)}  # behind the first gap nothing counts
    mixed = sum(known.values())
    chosen = choose(known, groups, mixed, waves, on_short)
    used = chosen[-1] + 1 if mixed >= groups else settled
    order = sorted(results)
    times = {"sync": seconds_sync, "generate": sampled - started, "reward": 0.0}
    whole = producer.assemble(
        [prompt_at(p) for p in order],
        [stream.completions[p] for p in order],
        [results[p] for p in order],
        sampling,
        index,
        times,
    )
    own = {group.place: group for group in split(whole, order)}
    metrics = whole.metrics | {
        "sampling/rounds": float(waves),
        "sampling/prompts": float(used),
        "sampling/kept": float(min(mixed, groups)),
        "sampling/surplus": float(sum(flags.values()) - min(mixed, groups)),
        "sampling/short": float(max(0, groups - mixed)),
        "sampling/cancelled": float(asked - len(order)),
        "sampling/reward": sum(rewards) / len(rewards),
    }
    skipped = [place for place in range(used) if not flags[place] and place not in chosen]
    return Refilled(join([own[p] for p in chosen], whole, metrics), used, skipped, [own[p] for p in order if p < used])


class _Groups:
    """Whole groups in the order in which they were sampled, with more prompts added at any time."""

    def __init__(
        self,
        producer: RolloutProducer,
        prompt_at: Callable[[int], Prompt],
        sampling: Sampling,
        group_size: int,
        index: int,
    ) -> None:
        self.producer, self.prompt_at, self.sampling = producer, prompt_at, sampling
        self.group_size, self.index = group_size, index
        self.completions: dict[int, list[Completion]] = {}
        self._parts: dict[int, list[Completion]] = {}
        self._open: deque[Iterator[Completion]] = deque()
        self._scores: deque[tuple[int, Future[Scored]]] = deque()

    def add(self, places: Sequence[int]) -> None:
        """Ask for the prompts at these places too."""
        make = self.producer.request
        requests = [make(p, p, self.prompt_at(p), self.group_size, self.index) for p in places]
        self._parts |= {place: [] for place in places}
        self._open.append(self.producer.sampled(requests, self.sampling))

    def next(self) -> tuple[int, Scored] | None:
        """Place and scores of the next group; None if nothing is under way."""
        while self._open and len(self._scores) <= LAG:
            completion = next(self._open[0], None)
            if completion is None:
                self._open.popleft()
                continue
            self._open.rotate(-1)
            place = completion.request
            group = self._parts[place]
            group.append(completion)
            if len(group) == self.group_size:
                del self._parts[place]
                self.completions[place] = sorted(group, key=lambda c: c.sample)
                self._scores.append((place, self.producer.scored(self.prompt_at(place), self.completions[place])))
        if not self._scores:
            if self._parts:
                raise RuntimeError(f"the engine ended with {len(self._parts)} groups incomplete")
            return None
        place, future = self._scores.popleft()
        return place, future.result()

    def close(self) -> None:
        """Cancel what is under way."""
        for generation in self._open:
            # An iterator by its type, a generator in fact.
            generation.close()  # type: ignore[attr-defined]
        for _, future in self._scores:
            future.cancel()
