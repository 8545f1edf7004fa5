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
    """One thing that a claim says, and what was found."""

    says: str
    values: tuple[float, ...]
    """One number a seed, or one alone where nothing is drawn."""
    bound: str
    """What the values have to be, such as ``> 0``."""
    holds: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error over seeds; NaN for a single value."""
        return statistics.stdev(self.values) / len(self.values) ** 0.5 if len(self.values) > 1 else math.nan

    def found(self) -> str:
        """Write mean, standard error and every seed's value."""
        if len(self.values) == 1:
            return _number(self.mean)
        return f"{_number(self.mean)} ± {_number(self.error)} ({', '.join(map(_number, self.values))})"


def _number(value: float) -> str:
    # What is left of rounding differs from machine to machine.
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def above(says: str, values: Sequence[float], bound: float = 0.0, *, drawn: bool = True) -> PartResult:
    """Return a part that holds if the value of every seed is above the bound.

    Args:
        says: what the values are.
        values: one a seed.
        bound: that all have to be above.
        drawn: whether the values are measured on what was drawn. Then their mean has to be above the bound by two
            standard errors besides; where a value is exact, that says nothing.
    """
    part = PartResult(says, tuple(values), f"> {bound:g}", all(value > bound for value in values))
    far = not drawn or len(values) == 1 or part.mean - bound > 2 * part.error
    return PartResult(says, part.values, part.bound, part.holds and far)


def below(says: str, values: Sequence[float], bound: float = 0.0, *, drawn: bool = True) -> PartResult:
    """Return a part that holds if the value of every seed is below the bound; see :func:`above`."""
    turned = above(says, [-value for value in values], -bound, drawn=drawn)
    return PartResult(says, tuple(values), f"< {bound:g}", turned.holds)


def verdict_of(parts: Sequence[PartResult]) -> str:
    """Return the verdict: a claim is supported if all that it says holds."""
    return SUPPORTED if all(part.holds for part in parts) else NOT_SUPPORTED
