"""Watches whether the reward still stands for what is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import Monitor, positive

NO_TERMS = ("reward/std", "sanity/reward_contradiction_frac")
"""Metrics whose names begin like those of reward terms, and which are no terms."""
REMEDIES = (
    "read 20 completions with a high reward: what do they have in common?",
    "lower the weight of the term that rises, or pay it only where the other is earned",
    "return to the best held-out checkpoint and stop",
)
REWARD_HACKING = DiagnosisKind(
    "reward_hacking",
    "the reward rises without the thing it stands for",
    "one reward term can be had without solving the task",
)


class RewardHackingMonitor(Monitor):
    """Monitor of reward terms against each other, of training against held-out reward, and of the format reward.

    Findings: ``reward_terms_diverge`` (over ``window`` rollouts one logged ``reward/<name>`` rises by more than
    ``rise`` while another falls by more than ``fall`` of what it was; critical), ``held_out_falls`` (the training
    reward rises by more than ``train_rise`` over ``train_window`` rollouts while ``val/reward`` falls by more than
    ``errors`` standard errors from its best), ``format_lost`` (``format_key`` falls below ``format_share`` of its best:
    2508.03772 marks the onset of a collapse at 9 of 10).

    Args:
        window: rollouts over which reward terms are compared.
        rise: rise of one term that counts, in its own units.
        fall: fall of another term that counts, as a share of what it was.
        smooth: rollouts that each mean is taken over.
        train_window: rollouts over which the training reward is compared.
        train_rise: rise of the training reward that counts, in units of the reward.
        errors: standard errors by which the held-out reward must fall from its best.
        held_out: number of held-out completions, from which that standard error is computed.
        format_key: logged reward that pays for the form of an answer.
        format_share: share of its best below which the format is being lost.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("reward", "val/reward")
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind("reward_terms_diverge", REWARD_HACKING, 550, REMEDIES),
        FindingKind("held_out_falls", REWARD_HACKING, 555, REMEDIES),
        FindingKind(
            "format_lost",
            REWARD_HACKING,
            rank=660,
            remedies=("look at the entropy: it turns at the same time", "weigh conflicting tokens (recipe gtpo)"),
        ),
    )

    def __init__(
        self,
        window: int = 50,
        rise: float = 0.05,
        fall: float = 0.2,
        smooth: int = 5,
        train_window: int = 100,
        train_rise: float = 0.02,
        errors: float = 2.0,
        held_out: int = 100,
        format_key: str = "reward/format",
        format_share: float = 0.9,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("RewardHackingMonitor", window=window, rise=rise, fall=fall, smooth=smooth, held_out=held_out)
        self.window, self.rise, self.fall, self.smooth = window, rise, fall, smooth
        self.train_window, self.train_rise, self.errors, self.held_out = train_window, train_rise, errors, held_out
        self.format_key, self.format_share = format_key, format_share

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        for key in metrics:
            if key.startswith("reward/") and key not in NO_TERMS:
                self.history.watch(key)
        # Between two evaluations the last one's reward is logged again with every step.
        if metrics.get("val/reward") == self.history.last("val/reward"):
            metrics = {key: value for key, value in metrics.items() if key != "val/reward"}
        return super().observe(step, metrics)

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._diverge(step)
        yield from self._held_out(step)
        yield from self._format(step)

    def _means(self, key: str) -> list[float]:
        """Return the means of every ``smooth`` rollouts in a row within the window, oldest first."""
        values = self.history.window(key, self.window)
        return [math.fsum(values[i : i + self.smooth]) / self.smooth for i in range(len(values) - self.smooth + 1)]

    def _diverge(self, step: int) -> Iterable[Finding]:
        terms = {key: means for key in self.history.values if key.startswith("reward/") and (means := self._means(key))}
        for down, low in terms.items():
            best = max(low)
            if best <= 0 or low[-1] > (1 - self.fall) * best:
                continue
            peak = low.index(best)
            for up, high in terms.items():
                since = min(peak, len(high) - 1)
                if up != down and high[-1] - high[since] > self.rise:
                    yield self.finding(
                        "reward_terms_diverge",
                        "critical",
                        f"{up} rises while {down} falls",
                        (up, self.window, high[-1], high[since] + self.rise, high[since]),
                        (down, self.window, low[-1], (1 - self.fall) * best, best),
                        onset=self.history.steps[down][-self.window :][peak] + self.smooth - 1,
                    )
                    return

    def _held_out(self, step: int) -> Iterable[Finding]:
        held = self.history.values["val/reward"]
        size = min(self.train_window, self.history.count("reward"))
        if len(held) < 2 or size < 2 * self.smooth:
            return
        now = self.history.mean("reward", self.smooth) or 0.0
        then = self.history.mean("reward", self.smooth, back=size - self.smooth) or 0.0
        best = max(held)
        # The error of a share, since most held-out rewards are 0 or 1; never below that of 0.01 / n.
        share = min(max(best, 0.0), 1.0)
        error = math.sqrt(max(share * (1 - share), 0.01) / self.held_out)
        if now - then > self.train_rise and held[-1] < best - self.errors * error:
            yield self.finding(
                "held_out_falls",
                "critical",
                "the training reward rises while the held-out reward falls",
                ("reward", size, now, then + self.train_rise, then),
                ("val/reward", len(held), held[-1], best - self.errors * error, best),
                onset=self.history.steps["val/reward"][held.index(best)],
            )

    def _format(self, step: int) -> Iterable[Finding]:
        if not self.history.values.get(self.format_key):
            return
        best, now = self.history.best(self.format_key, self.smooth), self.history.mean(self.format_key, self.smooth)
        if best is not None and now is not None and best > 0 and now < self.format_share * best:
            yield self.finding(
                "format_lost",
                "warning",
                f"{self.format_key} fell to {now:.2g} from {best:.2g}: an early sign of collapse",
                (self.format_key, self.smooth, now, self.format_share * best, best),
                onset=self.history.began(self.format_key, lambda value: value < best, step),
            )
