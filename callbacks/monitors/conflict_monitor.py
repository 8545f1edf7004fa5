"""Watches whether right and wrong completions pull the tokens they share in opposite directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH

CONFLICT = DiagnosisKind(
    "conflict", "right and wrong completions fight over the same tokens", "the prefix they share is pushed down"
)


class ConflictMonitor(Monitor):
    """Monitor of GTPO's conflict tokens, and of the penalty on beginnings that completions share (2508.03772 Eq. 6).

    Findings: ``prefix_pushed_down`` (more than ``share`` of the groups push their shared beginning down while the
    reward ``format_key`` has fallen by ``fall`` of its best), ``conflicts`` (the rate of conflict tokens has grown to
    ``growth`` times what it was ``trend`` rollouts ago).

    Args:
        format_key: logged reward that pays for the form of an answer. Where it is not logged, the total reward.
        share: share of the groups with a shared beginning in which it is pushed down.
        fall: share of the best reward that must be lost. Half of this gave a false alarm on a healthy run of the
            benchmark.
        growth: multiple of the rate of conflict tokens ``trend`` rollouts ago.
        trend: rollouts over which that rate is compared.
        smooth: rollouts that medians and means are taken over.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("policy/conflict_frac", "groups/prefix_pushed_down_frac", *REWARDS)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "prefix_pushed_down",
            CONFLICT,
            rank=680,
            remedies=(
                "weigh conflicting tokens (recipe gtpo)",
                "take 1/length out of the loss (agg: token_mean, sum_const)",
            ),
        ),
        FindingKind(
            "conflicts",
            CONFLICT,
            690,
            ("smaller groups: conflicts grow with the group size",),
            title="more tokens are in right and in wrong completions alike",
            likely_cause="the answers to one prompt become more alike",
        ),
    )

    def __init__(
        self,
        format_key: str = "reward/format",
        share: float = 0.5,
        fall: float = 0.1,
        growth: float = 2.0,
        trend: int = 50,
        smooth: int = 10,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("ConflictMonitor", share=share, growth=growth, trend=trend, smooth=smooth)
        self.format_key, self.share, self.fall = format_key, share, fall
        self.growth, self.trend, self.smooth = growth, trend, smooth
        self.history.watch(format_key)

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        key = self.format_key if self.history.count(self.format_key) else reward_key(self.history)
        down = self.history.median("groups/prefix_pushed_down_frac", self.smooth)
        lost, errors = self.history.fall(key, self.smooth, self.smooth)
        sure = errors > self.history.bound(key, self.history.count(key), RUN_LENGTH)
        enough = self.history.count("groups/prefix_pushed_down_frac") >= self.smooth
        if enough and down is not None and down > self.share and lost > self.fall and sure:
            yield self.finding(
                "prefix_pushed_down",
                "warning",
                f"{down:.0%} of the groups push their shared beginning down, and {key} has lost {lost:.0%} of its best",
                ("groups/prefix_pushed_down_frac", self.smooth, down, self.share),
                (f"{key} lost", self.smooth, lost, self.fall),
                onset=self.history.began("groups/prefix_pushed_down_frac", lambda value: value > self.share, step),
            )
        then, now = self.history.then_and_now("policy/conflict_frac", self.smooth, self.trend) or (0.0, 0.0)
        if then and now > self.growth * then:
            yield self.finding(
                "conflicts",
                "info",
                f"{now:.0%} of the tokens are in conflict, {then:.0%} {self.trend} rollouts ago",
                ("policy/conflict_frac", self.trend, now, self.growth * then, then),
                onset=step - self.trend,
            )
