"""Which engine process samples what: whole groups, balanced by the tokens that they are expected to have.

A group is never spread over processes, since its samples share the prefill of their prompt. Only what one process could
not hold at once is cut, and so is a generation of fewer groups than processes, which would leave some idle.

A process is given a group whenever it works on fewer samples than it can hold, so that at most one group waits in it
and the tail of a generation is shared out as it comes. Who samples what changes no token: every sample has a seed of
its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from lit_grpo.types import Request, Sampling

_PROMPTS_KNOWN = 100_000
"""Prompts whose lengths are remembered, the latest ones."""
_RECENT = 0.02
"""Weight of a new completion in the mean length of all."""


@dataclass(eq=False, slots=True)
class Share:
    """Samples of one prompt that one process works on."""

    owner: Hashable
    """The generation that asked for them."""
    request: Request
    """With the seeds of these samples alone."""
    samples: tuple[int, ...]
    """Number of each seed's sample among those of the request that the caller made."""
    sampling: Sampling
    missing: set[int] = field(default_factory=set)
    """Positions among ``samples`` whose completions have not come."""
    expected: float = 0.0
    """Tokens that one of the samples is expected to have."""

    def rest(self) -> Share:
        """Return the same with the missing samples alone."""
        kept = sorted(self.missing)
        request = Request(self.request.index, self.request.token_ids, tuple(self.request.seeds[i] for i in kept))
        return Share(self.owner, request, tuple(self.samples[i] for i in kept), self.sampling, set(range(len(kept))))


class LengthEstimate:
    """Learns how many tokens completions have: of each prompt that was seen, and of all."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._mean: float | None = None

    def update(self, prompt: tuple[int, ...], length: int) -> None:
        """Take note of one completion."""
        self._mean = length if self._mean is None else self._mean + _RECENT * (length - self._mean)
        key = hash(prompt)
        count, mean = self._by_prompt.pop(key, (0, 0.0))
        self._by_prompt[key] = count + 1, mean + (length - mean) / (count + 1)
        if len(self._by_prompt) > _PROMPTS_KNOWN:
            self._by_prompt.popitem(last=False)

    def tokens(self, prompt: tuple[int, ...], limit: int) -> float:
        """Return the expected length of a completion; the limit where nothing is known."""
        known = self._by_prompt.get(hash(prompt))
        expected = known[1] if known is not None else self._mean
        return float(limit) if expected is None else min(expected, float(limit))


class Shares:
    """Hands out shares to processes, and knows who works on what.

    Args:
        processes: number of processes.
        capacity: samples that each of them works on at once.
    """

    def __init__(self, processes: int, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: deque[Share] = deque()
        self._numbers = 0
        self.given: list[dict[int, Share]] = [{} for _ in range(processes)]
        """What each process works on, by the number that the process knows it by."""
        self.lengths = LengthEstimate()

    def add(self, owner: Hashable, requests: Sequence[Request], sampling: Sampling) -> int:
        """Take requests of a generation to be handed out, the longest first, and return the number of samples."""
        shares = [Share(owner, request, samples, sampling) for request, samples in self._cut(requests)]
        self._expect(shares)
        # Stable: equal ones stay in the order of the prompts.
        self._waiting.extend(sorted(shares, key=lambda share: -share.expected * len(share.samples)))
        return sum(len(share.samples) for share in shares)

    def hand_out(self) -> dict[int, list[tuple[int, Share]]]:
        """Give processes what they have room for: (number, share) for each process that gets something."""
        news: dict[int, list[tuple[int, Share]]] = {}
        samples = [sum(len(share.missing) for share in given.values()) for given in self.given]
        tokens = [sum(len(share.missing) * share.expected for share in given.values()) for given in self.given]
        while self._waiting:
            free = [i for i, count in enumerate(samples) if count < self._capacity]
            if not free:
                break
            chosen = min(free, key=lambda i: (tokens[i], samples[i], i))
            share, self._numbers = self._waiting.popleft(), self._numbers + 1
            self.given[chosen][self._numbers] = share
            news.setdefault(chosen, []).append((self._numbers, share))
            samples[chosen] += len(share.missing)
            tokens[chosen] += len(share.missing) * share.expected
        return news

    def finish(self, process: int, number: int, position: int, length: int) -> Share | None:
        """Note a completion and return its share; None for one that was cancelled.

        Raises:
            KeyError: that sample has come before, or was not asked for.
        """
        share = self.given[process].get(number)
        if share is None:
            return None
        share.missing.remove(position)
        self.lengths.update(share.request.token_ids, length)
        if not share.missing:
            del self.given[process][number]
        return share

    def take_back(self, process: int) -> None:
        """Hand out again, and first, what a process that died was working on, the completions that came left out."""
        shares = [share.rest() for share in self.given[process].values()]
        self.given[process].clear()
        self._expect(shares)
        self._waiting.extendleft(reversed(shares))

    def drop(self, owner: Hashable) -> dict[int, list[int]]:
        """Forget a generation; return the numbers of what each process still works on."""
        self._waiting = deque(share for share in self._waiting if share.owner != owner)
        dropped: dict[int, list[int]] = {}
        for process, given in enumerate(self.given):
            if numbers := [number for number, share in given.items() if share.owner == owner]:
                dropped[process] = numbers
                for number in numbers:
                    del given[number]
        return dropped

    def _cut(self, requests: Sequence[Request]) -> Iterable[tuple[Request, tuple[int, ...]]]:
        # Above 1 where there are fewer groups than processes.
        parts = -(-len(self.given) // max(1, len(requests)))
        for request in requests:
            longest = max(1, min(self._capacity, -(-len(request.seeds) // parts)))
            for start in range(0, len(request.seeds), longest):
                seeds = request.seeds[start : start + longest]
                samples = tuple(range(start, start + len(seeds)))
                yield Request(request.index, request.token_ids, seeds), samples

    def _expect(self, shares: Iterable[Share]) -> None:
        for share in shares:
            share.missing = set(range(len(share.samples)))
            share.expected = self.lengths.tokens(share.request.token_ids, share.sampling.max_new_tokens)
