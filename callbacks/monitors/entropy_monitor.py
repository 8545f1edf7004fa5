"""Watches the entropy of the policy: too high, too low, or on its way there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import SOLVED, DiagnosisKind, FindingKind, in_words
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.callbacks.monitors.sampled import GROUPS, REWARDS, reward_key, unsolved, unsolved_key
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH, bound, slope_errors

REMEDIES_HIGH = (
    "turn on the entropy filter and gamma 0.1 (recipe gtpo, or entropy_filter: all and entropy_gamma)",
    "halve the learning rate",
    "return to the last checkpoint before the crossing",
)
REMEDIES_LOW = (
    "raise clip_high to 0.28",
    "drop penalties on KL and entropy",
    "add an entropy bonus (entropy_coef)",
    "stop if the held-out reward has not improved",
)
REMEDIES_PAID = ("lower entropy_coef, or set it to 0: the bonus outweighs the reward",)
REMEDIES_PUNISHED = ("raise entropy_coef to 0 or above, or drop entropy_reward: certainty is paid for",)
ENTROPY_EXPLOSION = DiagnosisKind(
    "entropy_explosion",
    "entropy explosion",
    "negatives that are pushed down without bound, or steps that are too large",
    Remedy(0.5, adds="no_entropy_bonus"),
)
ENTROPY_COLLAPSE = DiagnosisKind(
    "entropy_collapse",
    "entropy collapse",
    "what is likely is reinforced until nothing else is tried: few negatives, a tight upper clip, a penalty on entropy",
    Remedy(0.5, adds="exploration"),
)


UNJUDGED = (
    "entropy is near 0, and no reward says whether the prompts are solved",
    "the policy has settled on what it is paid for",
)
"""Title and likely cause of a low entropy where nobody knows whether prompts are left."""
CROSSED = 1.2
"""Multiple of H_ini that an entropy above the threshold must have as well."""
EARLY = 3
"""First rollouts whose entropy a term in the loss is measured against."""
GROUPS_TO_BLAME = 24
"""Groups whose entropy must lie beyond that bound, in three rollouts or in more where they are small."""


class EntropyMonitor(Monitor):
    """Monitor of the policy's mean next-token entropy H against that of the untouched model, H_ini.

    Both are the same kind of mean. Where the module measures H_ini (GTPO's rule does), that is
    ``policy/entropy_initial``, a mean over completions, and H is ``policy/entropy_sequence``. Elsewhere H is
    ``policy/entropy``, the mean over tokens, and H_ini its mean over the first rollouts until ``initial_prompts``
    prompts were seen, at most ``initial_rollouts`` of them: later ones are no longer those of the untouched model.

    Findings: ``entropy_high`` (the smoothed H crosses ln 2 though H_ini lies below it, or exceeds ``high`` H_ini),
    ``entropy_rising`` (its slope leads to ``high`` H_ini within ``horizon`` rollouts), ``entropy_low`` (below ``low``
    H_ini, or below ``floor``, for ``patience`` rollouts, while prompts are left unsolved: more than ``unsolved`` of the
    groups have no right answer, or the reward has fallen beyond doubt, see
    :meth:`lit_grpo.callbacks.monitors.history.History.fallen`; only ``info`` where no reward says what is right),
    ``exploration_over`` (as low, on prompts that are solved: low entropy is how a solved task ends).

    ``entropy_spent`` is the slow loss: below ``spent`` H_ini for ``patience`` rollouts, while prompts are left unsolved
    and the reward has not risen beyond chance in the last ``bought`` rollouts. Entropy that is spent on a rising reward
    is how a policy learns.

    ``entropy_paid`` and ``entropy_punished`` name the objective's own entropy term as the cause. Where the module says
    that it has one (:attr:`lit_grpo.callbacks.monitors.facts.Facts.entropy_coef`), and the entropy of three rollouts
    (more, where they have few groups) lies beyond ``driven`` times that of the first three, in the direction in which
    the term pushes, the finding is a warning. It is critical where the reward has fallen, or where a bonus has brought
    the entropy above ``high`` times that bound. Without facts about the objective neither is raised.

    Args:
        threshold: entropy in nats that H must not cross from below: ln 2, below which one token has the majority
            (2508.03772 Eq. 10).
        high: multiple of H_ini above which H is too high.
        low: multiple of H_ini below which H is too low.
        floor: entropy in nats below which H is too low, whatever H_ini is.
        spent: multiple of H_ini below which entropy must still buy reward.
        bought: rollouts in which it must have.
        patience: rollouts in a row for which it must be too low.
        horizon: rollouts over which the slope is extrapolated.
        unsolved: share of groups without a right answer above which prompts are left unsolved.
        smooth: rollouts that the median is taken over.
        trend: rollouts that the slope is fitted to.
        initial_prompts: prompts that H_ini is measured on (2508.03772: 100).
        initial_rollouts: largest number of rollouts that H_ini is measured on.
        driven: multiple of the entropy of the first rollouts, or with a negative coefficient its inverse, from which on
            it is the objective's entropy term that moves it.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("policy/entropy", "policy/entropy_sequence", *REWARDS, *GROUPS)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "entropy_paid",
            ENTROPY_EXPLOSION,
            556,
            REMEDIES_PAID,
            title="entropy is paid for",
            likely_cause="the objective's bonus on entropy outweighs the reward",
        ),
        FindingKind(
            "entropy_punished",
            ENTROPY_COLLAPSE,
            557,
            REMEDIES_PUNISHED,
            title="entropy is minimised",
            likely_cause="the objective pays for certainty: a negative entropy_coef, or entropy_reward",
        ),
        FindingKind("entropy_low", ENTROPY_COLLAPSE, 560, REMEDIES_LOW),
        FindingKind(
            "entropy_high",
            ENTROPY_EXPLOSION,
            564,
            REMEDIES_HIGH,
            title="entropy is far above its beginning",
        ),
        FindingKind("exploration_over", SOLVED, 624, ("take harder prompts, or end the run",)),
        FindingKind(
            "entropy_spent",
            DiagnosisKind(
                "entropy_spent",
                "entropy has halved and the reward does not rise",
                "the policy has settled: on the best that it can do, or too early (few negatives, a tight upper clip)",
            ),
            665,
            REMEDIES_LOW,
        ),
        FindingKind(
            "entropy_rising",
            DiagnosisKind(
                "entropy_rising",
                "entropy rises",
                "a bonus on it, negatives that are pushed down, or steps that are too large",
            ),
            700,
            REMEDIES_HIGH,
        ),
    )
    also_saved: ClassVar[tuple[str, ...]] = ("initial_entropy", "_initial_sum", "_initial_groups", "_initial_seen")

    def __init__(
        self,
        threshold: float = math.log(2),
        high: float = 2.0,
        low: float = 0.1,
        floor: float = 0.02,
        spent: float = 0.5,
        bought: int = 50,
        patience: int = 10,
        horizon: int = 50,
        unsolved: float = 0.2,
        smooth: int = 10,
        trend: int = 20,
        initial_prompts: int = 100,
        initial_rollouts: int = 5,
        driven: float = 1.25,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("EntropyMonitor", threshold=threshold, high=high, patience=patience, smooth=smooth, trend=trend)
        self.threshold, self.high, self.low, self.floor = threshold, high, low, floor
        self.spent, self.bought = spent, bought
        self.patience, self.horizon, self.unsolved, self.driven = patience, horizon, unsolved, driven
        self.history.watch("policy/entropy", early=EARLY)
        self.history.watch("groups/count")
        self.smooth, self.trend = smooth, trend
        self.initial_prompts, self.initial_rollouts = initial_prompts, initial_rollouts
        self.initial_entropy: float | None = None
        """H_ini in nats; None until it is known."""
        self._initial_sum, self._initial_groups, self._initial_seen = 0.0, 0.0, 0
        self._key = "policy/entropy"
        """Metric that is H: the kind of mean that H_ini is."""

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        self._measure_initial(metrics)
        yield from self._driven(step)
        key = self._key = "policy/entropy_sequence" if "policy/entropy_initial" in metrics else "policy/entropy"
        initial, now = self.initial_entropy, self.history.median(key, self.smooth)
        if initial is None or now is None or self.history.count(key) < self.smooth:
            return
        if now > self.high * initial:
            yield self._high("exceeds its bound", now, self.high * initial, initial)
        # From just below to just above is no crossing: both are measured.
        elif now > max(self.threshold, CROSSED * initial) and self.threshold > initial:
            yield self._high("crossed ln 2, where no token has the majority any more", now, self.threshold, initial)
        else:
            yield from self._rising(now, initial)
        yield from self._low(step, initial)

    def _driven(self, step: int) -> Iterable[Finding]:
        """Look for an entropy that goes where the objective's own entropy term pushes it, far from its beginning."""
        coefficient, early = self.facts.entropy_coef, self.history.early.get("policy/entropy", [])
        # The entropy of one prompt's completions scatters by a fifth, and three rollouts of that are soon alike.
        size = max(3, math.ceil(GROUPS_TO_BLAME / (self.history.last("groups/count") or GROUPS_TO_BLAME)))
        recent = self.history.window("policy/entropy", size)
        if not coefficient or len(early) < EARLY or len(recent) < size:
            return
        begun, now = median(early), median(recent)
        up = coefficient > 0
        limit = begun * (self.driven if up else 1 / self.driven)
        if begun <= 0 or not all(value > limit if up else value < limit for value in recent):
            return
        # A bonus that makes the policy random is what it is paid for; certainty may be what the task needs.
        lost = self.history.fallen(reward_key(self.history), share=0.1, errors=3.0)
        gone = now > self.high * self.driven * begun if up else False
        yield self.finding(
            "entropy_paid" if up else "entropy_punished",
            "critical" if lost or gone else "warning",
            f"entropy follows its own term in the loss: {begun:.3g} nats in the beginning, {now:.3g} now",
            ("policy/entropy", size, now, limit, begun),
            onset=self.history.began("policy/entropy", lambda value: (value > begun) == up, step),
        )

    def _measure_initial(self, metrics: Mapping[str, float]) -> None:
        if "policy/entropy_initial" in metrics:
            self.initial_entropy = metrics["policy/entropy_initial"]
            return
        value = metrics.get("policy/entropy", math.nan)
        enough = self._initial_groups >= self.initial_prompts or self._initial_seen >= self.initial_rollouts
        if enough or not math.isfinite(value):
            return
        groups = metrics.get("groups/count", 1.0)
        self._initial_sum += groups * value
        self._initial_groups += groups
        self._initial_seen += 1
        self.initial_entropy = self._initial_sum / self._initial_groups

    def _high(self, what: str, now: float, limit: float, initial: float) -> Finding:
        onset = self.history.began(self._key, lambda value: value > limit, self.step)
        return self.finding(
            "entropy_high",
            "warning",
            f"entropy {what}: {now:.3g} nats, {initial:.3g} in the beginning",
            (self._key, self.smooth, now, limit, initial),
            onset=onset,
        )

    def _rising(self, now: float, initial: float) -> Iterable[Finding]:
        slope = self.history.slope(self._key, self.trend)
        if slope is None or slope <= 0 or now <= initial:
            return
        if slope_errors(self.history.window(self._key, self.trend)) < bound(RUN_LENGTH, freedom=self.trend):
            return
        ahead, limit = now + slope * self.horizon, self.high * initial
        if ahead > limit:
            yield self.finding(
                "entropy_rising",
                "info",
                f"entropy rises by {slope:.2g} nats a rollout and passes {limit:.3g} within {self.horizon} rollouts",
                (self._key, self.trend, ahead, limit, now),
                onset=self.step - self.trend,
            )

    def _low(self, step: int, initial: float) -> Iterable[Finding]:
        least = max(self.low * initial, self.floor)
        if not self.history.holds(self._key, self.patience, lambda value: value < least):
            yield from self._spent(step, initial)
            return
        wrong = unsolved(self.history, self.patience)
        left = (wrong is not None and wrong > self.unsolved) or self.history.fallen(reward_key(self.history))
        now = self.history.mean(self._key, self.patience) or 0.0
        evidence: list[tuple[str, int, float, float, float | None]] = [(self._key, self.patience, now, least, initial)]
        if wrong is not None and wrong > self.unsolved:
            evidence.append((unsolved_key(self.history), self.patience, wrong, self.unsolved, None))
        # Where no reward says what is right, nobody knows whether the prompts are solved.
        solved = wrong is not None and not left
        where = " while prompts are left unsolved" if left else ", on prompts that are solved" if solved else ""
        yield self.finding(
            "exploration_over" if solved else "entropy_low",
            "critical" if left else "info",
            f"exploration is over: entropy has been below {least:.3g} nats for {self.patience} rollouts" + where,
            *evidence,
            onset=self.history.began(self._key, lambda value: value < least, step),
            about=None if left or solved else in_words("entropy_low", *UNJUDGED),
        )

    def _spent(self, step: int, initial: float) -> Iterable[Finding]:
        limit, key = self.spent * initial, reward_key(self.history)
        if not self.history.holds(self._key, self.patience, lambda value: value < limit):
            return
        rewards, wrong = self.history.window(key, self.bought), unsolved(self.history, self.patience)
        right = self.history.mean(unsolved_key(self.history).replace("wrong", "correct"), self.patience)
        # A rise within the window, at whatever time: two standard errors are enough to leave it alone.
        half = len(rewards) // 2
        if half < self.patience or statistics.step_between(rewards, half, half).errors > 2:
            return
        left = wrong is not None and wrong > self.unsolved and (right is None or right < 0.5)
        now = self.history.mean(self._key, self.patience) or 0.0
        yield self.finding(
            "entropy_spent",
            "warning" if left else "info",
            f"entropy has fallen to {now:.3g} nats, {initial:.3g} in the beginning, and the reward does not rise",
            (self._key, self.patience, now, limit, initial),
            onset=self.history.began(self._key, lambda value: value < limit, step),
        )
