"""The last values of some metrics: medians, windows, and where something began. Plain Python: it costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import Any


class History:
    """Remembers the last ``length`` finite values of each of ``keys``, with the steps at which they were seen.

    Args:
        keys: metrics to remember; others are ignored.
        length: values to keep of each.
    """

    def __init__(self, keys: Iterable[str], length: int) -> None:
        self.length = length
        self.steps: dict[str, list[int]] = {key: [] for key in keys}
        self.values: dict[str, list[float]] = {key: [] for key in keys}

    def watch(self, key: str) -> None:
        """Remember this key as well."""
        self.steps.setdefault(key, [])
        self.values.setdefault(key, [])

    def push(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what the step logged. A key it lacks, or has as NaN or infinity, keeps its history as it is."""
        for key, values in self.values.items():
            value = metrics.get(key)
            if value is not None and math.isfinite(value):
                values.append(float(value))
                self.steps[key].append(step)
                del values[: -self.length], self.steps[key][: -self.length]

    def count(self, key: str) -> int:
        """Values there are."""
        return len(self.values[key])

    def last(self, key: str) -> float | None:
        """The newest value, or None."""
        values = self.values[key]
        return values[-1] if values else None

    def now(self, key: str, step: int) -> float | None:
        """The value of this very step, or None if it had none."""
        return self.values[key][-1] if self.steps[key] and self.steps[key][-1] == step else None

    def window(self, key: str, size: int, back: int = 0) -> list[float]:
        """The ``size`` values that end ``back`` values before the newest; fewer if there are fewer."""
        values = self.values[key]
        end = len(values) - back
        return values[max(0, end - size) : max(0, end)]

    def mean(self, key: str, size: int, back: int = 0) -> float | None:
        """Mean of that window; None if it is empty."""
        values = self.window(key, size, back)
        return fmean(values) if values else None

    def median(self, key: str, size: int, back: int = 0) -> float | None:
        """Median of that window; None if it is empty."""
        values = self.window(key, size, back)
        return median(values) if values else None

    def holds(self, key: str, size: int, test: Callable[[float], bool]) -> bool:
        """Whether the test is true of each of the last ``size`` values, all of which must be there."""
        values = self.window(key, size)
        return len(values) == size and all(map(test, values))

    def began(self, key: str, test: Callable[[float], bool], default: int) -> int:
        """Step since which the test has been true of every value without a break; ``default`` if it is not now."""
        onset = default
        for step, value in zip(reversed(self.steps[key]), reversed(self.values[key]), strict=True):
            if not test(value):
                break
            onset = step
        return onset

    def best(self, key: str, size: int) -> float | None:
        """The largest mean of ``size`` values in a row; None with fewer."""
        values = self.values[key]
        if len(values) < size:
            return None
        return max(fmean(values[i : i + size]) for i in range(len(values) - size + 1))

    def lost(self, key: str, size: int) -> float:
        """Share of the best mean of ``size`` values that the newest such mean lacks; 0 where that is unknown."""
        best, now = self.best(key, size), self.mean(key, size)
        return 0.0 if best is None or now is None or best <= 0 else max(0.0, 1 - now / best)

    def fall(self, key: str, recent: int = 3, before: int = 8) -> tuple[float, float]:
        """How far the mean of the last ``recent`` values lies below the best mean of ``before`` values ahead of them.

        Returns:
            The fall as a share of that best, and in standard errors of the difference; the scatter of single values is
            told from the differences of neighbours, so that a trend does not count as scatter. (0, 0) with too few.
        """
        values = self.values[key]
        end = len(values) - recent
        if end < before:
            return 0.0, 0.0
        now = fmean(values[end:])
        best = max(fmean(values[i - before : i]) for i in range(before, end + 1))
        steps = [abs(b - a) for a, b in pairwise(values[-40:])]
        scatter = 1.4826 * median(steps) / math.sqrt(2)
        error = scatter * math.sqrt(1 / recent + 1 / before)
        if best <= 0 or now >= best:
            return 0.0, 0.0
        return 1 - now / best, (best - now) / error if error > 0 else math.inf

    def rises(self, key: str, recent: int = 5, before: int = 15, errors: float = 3.0) -> bool:
        """Whether the mean of the last ``recent`` values lies above that of the ``before`` values ahead beyond doubt.

        By ``errors`` standard errors; scatter as in :meth:`fall`. False with too few values.
        """
        values = self.values[key]
        end = len(values) - recent
        if end < recent:
            return False
        earlier = values[max(0, end - before) : end]
        scatter = 1.4826 * median(abs(b - a) for a, b in pairwise(values[-40:])) / math.sqrt(2)
        return fmean(values[end:]) - fmean(earlier) > errors * scatter * math.sqrt(1 / recent + 1 / len(earlier))

    def fallen(self, key: str, share: float = 0.15, errors: float = 4.0) -> bool:
        """Whether it has lost that share of its best beyond doubt, by :meth:`fall`."""
        lost, sure = self.fall(key)
        return lost > share and sure > errors

    def slope(self, key: str, size: int) -> float | None:
        """Least-squares slope per step over the last ``size`` values; None with fewer."""
        values, steps = self.window(key, size), self.steps[key][-size:]
        if len(values) < size or size < 2:
            return None
        x, y = fmean(steps), fmean(values)
        spread = sum((s - x) ** 2 for s in steps)
        return sum((s - x) * (v - y) for s, v in zip(steps, values, strict=True)) / spread if spread else None

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "steps": {key: list(value) for key, value in self.steps.items()},
            "values": {key: list(value) for key, value in self.values.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, keys that are watched since included."""
        for key in state["values"]:
            self.watch(key)
        for key in self.values:
            self.steps[key] = list(state["steps"].get(key, []))
            self.values[key] = list(state["values"].get(key, []))
