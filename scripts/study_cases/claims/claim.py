"""What a claim is: what a source says, which runs are to show it, and the test that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scripts.study_cases import measures as m
from scripts.study_cases.results import PartResult, above, below

Runs = Mapping[str, Sequence[m.Run]]
"""The runs of each arm, one a seed, in the order of the seeds."""
Test = Callable[[Runs], list[PartResult]]
Remark = Callable[[Runs], str]
"""Writes from the runs what has to be known besides the verdict."""
ENTROPY, LENGTH, NORM = "policy/entropy", "completions/length", "optim/grad_norm"
DELTA = ("policy/delta_prob_positive", "policy/delta_prob_negative")
CURVES = ("reward", ENTROPY, LENGTH)
LANDSCAPE, GTPO = "landscape study", "GTPO (2508.03772)"
END, LOST = m.end("reward"), m.collapse

TWINS = dict.fromkeys(("countdown", "countdown_fast", "countdown_off"), "countdown/grpo")
"""Healthy run of each task on which the questions of a rollout move its reward more than a collapse begins with."""


@dataclass(frozen=True)
class Claim:
    """Something that a source says.

    Attributes:
        name: of the claim, as on the command line.
        source: the paper, with figure or equation.
        statement: what it says.
        arms: runs that show it, ``task/overlay`` of configs/study; none where it is calculated exactly.
        test: measures and judges them; None where it is calculated, or cannot be tested.
        curves: metrics that are drawn.
        seeds: of each arm.
        untestable: why it cannot be tested here; empty where it can.
        note: what explains the result, where it can be calculated.
        remark: what the runs say of the setting: whether it leaves room for the claim.
    """

    name: str
    source: str
    statement: str
    arms: tuple[str, ...] = ()
    test: Test | None = field(default=None, compare=False)
    curves: tuple[str, ...] = CURVES
    seeds: tuple[int, ...] = (0, 1, 2)
    untestable: str = ""
    note: str = ""
    remark: Remark | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """Whether it is calculated and nothing is trained for it."""
        return not self.arms and not self.untestable

    @property
    def needed(self) -> tuple[str, ...]:
        """Arms that have to be run: its own, and the healthy runs that theirs are told by."""
        tasks = (arm.partition("/")[0] for arm in self.arms)
        return tuple(dict.fromkeys([*self.arms, *(TWINS[task] for task in tasks if task in TWINS)]))


@dataclass(frozen=True)
class Part:
    """One inequality: a measure of an arm, less that of another with the same seed, above or below a limit."""

    says: str
    arm: str
    measure: m.Measure
    beside: str = ""
    limit: float = 0.0
    upwards: bool = True

    def judge(self, runs: Runs) -> PartResult:
        """Measure all seeds."""
        values = [self.measure(run) for run in runs[self.arm]]
        if self.beside:
            others = [self.measure(run) for run in runs[self.beside]]
            values = [a - b for a, b in zip(values, others, strict=True)]
        return (above if self.upwards else below)(self.says, values, self.limit)


def up(says: str, arm: str, measure: m.Measure, beside: str = "", limit: float = 0.0) -> Part:
    """Return a part whose values have to be above the limit."""
    return Part(says, arm, measure, beside, limit)


def down(says: str, arm: str, measure: m.Measure, beside: str = "", limit: float = 0.0) -> Part:
    """Return a part whose values have to be below the limit."""
    return Part(says, arm, measure, beside, limit, upwards=False)


def trained(
    name: str,
    source: str,
    statement: str,
    *parts: Part,
    curves: tuple[str, ...] = CURVES,
    remark: Remark | None = None,
    also: tuple[str, ...] = (),
) -> Claim:
    """Return a claim on runs.

    Args:
        name: of the claim.
        source: of the statement.
        statement: what is said.
        parts: inequalities that all have to hold.
        curves: metrics that are drawn.
        remark: see :class:`Claim`.
        also: arms that the remark alone needs.
    """
    arms = dict.fromkeys([arm for part in parts for arm in (part.arm, part.beside) if arm] + list(also))
    test: Test = lambda runs: [part.judge(runs) for part in parts]  # noqa: E731
    return Claim(name, source, statement, tuple(arms), test, curves, remark=remark)


def calculated(name: str, source: str, statement: str, note: str = "") -> Claim:
    """Return a claim that needs no runs; :mod:`scripts.study_cases.exact` has its calculation."""
    return Claim(name, source, statement, note=note)
