"""Sentences on the setting of a claim, with the numbers of its runs: whether there was room for what the claim says."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.study_cases import measures as m
from scripts.study_cases.claims.claim import Remark, Runs
from scripts.study_cases.results import number, spread


def falls(runs: Runs, arms: Sequence[str]) -> str:
    """Write how many runs of some arms lose a fifth of their reward, and when: ``3 of 3 runs (rollouts 16 to 18)``."""
    all_runs = [run for arm in arms for run in runs[arm]]
    lost = [at for run in all_runs if (at := m.lost_at(run)) is not None]
    when = "" if not lost else f" (rollout {lost[0]})" if len(lost) == 1 else f" (rollouts {min(lost)} to {max(lost)})"
    return f"{len(lost)} of {len(all_runs)} runs{when}"


def fall_of(named: dict[str, tuple[str, ...]], meaning: str = "") -> Remark:
    """Say how many runs of each group of arms collapse, and what that means.

    Args:
        named: arms by what they are called in the sentence.
        meaning: follows the numbers; empty: nothing does.
    """
    return lambda runs: (
        "A fifth of the reward is lost by "
        + ", ".join(f"{falls(runs, arms)} {name}" for name, arms in named.items())
        + (f": {meaning}" if meaning else ".")
    )


def values_of(arm: str, measure: m.Measure, before: str, after: str) -> Remark:
    """Say the mean of a measure over the seeds of an arm, between two pieces of text."""
    return lambda runs: f"{before}{spread([measure(run) for run in runs[arm]])}{after}"


def both(*remarks: Remark) -> Remark:
    """Put remarks one after the other."""
    return lambda runs: " ".join(remark(runs) for remark in remarks)


def clipped(named: dict[str, str], meaning: str) -> Remark:
    """Say how much of the tokens the clip takes in each arm, and what that means."""

    def share(run: m.Run) -> float:
        return 100 * sum(m.average(f"policy/clip_frac/{side}")(run) for side in ("low", "high"))

    return lambda runs: (
        "The clip takes "
        + ", ".join(
            f"{spread([share(run) for run in runs[arm]])} % of the tokens of {name}" for name, arm in named.items()
        )
        + f": {meaning}"
    )


def percent(key: str) -> m.Measure:
    """Mean of a share over a run, in percent."""
    share = m.average(key)
    return lambda run: 100 * share(run)


def longer_when_right(arm: str, meaning: str) -> Remark:
    """Say by how much right completions are longer than wrong ones in the beginning."""

    def gap(run: m.Run) -> float:
        return m.start("completions/correct_length")(run) - m.start("completions/incorrect_length")(run)

    return values_of(
        arm, gap, "In the beginning right completions are longer than wrong ones by ", f" tokens: {meaning}"
    )


def lowest_at(arm: str, key: str, says: str) -> Remark:
    """Say at which rollouts the smallest mean of five is reached, a number a seed."""

    def where(run: m.Run) -> int:
        values = m.smoothed(m.known(run, key), 5)[4:]
        return min(range(len(values)), key=values.__getitem__) + 5

    return lambda runs: f"{says} {', '.join(number(where(run)) for run in runs[arm])}."
