"""Watches how far the policy moves on one rollout, and whether it equals itself before the first update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import LEARNING_RATE_TOO_HIGH, DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import positive
from lit_grpo.callbacks.monitors.threshold import Rule, ThresholdMonitor

REMEDIES = ("take fewer updates on each rollout", "lower the learning rate", "lower clip_high and clip_low")
REMEDIES_FAULT = (
    "look for dropout that is active in the learner",
    "apply the temperature in both passes",
    "use the same kernels and number format in both passes",
)
PLUMBING_RATIO = DiagnosisKind(
    "plumbing_ratio",
    "the policy differs from itself before the first update",
    "dropout, temperature or kernels differ between passes",
    outlives_rollback=True,
)


class RatioMonitor(ThresholdMonitor):
    """Monitor of the importance ratio, the KL divergence of the policy from its old self, and clip fractions by side.

    Findings: ``first_update_ratio`` and ``first_update_clip`` (with one optimizer step a rollout ratio and clip
    fractions are known beforehand: 1 and 0; anything else is a fault in the code that computes them),
    ``policy_change`` (mean |ratio - 1| above ``gap``, KL(old || new) by k3 above ``kl``, or mean |pi - pi_old| doubled
    within ``double_within`` rollouts while above ``delta``), ``clipping`` (a clip fraction above ``clip``, or one side
    more than ``one_sided`` times the other). ``clipping`` is only evidence for other findings.

    Args:
        first_gap: bound on mean |ratio - 1| of a single update: rounding, 1e-6 in float32 and 1e-2 in bfloat16.
        gap: largest mean |ratio - 1|: the clip range, usually 0.2.
        kl: largest KL(old || new) in nats.
        double_within: rollouts within which mean |pi - pi_old| must not double.
        delta: mean |pi - pi_old| below which doubling says nothing.
        clip: largest share of clipped tokens where each token has a ratio of its own.
        clip_sequence: the same where one ratio, in a much narrower range, clips whole completions: GSPO clips 15 % of
            the tokens while it learns (2507.18071, figure 2). Which of them holds the module's objective says; where
            it does not, the numbers do: a share of tokens outside a range of 0.2 alone makes the mean |ratio - 1| at
            least 0.2 of that share.
        one_sided: multiple of the other side's clip fraction above which clipping is one-sided.
        patience: rollouts in a row in which ``gap``, ``kl`` or ``clip`` must be exceeded.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "policy/ratio_gap",
        "policy/approx_kl_k3",
        "policy/clip_frac/low",
        "policy/clip_frac/high",
        "policy/delta_prob_abs",
        "optim/steps",
        "optim/skipped_steps",
    )
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind("first_update_ratio", PLUMBING_RATIO, 240, REMEDIES_FAULT),
        FindingKind("first_update_clip", PLUMBING_RATIO, 250, REMEDIES_FAULT),
        FindingKind(
            "policy_change",
            LEARNING_RATE_TOO_HIGH,
            580,
            REMEDIES,
            title="the policy moves far on one rollout",
            likely_cause="many updates on each rollout, or a learning rate that is too high for so many",
        ),
        FindingKind(
            "clipping",
            DiagnosisKind(
                "clipping", "many tokens are clipped", "the updates of a rollout move the policy to the clip's bounds"
            ),
            720,
            REMEDIES,
        ),
    )

    def __init__(
        self,
        first_gap: float = 1e-2,
        gap: float = 0.2,
        kl: float = 0.05,
        double_within: int = 20,
        delta: float = 0.02,
        clip: float = 0.1,
        clip_sequence: float = 0.4,
        one_sided: float = 5.0,
        patience: int = 3,
        actions: dict[str, str] | None = None,
    ) -> None:
        positive("RatioMonitor", first_gap=first_gap, gap=gap, kl=kl, clip=clip, one_sided=one_sided, patience=patience)
        self._change_rules = [
            Rule(
                key,
                above=bound,
                for_rollouts=patience,
                name="policy_change",
                text="the policy moves far on one rollout: {key} {value:.2g}",
            )
            for key, bound in (("policy/ratio_gap", gap), ("policy/approx_kl_k3", kl))
        ]
        self._clip_rules = {
            side: Rule(
                side,
                above=clip,
                for_rollouts=patience,
                severity="info",
                name="clipping",
                text="{value:.1%} of the tokens are stopped at {key}",
                remedies=(
                    *REMEDIES,
                    "if rare tokens are clipped (policy/clipped_old_prob is low): clip_high 0.28, or cispo",
                ),
                statistic="median",
            )
            for side in ("policy/clip_frac/low", "policy/clip_frac/high")
        }
        super().__init__([*self._change_rules, *self._clip_rules.values()], actions)
        self.first_gap, self.double_within, self.delta = first_gap, double_within, delta
        self.one_sided, self.patience, self.clip_sequence = one_sided, patience, clip_sequence

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        if self._had_one_update(step):
            yield from self._faults(metrics)
            return
        yield from self._change(step)
        yield from self._clipping()

    def _had_one_update(self, step: int) -> bool:
        """Tell whether this rollout had at most one optimizer step; False where that is not logged."""
        taken = 0.0
        for key in ("optim/steps", "optim/skipped_steps"):
            values = self.history.window(key, 2)
            if len(values) == 2:
                taken += values[1] - values[0]
            elif key == "optim/steps" and not (values and step == 1):
                return False
            elif values:
                taken += values[0]
        return taken <= 1

    def _faults(self, metrics: Mapping[str, float]) -> Iterable[Finding]:
        gap = metrics.get("policy/ratio_gap", 0.0)
        if not gap <= self.first_gap:
            yield self.finding(
                "first_update_ratio",
                "critical",
                f"the ratio of the first update is not 1: mean |ratio - 1| is {gap:.2g}",
                ("policy/ratio_gap", 1, gap, self.first_gap),
            )
        for side in ("policy/clip_frac/low", "policy/clip_frac/high"):
            share = metrics.get(side, 0.0)
            if share > 0:
                yield self.finding(
                    "first_update_clip",
                    "critical",
                    f"tokens are clipped in the first update, where the ratio is 1: {side} {share:.2g}",
                    (side, 1, share, 0.0),
                )

    def _change(self, step: int) -> Iterable[Finding]:
        if far := [found for rule in self._change_rules for found in self.apply(rule)]:
            yield far[0]
            return
        key = "policy/delta_prob_abs"
        change = self.history.then_and_now(key, 3, self.double_within)
        if change is not None and change[1] > max(2 * change[0], self.delta):
            then, now = change
            yield self.finding(
                "policy_change",
                "info",
                f"the policy moves twice as far on a rollout as {self.double_within} rollouts ago",
                (key, self.double_within, now, 2 * then, then),
                onset=step - self.double_within,
            )

    def _clipping(self) -> Iterable[Finding]:
        low, high = (
            self.history.median(side, self.patience) or 0.0
            for side in ("policy/clip_frac/low", "policy/clip_frac/high")
        )
        whole = self._has_sequence_ratio(low + high)
        for side, share, other in (("policy/clip_frac/low", low, high), ("policy/clip_frac/high", high, low)):
            if whole and share <= self.clip_sequence:
                continue
            if stopped := self.apply(self._clip_rules[side]):
                yield from stopped
                return
            if share > 0.03 and share > self.one_sided * other:
                yield self.finding(
                    "clipping",
                    "info",
                    f"clipping is one-sided: {side} {share:.1%}, the other side {other:.1%}",
                    (side, self.patience, share, self.one_sided * other),
                )
                return

    def _has_sequence_ratio(self, clipped: float) -> bool:
        if self.facts.sequence_ratio is not None:
            return self.facts.sequence_ratio
        gap = self.history.median("policy/ratio_gap", self.patience)
        return gap is not None and gap < 0.1 * clipped
