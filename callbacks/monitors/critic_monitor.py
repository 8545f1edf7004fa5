"""Does the critic say anything true?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding, Severity
from lit_grpo.callbacks.monitors.monitor import Monitor, positive

REMEDIES = (
    "bound the value head (sigmoid)",
    "train the critic first, on Monte Carlo returns (critic.warmup_rollouts)",
    "lambda 1",
    "more critic updates",
    "else a group baseline, which needs no critic (recipe grpo)",
)


class CriticMonitor(Monitor):
    """Values of correct and incorrect completions apart, their range, and what of the returns they explain.

    Rewards of 0 and 1 allow values between 0 and 1 only; values below 0 on incorrect completions come before PPO's
    collapse. A critic that is not trained yet breaks all of this, so nothing is said before ``warmup`` rollouts, and a
    bound must be left for ``patience`` rollouts.

    Findings: ``value_sign`` (mean value of incorrect completions below ``lowest - margin``), ``value_out_of_range``
    (share of values outside the range of the rewards above ``outside``), ``value_unexplained`` (explained variance
    below 0 for ``unexplained`` rollouts; or below ``hopeless`` for ``patience``, at any time), ``values_contradict``
    (equal completions to one prompt get different advantages, though their rewards are equal: the same states are
    valued differently). The first three are critical where the reward has fallen as well, or values
    are off by more than the range of the rewards; the last, and values beyond hope, always.

    Args:
        lowest: smallest reward.
        highest: largest reward.
        margin: in units of the reward.
        outside: share of tokens.
        unexplained: rollouts.
        hopeless: explained variance. Ours: a critic that is not trained yet is near 0, not far below.
        contradiction: share of pairs of equal completions. Ours.
        patience: rollouts. Ours.
        warmup: rollouts. Ours.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "value/correct",
        "value/incorrect",
        "value/outside",
        "value/explained_variance",
        "advantage/contradiction",
        "reward",
    )

    def __init__(
        self,
        lowest: float = 0.0,
        highest: float = 1.0,
        margin: float = 0.05,
        outside: float = 0.2,
        unexplained: int = 20,
        hopeless: float = -5.0,
        contradiction: float = 0.5,
        patience: int = 5,
        warmup: int = 20,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("CriticMonitor", unexplained=unexplained, patience=patience, range=highest - lowest)
        self.lowest, self.highest, self.margin, self.outside = lowest, highest, margin, outside
        self.unexplained, self.patience, self.warmup = unexplained, patience, warmup
        self.hopeless, self.contradiction = hopeless, contradiction

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        if not math.isfinite(metrics.get("value/outside", math.nan)):
            return
        history, patience = self.history, self.patience
        yield from self._beyond_hope(step)
        wide = self.highest - self.lowest
        wrong, right = history.median("value/incorrect", patience), history.median("value/correct", patience)
        off = max(
            (abs(v - min(max(v, self.lowest), self.highest)) for v in (wrong, right) if v is not None), default=0.0
        )
        severity: Severity = "critical" if history.fallen("reward") or off > wide else "warning"
        if step <= self.warmup and off <= wide:
            return
        bound = self.lowest - self.margin
        if history.holds("value/incorrect", patience, lambda value: value < bound):
            yield self.finding(
                "value_sign",
                severity,
                f"incorrect completions are valued {wrong:.2g}, and no reward is below {self.lowest:g}",
                ("value/incorrect", patience, wrong or 0.0, bound),
                onset=history.began("value/incorrect", lambda value: value < bound, step),
                remedies=REMEDIES,
            )
        if history.holds("value/outside", patience, lambda value: value > self.outside):
            now = history.median("value/outside", patience) or 0.0
            yield self.finding(
                "value_out_of_range",
                severity,
                f"{now:.0%} of the values are outside the range of the rewards",
                ("value/outside", patience, now, self.outside),
                onset=history.began("value/outside", lambda value: value > self.outside, step),
                remedies=REMEDIES,
            )
        if history.holds("value/explained_variance", self.unexplained, lambda value: value < 0):
            now = history.median("value/explained_variance", self.unexplained) or 0.0
            yield self.finding(
                "value_unexplained",
                severity,
                f"the critic is worse than a constant: it explains {now:.2g} of the returns' variance",
                ("value/explained_variance", self.unexplained, now, 0.0),
                onset=history.began("value/explained_variance", lambda value: value < 0, step),
                remedies=REMEDIES,
            )

    def _beyond_hope(self, step: int) -> Iterable[Finding]:
        history, patience = self.history, self.patience
        for key, kind, wrong, bound, what in (
            (
                "advantage/contradiction",
                "values_contradict",
                lambda value: value > self.contradiction,
                self.contradiction,
                "equal completions to one prompt are valued differently",
            ),
            (
                "value/explained_variance",
                "value_unexplained",
                lambda value: value < self.hopeless,
                self.hopeless,
                "the critic is far worse than a constant",
            ),
        ):
            if history.holds(key, patience, wrong):
                yield self.finding(
                    kind,
                    "critical",
                    what,
                    (key, patience, history.last(key) or 0.0, bound),
                    onset=history.began(key, wrong, step),
                    remedies=(
                        "check that dropout is off and that values belong to the tokens they stand at",
                        *REMEDIES,
                    ),
                )
