"""What a claim's test returns, and the verdict that follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SUPPORTED, NOT_SUPPORTED = "supported here", "not supported here"
UNTESTED, NOT_RUN = "could not be tested at this size", "not run yet"


@dataclass(frozen=True)
class PartResult:
    """One thing that a claim says, and what was found.

    Attributes:
        says: what the values are.
        values: one number a seed, or one alone where nothing is drawn.
        limit: that all values have to be beyond.
        upwards: whether beyond is above.
        drawn: whether the values are measured on what was drawn. Then their mean has to be beyond the limit by two
            standard errors besides; where a value is exact, that says nothing.
    """

    says: str
    values: tuple[float, ...]
    limit: float = 0.0
    upwards: bool = True
    drawn: bool = True

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error over seeds; NaN for a single value, or where one is not finite."""
        if len(self.values) < 2 or not all(map(math.isfinite, self.values)):
            return math.nan
        return statistics.stdev(self.values) / len(self.values) ** 0.5

    @property
    def bound(self) -> str:
        """What the values have to be, such as ``> 0``."""
        return f"{'>' if self.upwards else '<'} {self.limit:g}"

    @property
    def beyond(self) -> tuple[bool, ...]:
        """Whether each value is beyond the limit."""
        return tuple(value > self.limit if self.upwards else value < self.limit for value in self.values)

    @property
    def holds(self) -> bool:
        """Whether every value is beyond the limit, and the mean far enough."""
        far = not self.drawn or len(self.values) == 1 or abs(self.mean - self.limit) > 2 * self.error
        return all(self.beyond) and far

    def found(self) -> str:
        """Write mean, standard error and every seed's value."""
        if len(self.values) == 1:
            return number(self.mean)
        if len(set(map(number, self.values))) == 1:
            return f"{number(self.mean)} (every seed)"
        return f"{spread(self.values)} ({', '.join(map(number, self.values))})"


def number(value: float) -> str:
    """Write a number with three digits; what is left of rounding differs from machine to machine, and is 0."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Write mean and standard error of some values, one a seed; the mean alone where all of them read alike."""
    part = PartResult("", tuple(values))
    if len(set(map(number, values))) == 1:
        return number(part.mean)
    return f"{number(part.mean)} ± {number(part.error)}"


def above(says: str, values: Sequence[float], limit: float = 0.0, *, drawn: bool = True) -> PartResult:
    """Return a part that holds if the value of every seed is above the limit; see :class:`PartResult`."""
    return PartResult(says, tuple(values), limit, upwards=True, drawn=drawn)


def below(says: str, values: Sequence[float], limit: float = 0.0, *, drawn: bool = True) -> PartResult:
    """Return a part that holds if the value of every seed is below the limit; see :class:`PartResult`."""
    return PartResult(says, tuple(values), limit, upwards=False, drawn=drawn)


def verdict_of(parts: Sequence[PartResult]) -> str:
    """Return the verdict: a claim is supported if all that it says holds."""
    return SUPPORTED if all(part.holds for part in parts) else NOT_SUPPORTED


def seeds_for(parts: Sequence[PartResult]) -> tuple[int, int]:
    """Count the seeds for which all that a claim says is so, and the seeds; a value without seeds counts for each."""
    count = max(len(part.values) for part in parts)
    agreeing = sum(all(part.beyond[seed % len(part.values)] for part in parts) for seed in range(count))
    return agreeing, count
