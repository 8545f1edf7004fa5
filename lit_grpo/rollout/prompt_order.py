"""The order of training prompts: seeded and endless, so that a position in it is all that a checkpoint must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from lit_grpo.types import Prompt
from lit_grpo.utils.random import derive_seed

_BLOCK = 64
"""Number of consecutive prompts among which every source gets its share."""


class Order(Protocol):
    """An endless sequence that gives the number of the prompt at each position."""

    def __getitem__(self, position: int) -> int: ...


class PromptOrder:
    """An endless, seeded order over ``count`` prompts: each epoch is another permutation of all of them."""

    def __init__(self, count: int, seed: int, purpose: str = "prompts") -> None:
        self.count, self.seed, self.purpose = count, seed, purpose
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.purpose, self.seed, epoch))
            self._order, self._epoch = torch.randperm(self.count, generator=generator).tolist(), epoch
        return self._order[offset]


class MixedOrder:
    """An order that mixes several sources in given shares, each source in an order of its own.

    Every block of 64 positions holds ``share * 64`` prompts of each source, rounded so that what is owed is carried
    over to the next block: after any number of blocks no source is more than one prompt away from its share (two
    sources; fewer than their number otherwise).

    Args:
        members: for each source the numbers of its prompts, none empty.
        shares: share of each source, in the same order; their sum is 1.
        seed: seed of the run.
    """

    def __init__(self, members: Sequence[Sequence[int]], shares: Sequence[float], seed: int) -> None:
        self.members, self.shares, self.seed = members, shares, seed
        self._orders = [PromptOrder(len(m), seed, f"prompts of source {s}") for s, m in enumerate(members)]
        # For each block, how many positions before it each source was given.
        self._given = [[0] * len(members)]
        self._block = -1
        self._sources: list[int] = []

    def __getitem__(self, position: int) -> int:
        block, offset = divmod(position, _BLOCK)
        if block != self._block:
            self._sources, self._block = self._fill(block), block
        source = self._sources[offset]
        earlier = self._given[block][source] + self._sources[:offset].count(source)
        return self.members[source][self._orders[source][earlier]]

    def _fill(self, block: int) -> list[int]:
        """Return the source of each position of a block."""
        while len(self._given) <= block + 1:
            before = self._given[-1]
            owed = [share * _BLOCK * len(self._given) - n for share, n in zip(self.shares, before, strict=True)]
            gets = [max(0, int(x)) for x in owed]
            # Rounding down left some positions over. They go to the sources that it took most from.
            by_loss = sorted(range(len(owed)), key=lambda s: (gets[s] - owed[s], s))
            for s in by_loss[: _BLOCK - sum(gets)]:
                gets[s] += 1
            while sum(gets) > _BLOCK:
                gets[max(range(len(gets)), key=lambda s: (gets[s] - owed[s], gets[s], s))] -= 1
            self._given.append([n + got for n, got in zip(before, gets, strict=True)])
        counts = [after - n for n, after in zip(self._given[block], self._given[block + 1], strict=True)]
        sources = [s for s, count in enumerate(counts) for _ in range(count)]
        generator = torch.Generator().manual_seed(derive_seed("sources", self.seed, block))
        return [sources[i] for i in torch.randperm(_BLOCK, generator=generator).tolist()]


def make_order(prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None = None) -> Order:
    """Make the order of a run's prompts, mixed by the weights of their sources if there are any."""
    if weights is None:
        return PromptOrder(len(prompts), seed)
    members: dict[str, list[int]] = {name: [] for name in weights}
    for number, prompt in enumerate(prompts):
        members[prompt.source].append(number)
    return MixedOrder(list(members.values()), list(weights.values()), seed)


def first_drawn(prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None, count: int) -> list[int]:
    """Return the numbers of the prompts at the first positions of a run's order, of no more than there are prompts.

    With weights the same prompt may come up several times.
    """
    order = make_order(prompts, seed, weights)
    return [order[position] for position in range(min(count, len(prompts)))]


class PromptCursor:
    """The prompts from a position of an order on, without those that are passed over.

    Args:
        order: order of the run.
        start: position of the first prompt that is looked at.
        accepts: whether the prompt of this number is taken at this position; None: always.
    """

    def __init__(self, order: Order, start: int, accepts: Callable[[int, int], bool] | None = None) -> None:
        self.order, self.start, self.accepts = order, start, accepts
        # Position and number of each prompt that was taken.
        self._taken: list[tuple[int, int]] = []
        self._next = start

    def __getitem__(self, offset: int) -> int:
        """Return the number of the prompt so many taken prompts after the first."""
        while len(self._taken) <= offset:
            number = self.order[self._next]
            if self.accepts is None or self.accepts(number, self._next):
                self._taken.append((self._next, number))
            self._next += 1
        return self._taken[offset][1]

    def used(self, count: int) -> int:
        """Return how many positions the first ``count`` prompts took up, those passed over before them included."""
        if not count:
            return 0
        self[count - 1]
        return self._taken[count - 1][0] + 1 - self.start
