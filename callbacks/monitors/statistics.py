"""Tests of a change in a noisy series that is looked at again with every value. Each states its error.

A monitor asks the same question at every rollout, and often for several windows at once. A bound of two standard
errors, right for one look, is then passed by chance again and again. So a bound here is made from a **run length**: the
number of healthy rollouts in which at most one false alarm is to be expected. With m comparisons at each look, each
passed by chance with probability p, the expected number of false alarms per look is at most m p (Boole), whatever the
dependence between windows and looks, so p = 1 / (m x run length) holds the promise. It is the average run length to a
false alarm by which sequential change detection is judged (Page 1954; Lorden 1971); the statistic that is compared, the
largest standardised difference of means over the places where the change may have begun, is the window-limited
generalised likelihood ratio (Willsky and Jones 1976; Lai 1995).

The promise is as good as the standard error. That is estimated from the series itself (:func:`noise`), so thresholds
hold on any scale of the reward and for any size of the batch, or is known (evaluations log theirs). What comes out of
series that are not normal is simulated by ``scripts/false_alarms.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import NamedTuple

NEWEST = 80
"""Values from which the noise of a series is estimated."""
RUN_LENGTH = 10_000
"""Healthy rollouts to one false alarm that a warning promises."""
RUN_LENGTH_CRITICAL = 100_000
"""Healthy rollouts to one false alarm that a critical finding promises: it may end a run."""
CHI2_HALF = 0.4549
"""Median of the square of a standard normal variable."""


class Change(NamedTuple):
    """How far the end of a series lies from what it was before."""

    before: float
    """Mean before the change."""
    now: float
    """Mean of the newest values."""
    errors: float
    """Standard errors between them; above 0 in the direction that was asked for."""
    place: int
    """Place in the series of the last value before the change, from 0."""
    floor: float = 0.0
    """Level that counts as nothing: 0, or the lowest value of a series that goes below it."""

    @property
    def scale(self) -> float:
        """What was there to lose: the distance from the floor, and no less than the size of what was before."""
        return max(abs(self.before), self.before - self.floor)

    @property
    def share(self) -> float:
        """The change as a share of :attr:`scale`; infinite where that is 0."""
        return abs(self.now - self.before) / self.scale if self.scale else math.inf


NO_CHANGE = Change(0.0, 0.0, 0.0, 0)


@lru_cache(maxsize=256)
def bound(run_length: float, comparisons: int = 1, freedom: int = NEWEST - 1) -> float:
    """Return the standard errors above which a one-sided difference comes once in ``run_length`` looks, or less.

    It is the quantile of Student's t of 1 - 1 / (comparisons x run_length), from the normal one by the expansion of
    Cornish and Fisher (Abramowitz and Stegun 26.7.5).

    Args:
        run_length: looks to one false alarm.
        comparisons: differences that are compared at each look.
        freedom: degrees of freedom of the estimated standard error.
    """
    z = -NormalDist().inv_cdf(1 / (run_length * max(1, comparisons)))
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def binomial_tail(hits: float, trials: float, share: float) -> float:
    """Return the chance of at least ``hits`` hits in ``trials``, each of chance ``share``; both are rounded."""
    n, k = round(trials), round(hits)
    if k <= 0:
        return 1.0
    if k > n or share <= 0:
        return 0.0
    log = math.lgamma
    terms = (
        log(n + 1) - log(i + 1) - log(n - i + 1) + i * math.log(share) + (n - i) * math.log1p(-share)
        for i in range(k, n + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def floor_of(values: Sequence[float]) -> float:
    """Return the level that counts as nothing: 0, or the lowest value of a series that goes below it.

    A reward of -1 and +1 has its nothing at -1, and a fall from 0.1 to 0.0 is then 9 % of what there was, and not all.
    """
    return min(0.0, min(values, default=0.0))


def noise(values: Sequence[float]) -> float:
    """Estimate the standard deviation of single values around their trend, from the newest :data:`NEWEST`.

    It comes from the differences of neighbours (von Neumann 1941), so that a trend does not count as noise. The root of
    their mean square and not a median of their sizes: a reward of few prompts takes few values, and more than half of
    the differences may be 0. The largest difference is left out, so that one jump counts little. Values that hang
    together (prompts that come in blocks, a slow sampler) have smaller differences than their means have errors. So the
    differences of means of four in a row, robust by their median, are looked at as well, and the larger estimate is
    taken, up to one and a half times the smaller. Of fewer than four values it is unknown, so infinite: no
    change is certain.
    """
    newest = list(values[-NEWEST:])
    squares = sorted((b - a) ** 2 for a, b in pairwise(newest))
    if len(squares) < 3:
        return math.inf
    # Without the largest the mean of the squares is too small by a factor that depends on the number of values alone.
    kept = squares[:-1]
    least = math.sqrt(sum(kept) / len(kept) / 2 * (1 + 4 / len(squares)))
    blocks = [fmean(newest[i : i + 4]) for i in range(len(newest) - 3)]
    jumps = [(b - a) ** 2 for a, b in zip(blocks, blocks[4:], strict=False)]
    if len(jumps) < 16:
        return least
    slow = math.sqrt(median(jumps) / CHI2_HALF * 4 / 2)
    return max(least, min(slow, 1.5 * least))


def fall(values: Sequence[float], recent: int, before: int) -> Change:
    """Compare the mean of the last ``recent`` values with the best mean of ``before`` in a row ahead of them.

    The number of comparisons is ``len(values) - recent - before + 1``. :data:`NO_CHANGE` with too few values.
    """
    end = len(values) - recent
    if end < before:
        return NO_CHANGE
    now = fmean(values[end:])
    sums = _window_sums(values[:end], before)
    best = max(range(len(sums)), key=sums.__getitem__)
    then = sums[best] / before
    error = noise(values) * math.sqrt(1 / recent + 1 / before)
    errors = (then - now) / error if error > 0 else math.copysign(math.inf, then - now) if then != now else 0.0
    return Change(then, now, errors, best + before - 1, floor_of(values))


def rise(values: Sequence[float], recent: int, before: int) -> Change:
    """Compare as :func:`fall` does with the worst mean ahead; errors above 0 are a rise."""
    found = fall([-value for value in values], recent, before)
    return Change(-found.before, -found.now, found.errors, found.place)


def step_between(values: Sequence[float], recent: int, before: int) -> Change:
    """Compare the mean of the last ``recent`` values with that of the ``before`` values right ahead: one comparison."""
    end = len(values) - recent
    if end < before:
        return NO_CHANGE
    then, now = fmean(values[end - before : end]), fmean(values[end:])
    error = noise(values) * math.sqrt(1 / recent + 1 / before)
    return Change(then, now, (now - then) / error if error > 0 else 0.0 if now == then else math.inf, end - 1)


def fall_of_measured(values: Sequence[float], errors: Sequence[float]) -> Change:
    """Find the split of a few measurements with known standard errors after which they lie lowest against before.

    Each side is the mean weighted by the inverse squares of the errors. ``len(values) - 1`` comparisons.
    """
    best = NO_CHANGE
    weights = [1 / max(error, 1e-9) ** 2 for error in errors]
    sums = [w * v for w, v in zip(weights, values, strict=True)]
    total, weight = math.fsum(sums), math.fsum(weights)
    left, left_weight = 0.0, 0.0
    for index in range(len(values) - 1):
        left, left_weight = left + sums[index], left_weight + weights[index]
        right_weight = weight - left_weight
        if right_weight <= 0:
            continue
        then, now = left / left_weight, (total - left) / right_weight
        apart = (then - now) / math.sqrt(1 / left_weight + 1 / right_weight)
        if apart > best.errors:
            best = Change(then, now, apart, index, floor_of(values))
    return best


def slope(values: Sequence[float]) -> float:
    """Return the least-squares slope over the values, per value; 0 with fewer than two."""
    n = len(values)
    if n < 2:
        return 0.0
    middle, mean = (n - 1) / 2, fmean(values)
    return sum((i - middle) * (v - mean) for i, v in enumerate(values)) / (n * (n * n - 1) / 12)


def slope_errors(values: Sequence[float], scatter: float | None = None) -> float:
    """Return the slope in its standard errors; ``scatter`` is the noise of single values, that of these if left out."""
    n, steep = len(values), slope(values)
    error = (noise(values) if scatter is None else scatter) / math.sqrt(max(1e-12, n * (n * n - 1) / 12))
    return steep / error if error > 0 else math.copysign(math.inf, steep) if steep else 0.0


def best_mean(values: Sequence[float], size: int, *, largest: bool) -> float | None:
    """Return the largest, or smallest, mean of ``size`` values in a row; None with fewer values."""
    if len(values) < size:
        return None
    return (max if largest else min)(_window_sums(values, size)) / size


def _window_sums(values: Sequence[float], size: int) -> list[float]:
    total = sum(values[:size])
    sums = [total]
    for leaves, comes in zip(values, values[size:], strict=False):
        total += comes - leaves
        sums.append(total)
    return sums
