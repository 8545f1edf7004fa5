"""Numbers that claims are judged by, each of one recorded run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from scripts.diagnosis.scoring import fall_beside, reward_fall, smoothed

Run = dict[str, Any]
"""A record of :func:`scripts.study_cases.runs.run`."""
Measure = Callable[[Run], float]
FIRST, LAST = 3, 10
"""Rollouts that a value at the start and at the end is the mean of."""


def known(run: Run, key: str) -> list[float]:
    """Return the values of a metric, without the rollouts that have none."""
    return [value for value in run["curves"].get(key, ()) if value is not None]


def rewards(run: Run) -> list[float]:
    """Return the mean reward of everything that was sampled for each rollout."""
    return known(run, "sampling/reward") or known(run, "reward")


def start(key: str) -> Measure:
    """Mean of the first rollouts."""
    return lambda run: statistics.fmean(known(run, key)[:FIRST])


def end(key: str) -> Measure:
    """Mean of the last rollouts."""
    return lambda run: statistics.fmean((rewards(run) if key == "reward" else known(run, key))[-LAST:])


def until(rollout: int, key: str) -> Measure:
    """Mean of the last rollouts up to one, for runs of different lengths."""
    return lambda run: statistics.fmean((rewards(run) if key == "reward" else known(run, key))[:rollout][-LAST:])


def change(key: str) -> Measure:
    """Value at the end less that at the start."""
    return lambda run: end(key)(run) - start(key)(run)


def average(*keys: str) -> Measure:
    """Mean absolute value over the whole run, and over the metrics."""
    return lambda run: statistics.fmean(abs(value) for key in keys for value in known(run, key))


def peak(*keys: str, window: int = 5) -> Measure:
    """Greatest mean absolute value, over the metrics and some rollouts in a row: what comes after a collapse is out."""

    def measure(run: Run) -> float:
        rows = zip(*(run["curves"].get(key, ()) for key in keys), strict=True)
        sizes = [[abs(value) for value in row if value is not None] for row in rows]
        means = smoothed([statistics.fmean(row) for row in sizes if row], window)
        return max(means[min(window, len(means)) - 1 :])

    return measure


def most(key: str, window: int = 5) -> Measure:
    """Greatest mean of some rollouts in a row."""
    return lambda run: max(_means(run, key, window))


def least(key: str, window: int = 5) -> Measure:
    """Smallest mean of some rollouts in a row."""
    return lambda run: min(_means(run, key, window))


def _means(run: Run, key: str, window: int) -> list[float]:
    """Means of ``window`` rollouts in a row, without the first ones, which are of fewer; of all in a shorter run."""
    values = known(run, key)
    return smoothed(values, window)[min(window, len(values)) - 1 :]


def rise(key: str) -> Measure:
    """Greatest mean of five rollouts in a row, less the value at the start."""
    return lambda run: most(key)(run) - start(key)(run)


def lost_at(run: Run) -> int | None:
    """Return the rollout at which a fifth of the best reward (means of ten) was lost; None if it never was.

    Where the questions of a rollout move its reward by more than that, the run has a ``twin``, the rewards of a healthy
    run on the same questions, and has to be below four fifths of it as well, by two standard errors.
    """
    fall = reward_fall(rewards(run))
    if fall is None or "twin" not in run:
        return None if fall is None else fall.lost
    beside = fall_beside(rewards(run), run["twin"])
    return None if beside is None else max(fall.lost, beside.lost)


def collapse(run: Run) -> float:
    """Rollout at which a fifth of the best reward was lost; one more than the run has where it never was."""
    found = lost_at(run)
    return float(len(rewards(run)) + 1 if found is None else found)


def reached(level: float) -> Measure:
    """Rollout at which the reward, a mean of five, reaches a level; one more than the run has where it never does."""

    def measure(run: Run) -> float:
        means = smoothed(rewards(run), 5)
        return float(next((k for k, value in enumerate(means, 1) if k >= 5 and value >= level), len(means) + 1))

    return measure


def doubled(*keys: str) -> Measure:
    """Rollout at which the absolute value (summed over the metrics) is twice its mean over the first five."""

    def measure(run: Run) -> float:
        columns = [run["curves"].get(key, ()) for key in keys]
        total = [sum(abs(value) for value in row if value is not None) for row in zip(*columns, strict=True)]
        usual = statistics.fmean(total[:5])
        return float(next((k for k, value in enumerate(total, 1) if k > 5 and value > 2 * usual), len(total) + 1))

    return measure


def first_alarm(run: Run) -> tuple[int, str] | None:
    """Return step and name of the first warning or worse of the monitors; None if there was none."""
    found: Sequence[Any] = run["alarms"]
    return (int(found[0][0]), str(found[0][1])) if found else None


def last(key: str, count: int = 3) -> Measure:
    """Mean of the last values of a metric that few rollouts have, such as one of evaluations."""
    return lambda run: statistics.fmean(known(run, key)[-count:])


def since_best(key: str, *, ratio: bool = False) -> Measure:
    """Change of a metric, a mean of five, from the best reward to the collapse; NaN where there is none.

    Args:
        key: of the metric.
        ratio: the value at the collapse over that at the best reward, in place of the difference.
    """

    def measure(run: Run) -> float:
        lost = lost_at(run)
        if lost is None:
            return math.nan
        reward, values = smoothed(rewards(run)[:lost]), smoothed(known(run, key), 5)
        then, now = values[max(range(lost), key=reward.__getitem__)], values[lost - 1]
        return (now / then if then else math.inf) if ratio else now - then

    return measure
