"""Watches whether the critic's values can be true."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding, Severity
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key
from lit_grpo.callbacks.monitors.threshold import Rule, ThresholdMonitor

REMEDIES = (
    "bound the value head (sigmoid)",
    "train the critic first, on Monte Carlo returns (critic.warmup_rollouts)",
    "lambda 1",
    "more critic updates",
    "else a group baseline, which needs no critic (recipe grpo)",
)
REMEDIES_FAULT = ("check that dropout is off and that values belong to the tokens they stand at", *REMEDIES)
CRITIC_FAILURE = DiagnosisKind(
    "critic_failure",
    "the critic's values are wrong",
    "a critic's rate that is too high, an unbounded value head, too few critic updates, or no warm-up",
)


class CriticMonitor(ThresholdMonitor):
    """Monitor of the critic's values on correct and incorrect completions, their range, and what they explain.

    Rewards of 0 and 1 allow values between 0 and 1 only; values below 0 on incorrect completions come before PPO's
    collapse. A critic that is not trained yet breaks all of this, so nothing is said before ``warmup`` rollouts, and a
    bound must be left for ``patience`` rollouts.

    Findings: ``value_sign`` (mean value of incorrect completions below ``lowest - margin``), ``value_out_of_range``
    (share of values outside the range of the rewards by more than a twentieth of it above ``outside``),
    ``value_unexplained`` (explained variance below ``worthless`` for ``unexplained`` rollouts; or below ``hopeless``
    for ``patience``, at any time), ``values_contradict`` (equal completions to one prompt get different advantages,
    though their rewards are equal: the same states are valued differently). The first three are critical where the
    reward has fallen as well, or values are off by more than the range of the rewards; the last, and values beyond
    hope, always.

    Args:
        lowest: smallest reward, where the module does not know the range of its rewards, as ours does. Where mean
            rewards below it are logged, rewards are of another scale, and it is two standard deviations below the
            smallest of them.
        highest: largest reward, likewise.
        margin: distance below ``lowest`` that a mean value may have, as a share of the range of the rewards.
        outside: share of tokens whose value may be outside the range of the rewards.
        unexplained: rollouts in a row after which an explained variance below ``worthless`` is a finding.
        worthless: explained variance below which a critic is worse than a constant. One that values all completions
            alike, as at first, is near 0 on either side.
        hopeless: explained variance below which a critic is beyond hope. One that is not trained yet is near 0, not
            far below.
        contradiction: share of the pairs of equal completions that may get different advantages.
        patience: rollouts in a row for which any other bound must be left.
        warmup: rollouts before which only a critic beyond hope is spoken of.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "critic/value_correct",
        "critic/value_incorrect",
        "critic/value_outside_frac",
        "critic/explained_variance",
        "sanity/advantage_contradiction_frac",
        *REWARDS,
        "reward/std",
    )
    findings: ClassVar[tuple[FindingKind, ...]] = tuple(
        FindingKind(name, CRITIC_FAILURE, rank, REMEDIES)
        for rank, name in enumerate(("values_contradict", "value_sign", "value_out_of_range", "value_unexplained"), 400)
    )

    def __init__(
        self,
        lowest: float = 0.0,
        highest: float = 1.0,
        margin: float = 0.05,
        outside: float = 0.2,
        unexplained: int = 20,
        worthless: float = -0.1,
        hopeless: float = -5.0,
        contradiction: float = 0.5,
        patience: int = 5,
        warmup: int = 20,
        actions: dict[str, str] | None = None,
    ) -> None:
        positive("CriticMonitor", unexplained=unexplained, patience=patience, range=highest - lowest)
        self._always = [
            Rule(
                "sanity/advantage_contradiction_frac",
                above=contradiction,
                for_rollouts=patience,
                severity="critical",
                name="values_contradict",
                text="equal completions to one prompt are valued differently",
                remedies=REMEDIES_FAULT,
            ),
            Rule(
                "critic/explained_variance",
                below=hopeless,
                for_rollouts=patience,
                severity="critical",
                name="value_unexplained",
                text="the critic is far worse than a constant",
                remedies=REMEDIES_FAULT,
            ),
        ]
        self._after_warmup = [
            Rule(
                "critic/value_incorrect",
                # As the range of the rewards has it, see check.
                below=lowest - margin * (highest - lowest),
                for_rollouts=patience,
                name="value_sign",
                text="incorrect completions are valued {value:.2g}, and no reward is below {bound:.2g}",
                statistic="median",
            ),
            Rule(
                "critic/value_outside_frac",
                above=outside,
                for_rollouts=patience,
                name="value_out_of_range",
                text="{value:.0%} of the values are outside the range of the rewards",
                statistic="median",
            ),
            Rule(
                "critic/explained_variance",
                below=worthless,
                for_rollouts=unexplained,
                name="value_unexplained",
                text="the critic is worse than a constant: it explains {value:.2g} of the returns' variance",
                statistic="median",
            ),
        ]
        super().__init__([*self._always, *self._after_warmup], actions)
        self.lowest, self.highest, self.margin = lowest, highest, margin
        self.patience, self.warmup = patience, warmup

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        if not math.isfinite(metrics.get("critic/value_outside_frac", math.nan)):
            return
        for rule in self._always:
            yield from self.apply(rule)
        values = (self.history.median(key, self.patience) for key in ("critic/value_incorrect", "critic/value_correct"))
        lowest, highest = self._range()
        distances = (abs(v - min(max(v, lowest), highest)) for v in values if v is not None)
        far_off = max(distances, default=0.0) > highest - lowest
        if step <= self.warmup and not far_off:
            return
        severity: Severity = "critical" if self.history.fallen(reward_key(self.history)) or far_off else "warning"
        for rule in self._after_warmup:
            if rule.name == "value_sign":
                rule = replace(rule, below=lowest - self.margin * (highest - lowest))
            yield from self.apply(rule, severity)

    def _range(self) -> tuple[float, float]:
        if self.facts.reward_range is not None:
            return self.facts.reward_range
        seen = self.history.values["reward"]
        spread = 2 * (self.history.median("reward/std", self.memory) or 0.0)
        least, most = min(seen, default=self.lowest), max(seen, default=self.highest)
        return (
            least - spread if least < self.lowest else self.lowest,
            most + spread if most > self.highest else self.highest,
        )
