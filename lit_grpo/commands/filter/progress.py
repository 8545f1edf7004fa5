"""The progress line of a filter run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lit_grpo.commands.filter.rate_journal import Rate

_SECONDS_BETWEEN_LINES = 10.0


class FilterProgress:
    """Progress line on standard error: rewritten in place on a terminal, a new line every ten seconds elsewhere.

    Args:
        total: number of prompts.
        done: number of prompts whose rate was known before.
        ranks: number of processes that share the work.
    """

    def __init__(self, total: int, done: int, ranks: int = 1) -> None:
        self.total, self.done, self.ranks = total, done, ranks
        self._sampled = 0
        self._rates: list[float] = []
        self._started = self._printed = time.monotonic()
        if done:
            print(f"{done:,} of {total:,} prompts are done already", file=sys.stderr)

    def add(self, rates: Sequence[Rate]) -> None:
        self._sampled += len(rates)
        self._rates += [rate.pass_rate for rate in rates]
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r{self._line(now)}\033[K", end="", file=sys.stderr, flush=True)
        elif now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        # This process counts its own prompts alone and multiplies, so no rank waits for another to report progress.
        done = min(self.total, self.done + self._sampled * self.ranks)
        seconds = (self.total - done) * (now - self._started) / max(1, self._sampled * self.ranks)
        left = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        left = left if seconds < 7200 else f"{seconds / 3600:.1f} h"
        mean = sum(self._rates) / len(self._rates)
        return f"{done:,} of {self.total:,} prompts, mean pass rate {mean:.3f}, about {left} left"

    def end(self) -> None:
        """End the line that was rewritten in place, so that what is printed next begins a new one."""
        if sys.stderr.isatty() and self._sampled:
            print(file=sys.stderr)
