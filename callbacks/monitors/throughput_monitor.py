"""Watches whether the run becomes slow and whether memory grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import positive
from lit_grpo.callbacks.monitors.threshold import Rule, ThresholdMonitor
from lit_grpo.run.phases import PHASES

SLOW_DOWN = DiagnosisKind(
    "slow_down",
    "the run became slow",
    "memory is short, the engine is starved, or completions grew",
    outlives_rollback=True,
)


class ThroughputMonitor(ThresholdMonitor):
    """Monitor of tokens a second, time by phase, and memory.

    Findings: ``slow`` (tokens a second below ``slow`` of their median for ``patience`` rollouts; it names the phase
    that grew most), ``memory`` (peak memory grew by more than ``growth`` in each half of the last ``trend`` rollouts).

    Args:
        slow: share of their median below which tokens a second are too few.
        patience: rollouts in a row for which they must be.
        window: rollouts that the median is taken over.
        growth: growth of the peak memory in each half of ``trend`` that counts, as a share of what it was.
        trend: rollouts over which memory is compared.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("time/tokens_per_second", "memory/peak_gib", *PHASES)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "slow", SLOW_DOWN, 730, ("look at the phase that grew", "compare with the length of the completions")
        ),
        FindingKind(
            "memory",
            DiagnosisKind(
                "memory_grows",
                "memory grows",
                "completions that grow, or tensors that are kept from rollout to rollout",
                outlives_rollback=True,
            ),
            740,
            ("lower micro_batch_tokens", "look for tensors that callbacks keep"),
        ),
    )

    def __init__(
        self,
        slow: float = 0.5,
        patience: int = 5,
        window: int = 50,
        growth: float = 0.1,
        trend: int = 60,
        actions: dict[str, str] | None = None,
    ) -> None:
        positive("ThroughputMonitor", slow=slow, patience=patience, window=window, growth=growth, trend=trend)
        rule = Rule(
            "time/tokens_per_second",
            below=slow,
            of="usual",
            reference_rollouts=window,
            for_rollouts=patience,
            after=3 * patience,
            name="slow",
            text="{value:.3g} tokens a second, usually {reference:.3g}",
            statistic="mean",
        )
        super().__init__([rule], actions)
        self.patience, self.window, self.growth, self.trend = patience, window, growth, trend

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        for slow in super().check(step, metrics):
            grown = self._phase_that_grew_most()
            yield replace(slow, explanation=f"{slow.explanation}; {grown} grew most") if grown else slow
        yield from self._memory(step)

    def _phase_that_grew_most(self) -> str:
        grown = {
            phase: (self.history.mean(phase, self.patience) or 0.0)
            - (self.history.median(phase, self.window, back=self.patience) or 0.0)
            for phase in PHASES
            if self.history.count(phase)
        }
        return max(grown, key=lambda phase: grown[phase], default="")

    def _memory(self, step: int) -> Iterable[Finding]:
        half = self.trend // 2
        if self.history.count("memory/peak_gib") < self.trend:
            return
        now, middle, then = (
            self.history.median("memory/peak_gib", 5, back) or 0.0 for back in (0, half - 5, 2 * half - 5)
        )
        if now > (1 + self.growth) * middle and middle > (1 + self.growth) * then:
            yield self.finding(
                "memory",
                "warning",
                f"peak memory grows steadily: {now:.3g} GiB, {then:.3g} GiB {self.trend} rollouts ago",
                ("memory/peak_gib", self.trend, now, (1 + self.growth) * middle, then),
                onset=step - self.trend,
            )
