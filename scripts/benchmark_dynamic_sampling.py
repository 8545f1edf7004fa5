#!/usr/bin/env python3
"""How many decoding steps and tokens a rollout of dynamic sampling takes, on an engine that is simulated.

    python scripts/benchmark_dynamic_sampling.py
    python scripts/benchmark_dynamic_sampling.py --mixed 0.5 0.2 --tokens 180 --seats 512 --groups 64

The sampler is the real one. Of the engine only time is simulated: every running sample gets a token a step, a seat that
becomes free is taken by the next sample that waits, and lengths are drawn around a mean. With a small model steps cost
nearly the same whatever their batch is, so that seconds follow the steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.rewards import Reward
from lit_grpo.rollout.dynamic_sampling import DynamicSampler, Tried
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.types import Completion, Prompt, Request, RewardInput, Sampling

LIMIT = 320
"""Tokens of the longest completion."""
SPREAD = 70
"""Standard deviation of their lengths."""


@dataclass
class Running:
    """A sample that waits (``end`` is its length) or is drawn (``end`` is the step at which it ends)."""

    end: int
    generation: object
    completion: Completion


class Clock:
    """An engine of so many seats whose samples take steps and compute nothing.

    Args:
        seats: samples that are drawn at once.
        mixed: share of the prompts whose groups are mixed.
        tokens: mean length of a completion.
    """

    policy_version = 0

    def __init__(self, seats: int, mixed: float, tokens: int) -> None:
        self._seats, self._mixed, self._mean = seats, mixed, tokens
        self.steps = self.tokens = 0
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._came: dict[object, deque[Completion]] = {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Give every sample when its last step is taken; the first of its ids says whether it is right."""
        generation = object()
        self._came[generation] = deque()
        for request in requests:
            mixed = random.Random(request.seeds[0]).random() < self._mixed
            for number, seed in enumerate(request.seeds):
                length = min(LIMIT, max(20, int(random.Random(seed).gauss(self._mean, SPREAD))))
                completion = Completion(request.index, number, (int(mixed and number % 2 == 0),), (0.0,), "stop", 0)
                self._waiting.append(Running(length, generation, completion))
        return self._give(generation, sum(len(request.seeds) for request in requests))

    def _give(self, generation: object, missing: int) -> Iterator[Completion]:
        try:
            for _ in range(missing):
                while not self._came[generation]:
                    self._go_on()
                yield self._came[generation].popleft()
        finally:
            del self._came[generation]
            self._running = [one for one in self._running if one.generation is not generation]
            self._waiting = deque(one for one in self._waiting if one.generation is not generation)

    def _go_on(self) -> None:
        """Take steps until a sample ends."""
        while self._waiting and len(self._running) < self._seats:
            one = self._waiting.popleft()
            one.end += self.steps
            self._running.append(one)
        end = min(one.end for one in self._running)
        self.tokens += (end - self.steps) * len(self._running)
        self.steps = end
        for one in self._running:
            if one.end == end:
                self._came[one.generation].append(one.completion)
        self._running = [one for one in self._running if one.end > end]

    def sync(self, weights: Any, version: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class Right(Reward):
    """What the simulated engine says of its samples."""

    def __init__(self) -> None:
        super().__init__(name="right")

    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        return [float(one.completion.token_ids[0]) for one in batch]


class NoText:
    """A tokenizer for ids that mean nothing."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""


class Still:
    """A policy that does not change."""

    policy_version = 0

    def named_weights(self) -> Iterator[Any]:
        return iter(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed", type=float, nargs="+", default=[0.8, 0.5, 0.3], help="shares of mixed groups")
    parser.add_argument("--tokens", type=int, default=180, help="mean length of a completion")
    parser.add_argument("--seats", type=int, default=512, help="samples that the engine draws at once")
    parser.add_argument("--groups", type=int, default=64, help="of a rollout")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=12, help="the first of which is not counted")
    args = parser.parse_args()
    print("| share of mixed groups | decoding steps | tokens sampled | rounds | prompts |\n|---|---|---|---|---|")
    for mixed in args.mixed:
        engine = Clock(args.seats, mixed, args.tokens)
        generator = RolloutGenerator(engine, Still(), NoText(), [Right()], seed=0)
        sampler = DynamicSampler(generator, Sampling(max_new_tokens=LIMIT), args.group_size, args.groups)
        position, before, rows = 0, (0, 0), []
        for index in range(args.rollouts):
            rows.append(one_rollout(engine, sampler, position, index, before))
            before = args.groups, int(rows[-1][3])
            position += before[1]
        means = [statistics.mean(column) for column in zip(*rows[1:], strict=True)]
        print(f"| {mixed:g} | {means[0]:,.0f} | {means[1]:,.0f} | {means[2]:.1f} | {means[3]:.0f} |")


def one_rollout(
    engine: Clock, sampler: DynamicSampler, position: int, index: int, before: Tried
) -> tuple[float, float, float, float]:
    """Make a rollout of the prompts from a position on, and return its steps, tokens, rounds and prompts."""
    steps, tokens = engine.steps, engine.tokens
    made = sampler.sample(lambda offset: Prompt(str(position + offset), "", (1,), "1"), index=index, before=before)
    rounds = made.rollout.metrics["sampling/rounds"]
    return engine.steps - steps, engine.tokens - tokens, rounds, made.prompts


if __name__ == "__main__":
    main()
