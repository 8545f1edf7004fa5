"""How far a filter run is."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lit_grpo.commands.filter.rate_journal import Rate

_SECONDS = 10.0
"""Between two lines where the output is no terminal."""


class Progress:
    """A line on standard error: one that is rewritten on a terminal, a new one every ten seconds elsewhere.

    Args:
        total: prompts.
        done: those whose rate was known before.
        ranks: processes that share the work; this one counts its own part and multiplies.
    """

    def __init__(self, total: int, done: int, ranks: int = 1) -> None:
        self.total, self.done, self.ranks = total, done, ranks
        self._new = 0
        self._rates: list[float] = []
        self._started = self._told = time.monotonic()
        if done:
            print(f"{done:,} of {total:,} prompts are done already", file=sys.stderr)

    def add(self, found: Sequence[Rate]) -> None:
        self._new += len(found)
        self._rates += [rate.pass_rate for rate in found]
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r{self._line(now)}\033[K", end="", file=sys.stderr, flush=True)
        elif now - self._told >= _SECONDS:
            self._told = now
            print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        done = min(self.total, self.done + self._new * self.ranks)
        left = (self.total - done) * (now - self._started) / max(1, self._new * self.ranks)
        ends = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min" if left < 7200 else f"{left / 3600:.1f} h"
        mean = sum(self._rates) / len(self._rates)
        return f"{done:,} of {self.total:,} prompts, mean pass rate {mean:.3f}, about {ends} left"

    def end(self) -> None:
        if sys.stderr.isatty() and self._new:
            print(file=sys.stderr)
