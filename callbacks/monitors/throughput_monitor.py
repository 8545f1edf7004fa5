"""Did the run become slow, and does memory grow?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.run.phases import PHASES


class ThroughputMonitor(Monitor):
    """Tokens a second, time by phase, memory.

    Findings: ``slow`` (tokens a second below ``slow`` of their median for ``patience`` rollouts; names the phase that
    grew most), ``memory`` (peak memory grew by more than ``growth`` in each half of the last ``trend`` rollouts).

    Args:
        slow: share of the median. Ours.
        patience: rollouts. Ours.
        window: rollouts of the median.
        growth: share. Ours.
        trend: rollouts. Ours.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("tokens_per_second", "memory/peak", *PHASES)

    def __init__(
        self,
        slow: float = 0.5,
        patience: int = 5,
        window: int = 50,
        growth: float = 0.1,
        trend: int = 60,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("ThroughputMonitor", slow=slow, patience=patience, window=window, growth=growth, trend=trend)
        self.slow, self.patience, self.window, self.growth, self.trend = slow, patience, window, growth, trend

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        history, key = self.history, "tokens_per_second"
        usual = history.median(key, self.window, back=self.patience)
        if usual and history.count(key) >= 3 * self.patience:
            bound = self.slow * usual
            if history.holds(key, self.patience, lambda value: value < bound):
                now, grown = history.mean(key, self.patience) or 0.0, self._phase()
                yield self.finding(
                    "slow",
                    "warning",
                    f"{now:.3g} tokens a second, usually {usual:.3g}" + (f"; {grown} grew most" if grown else ""),
                    (key, self.patience, now, bound, usual),
                    onset=history.began(key, lambda value: value < bound, step),
                    remedies=("look at the phase that grew", "compare with the length of the completions"),
                )
        yield from self._memory(step)

    def _phase(self) -> str:
        """The phase whose time grew most, by seconds."""
        grown = {
            phase: (self.history.mean(phase, self.patience) or 0.0)
            - (self.history.median(phase, self.window, back=self.patience) or 0.0)
            for phase in PHASES
            if self.history.count(phase)
        }
        return max(grown, key=lambda phase: grown[phase], default="")

    def _memory(self, step: int) -> Iterable[Finding]:
        half = self.trend // 2
        if self.history.count("memory/peak") < self.trend:
            return
        now, middle, then = (self.history.median("memory/peak", 5, back) or 0.0 for back in (0, half - 5, 2 * half - 5))
        if now > (1 + self.growth) * middle and middle > (1 + self.growth) * then:
            yield self.finding(
                "memory",
                "warning",
                f"peak memory grows steadily: {now:.3g} GiB, {then:.3g} GiB {self.trend} rollouts ago",
                ("memory/peak", self.trend, now, (1 + self.growth) * middle, then),
                onset=step - self.trend,
                remedies=("lower micro_batch_tokens", "look for tensors that callbacks keep"),
            )
