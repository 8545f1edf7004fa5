"""Judgement of a run: when it went wrong, and whether the monitors saw it in time and named it well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scripts.diagnosis.cases import Case

SMOOTH = 10
"""Rollouts that the share of right answers is averaged over."""
BESIDE, LEAST_BESIDE = 8, 4
"""Rollouts that a run is compared with its healthy twin over, and the fewest."""
LOST, FALLING = 0.8, 0.95
"""Shares of the best so far. Below the first a run has collapsed; below the second it has begun to."""


class Fall(NamedTuple):
    """Steps at which the share of right answers fell."""

    onset: int
    """Step, from 1, at which it was last near its best."""
    lost: int
    """Step at which a fifth of the best was lost."""


def smoothed(values: Sequence[float], window: int = SMOOTH) -> list[float]:
    """Mean of the last ``window`` values at each position, or of fewer in the beginning."""
    return [sum(values[max(0, k - window + 1) : k + 1]) / min(k + 1, window) for k in range(len(values))]


def reward_fall(correct: Sequence[float]) -> Fall | None:
    """Find when a run collapsed, by its true share of right answers; None if it did not.

    It has collapsed at the first rollout whose smoothed share is below 80 % of the best so far. The onset is the last
    rollout before that at which it was still at 95 % of the best or more.
    """
    means, best = smoothed(correct), 0.0
    for k, value in enumerate(means):
        if value < LOST * best:
            near = [j for j in range(k) if means[j] >= FALLING * max(means[: j + 1])]
            return Fall(max(near, default=0) + 1, k + 1)
        best = max(best, value)
    return None


def onset_of(case: Case, correct: Sequence[float], start: int) -> int | None:
    """Find the step, from 1, at which a run went wrong; None for healthy runs and sabotages without effect."""
    return onset_after(case, reward_fall(correct), start)


def onset_after(case: Case, fall: Fall | None, start: int) -> int | None:
    """Return the step, from 1, at which a run of this kind went wrong, given when its right answers fell."""
    if case.healthy:
        return None
    if case.onset == "sabotage":
        return start + 1
    return None if fall is None else fall.onset


def fall_beside(correct: Sequence[float], twin: Sequence[float]) -> Fall | None:
    """Find when a run collapsed, beside the healthy run that was asked the same questions; None if it did not.

    Where a rollout has few questions, their difficulty moves the share of right answers more than a collapse does: on
    16 questions of GSM8K it goes from 0.02 to 0.4 within one healthy run. The twin sees the same questions at each
    rollout. The run has collapsed when, over the last :data:`BESIDE` rollouts, it lies below 80 % of its twin by more
    than two standard errors of the differences. The onset is the last rollout before that at which, over as many
    rollouts, it was at 95 % of its twin or more.
    """
    near = 0
    for k in range(LEAST_BESIDE - 1, min(len(correct), len(twin))):
        window = slice(max(0, k - BESIDE + 1), k + 1)
        ours, theirs = correct[window], twin[window]
        short = [LOST * b - a for a, b in zip(ours, theirs, strict=True)]
        error = stdev(short) / len(short) ** 0.5
        if fmean(short) > 2 * error:
            return Fall(near + 1, k + 1)
        if fmean(ours) >= FALLING * fmean(theirs):
            near = k
    return None


def judge(
    case: Case,
    correct: Sequence[float],
    start: int,
    diagnoses: Sequence[Mapping[str, Any]],
    twin: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Judge what the monitors said of a run.

    Args:
        case: its kind.
        correct: true share of right answers of each rollout.
        start: rollouts trained on before the sabotage began.
        diagnoses: in order, with ``diagnosis``, ``step`` and ``severity``; those of severity ``info`` are no alarms.
        twin: true share of right answers of the healthy run on the same questions, where the two are to be compared.

    Returns:
        ``onset`` and ``lost`` (steps from 1); ``detected``; ``diagnosis``, the one that a run is judged by: the first
        critical one, on which a run would be stopped, else the first warning; ``step`` of the first alarm, its
        ``delay`` from the onset (negative: before the reward fell), ``in_time`` (before a fifth of the best was lost);
        ``right``; ``false_alarms`` (alarms before the sabotage began, and all of a healthy run) and ``false_stop``.
    """
    alarms = [d for d in diagnoses if d["severity"] != "info"]
    early = [d for d in alarms if case.healthy or d["step"] <= start]
    true = [d for d in alarms if d not in early]
    fall = reward_fall(correct) if twin is None else fall_beside(correct, twin)
    onset = onset_after(case, fall, start)
    verdict = next((d for d in true if d["severity"] == "critical"), true[0] if true else None)
    lost = None if fall is None or case.healthy else fall.lost
    step = true[0]["step"] if true else None
    return {
        "expected": sorted(case.right),
        "onset": onset,
        "lost": lost,
        "detected": bool(true),
        "diagnosis": verdict and verdict["diagnosis"],
        "severity": verdict and verdict["severity"],
        "verdict_step": verdict and verdict["step"],
        "step": step,
        "delay": None if step is None or onset is None else step - onset,
        "in_time": step is not None and (lost is None or step <= lost),
        "right": verdict is not None and verdict["diagnosis"] in case.right,
        "all": [[d["step"], d["diagnosis"], d["severity"]] for d in alarms],
        "false_alarms": len(early),
        "false_stop": any(d["severity"] == "critical" for d in early),
    }


def judge_rollback(correct: Sequence[float], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge whether rollbacks saved a run: its end is at 95 % or more of the best before the first rollback.

    Args:
        correct: true share of right answers of every rollout in the order of training, those undone included.
        events: lines of the journal.
    """
    returns = [e for e in events if e["event"] == "rollback"]
    first = returns[0]["step"] if returns else len(correct)
    best = max(smoothed(correct[:first]), default=0.0)
    final = smoothed(correct)[-1] if correct else 0.0
    return {
        "rollbacks": [[e["step"], e["target"], e["diagnosis"]] for e in returns],
        "best": round(best, 4),
        "final": round(final, 4),
        "collapsed": bool(returns) or final < FALLING * best,
        "saved": bool(returns) and final >= FALLING * best,
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up all runs.

    Fractions are over the sabotaged runs, that of the rollbacks over those that collapsed; counts are over all.
    """
    watched = [run for run in runs if run["part"] == "diagnosis" and run["status"] != "error"]
    wrong = [run for run in watched if run["expected"]]
    healthy = [run for run in watched if not run["expected"]]
    fell = [run for run in wrong if run["lost"] is not None]
    returned = [run for run in runs if run["part"] == "rollback" and run["status"] != "error" and run["collapsed"]]
    delays = sorted(run["delay"] for run in wrong if run["delay"] is not None)
    return {
        "recall": _share(wrong, "detected"),
        "right_class": _share(wrong, "right"),
        "in_time": _share(fell, "in_time"),
        "rollback_saved": _share(returned, "saved"),
        "false_stops": sum(run["false_stop"] for run in watched),
        "false_alarms": sum(run["false_alarms"] for run in watched),
        "median_delay": delays[len(delays) // 2] if delays else None,
        "sabotaged": len(wrong),
        "healthy": len(healthy),
        "fell": len(fell),
        "rollback_runs": len(returned),
        "errors": sum(run["status"] == "error" for run in runs),
    }


def _share(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return sum(bool(run[key]) for run in runs) / len(runs) if runs else None
