"""Watches whether the reward still stands for what is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH, RUN_LENGTH_CRITICAL, bound

NO_TERMS = ("reward/std", "sanity/reward_contradiction_frac")
"""Metrics whose names begin like those of reward terms, and which are no terms."""
HELD, HELD_ERROR = "val/reward", "val/reward/se"
TRAINED = "reward at evaluation"
"""What is remembered with each evaluation: its reward and standard error, and the training reward of that time."""
KNOWN = 1_000_000
"""Degrees of freedom of a standard error that is known and not estimated from a few values."""
REMEDIES = (
    "read 20 completions with a high reward: what do they have in common?",
    "lower the weight of the term that rises, or pay it only where the other is earned",
    "return to the best held-out checkpoint and stop",
)
EACH = 2.5
"""Standard errors by which one term must rise and another fall, besides the bound on both together."""
HELD_OUT_SURE = 2.33
"""Standard errors that are added to the held-out gain before it is called too small: 99 % are below."""
REWARD_HACKING = DiagnosisKind(
    "reward_hacking",
    "the reward rises without the thing it stands for",
    "one reward term can be had without solving the task",
)


OVERFITTING = DiagnosisKind(
    "overfitting",
    "the held-out reward falls and the training reward does not",
    "few prompts that are learned by heart, or a reward that can be had without solving the task",
)
FORMAT_LOST = DiagnosisKind(
    "format_lost",
    "the form of the answers is being lost",
    "an early sign of a collapse, or the form is paid too little",
)
REMEDIES_HELD_OUT = (
    "return to the best held-out checkpoint and stop there",
    "train on more prompts: on how many different ones does the run learn?",
    "compare held-out with training prompts: is it the same task?",
    "read 20 completions with a high reward: what do they have in common?",
)


class RewardHackingMonitor(Monitor):
    """Monitor of reward terms against each other, of training against held-out reward, and of the format reward.

    Every change is judged in its standard errors, of which there must be so many that chance passes the bound once in
    :data:`RUN_LENGTH` rollouts or evaluations (:mod:`lit_grpo.callbacks.monitors.statistics`), and in shares of what a
    term gives, so that the scale of the reward and the size of the batch do not matter.

    Findings: ``reward_terms_diverge`` (over ``window`` rollouts one logged ``reward/<name>`` rises by more than
    ``rise`` of its largest value while another falls by more than ``fall`` of its best; critical), ``held_out_falls``
    (held-out reward has fallen since some evaluation, and training reward has not; critical from ``held_out_lost`` of
    what it was), ``held_out_flat`` (training reward has gained, and held-out reward certainly less than
    ``held_out_gain`` of that), ``format_lost`` (``format_key`` falls below ``format_share`` of its best: 2508.03772
    marks the onset of a collapse at 9 of 10).

    The standard error of an evaluation is the logged one; where none is logged, that of a share of ``held_out``
    questions. Where evaluations repeat their questions, the change since the best of them is judged as well
    (``val/<set>/reward/change``, paired): the difficulty of the questions is no part of its error.

    Args:
        window: rollouts over which reward terms are compared.
        rise: rise of one term that counts, as a share of the largest value it had.
        fall: fall of another term that counts, as a share of what it was.
        smooth: rollouts that each mean is taken over.
        held_out_lost: share of the held-out reward whose loss is critical.
        held_out_gain: share of the training reward's gain below which held-out reward does not follow.
        held_out: number of held-out questions, where no standard error is logged.
        format_key: logged reward that pays for the form of an answer.
        format_share: share of its best below which the format is being lost.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (*REWARDS, HELD)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind("reward_terms_diverge", REWARD_HACKING, 550, REMEDIES),
        # A symptom: steps that are too large, or a term that can be had without the task, explain it.
        FindingKind("held_out_falls", OVERFITTING, 586, REMEDIES_HELD_OUT),
        FindingKind(
            "held_out_flat",
            OVERFITTING,
            rank=655,
            remedies=REMEDIES_HELD_OUT,
            title="the training reward rises and the held-out reward hardly does",
        ),
        FindingKind(
            "format_lost",
            FORMAT_LOST,
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
        held_out_lost: float = 0.1,
        held_out_gain: float = 0.25,
        held_out: int = 100,
        format_key: str = "reward/format",
        format_share: float = 0.9,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("RewardHackingMonitor", window=window, rise=rise, fall=fall, smooth=smooth, held_out=held_out)
        self.window, self.rise, self.fall, self.smooth = window, rise, fall, smooth
        self.held_out_lost, self.held_out_gain, self.held_out = held_out_lost, held_out_gain, held_out
        self.format_key, self.format_share = format_key, format_share
        for key in (HELD_ERROR, TRAINED):
            self.history.watch(key)

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        for key in metrics:
            if key.startswith("reward/") and key not in NO_TERMS:
                self.history.watch(key)
        held = metrics.get(HELD)
        # Between two evaluations the last one's reward is logged again with every step.
        if held is None or held == self.history.last(HELD):
            metrics = {key: value for key, value in metrics.items() if key != HELD}
        else:
            key = reward_key(self.history)
            trained = self.history.mean(key, 2 * self.smooth)
            metrics = {
                **metrics,
                HELD_ERROR: self._held_out_error(held, metrics),
                TRAINED: metrics.get(key, math.nan) if trained is None else trained,
            }
        return super().observe(step, metrics)

    def _held_out_error(self, held: float, metrics: Mapping[str, float]) -> float:
        """Return the standard error of a held-out reward, which is the mean over the sets."""
        errors = []
        for key, value in metrics.items():
            if key.startswith("val/") and key.endswith("/reward/se"):
                errors.append(value)
        if errors and all(map(math.isfinite, errors)):
            # All answers alike have a standard error of 0, from which every other evaluation would differ.
            usual = max(self.history.values[HELD_ERROR], default=0.0)
            return max(math.hypot(*errors) / len(errors), usual / 2)
        known = [*self.history.values[HELD], held]
        if min(known) >= 0 and max(known) <= 1:
            # The error of a share, since most held-out rewards are 0 or 1; never below that of 0.01 / n.
            return math.sqrt(max(held * (1 - held), 0.01) / self.held_out)
        return statistics.noise(known) if len(known) >= 8 else 10.0 * (max(known) - min(known) or 1.0)

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._diverge(step)
        yield from self._held_out(metrics)
        yield from self._format(step)

    def _diverge(self, step: int) -> Iterable[Finding]:
        # A run that loses what it is paid is not hacking its reward, whatever its terms do.
        whole = self.history.window(reward_key(self.history), self.window)
        lost = statistics.fall(whole, 3, min(self.smooth, max(3, len(whole) - 3)))
        if lost.share > 0.05 and lost.errors > EACH:
            return
        names = [key for key in self.history.values if key.startswith("reward/") and key not in NO_TERMS]
        terms = {key: self.history.window(key, self.window) for key in names}
        for down, low in terms.items():
            before = min(self.smooth, max(3, len(low) - 3))
            fell = statistics.fall(low, 3, before)
            if fell.share <= self.fall or fell.errors <= EACH:
                continue
            for up, high in terms.items():
                # From the place where the other one turned.
                since = len(high) - (len(low) - 1 - fell.place)
                if up == down or since < 3 or len(high) != len(low):
                    continue
                rose = statistics.step_between(high, 3, min(since, len(high) - 3))
                if rose.now - rose.before <= self.rise * max(map(abs, high)) or rose.errors <= EACH:
                    continue
                # One series of both, whose noise holds what they have in common: terms may hang together.
                units = statistics.noise(high) or 1.0, statistics.noise(low) or 1.0
                both = statistics.rise([h / units[0] - w / units[1] for h, w in zip(high, low, strict=True)], 3, before)
                if both.errors > bound(RUN_LENGTH_CRITICAL, max(1, len(low) - before - 2), KNOWN):
                    yield self.finding(
                        "reward_terms_diverge",
                        "critical",
                        f"{up} rises while {down} falls, by {rose.errors:.1f} and {fell.errors:.1f} standard errors",
                        (up, self.window, rose.now, rose.before + self.rise * max(map(abs, high)), rose.before),
                        (down, self.window, fell.now, fell.before - self.fall * fell.scale, fell.before),
                        onset=self.history.steps[down][-len(low) :][fell.place],
                    )
                    return

    def _held_out(self, metrics: Mapping[str, float]) -> Iterable[Finding]:
        held, errors = self.history.values[HELD], self.history.values[HELD_ERROR]
        if len(held) < 2:
            return
        fell = statistics.fall_of_measured(held, errors)
        # Two tests, each over all earlier evaluations.
        looks = 2 * (len(held) - 1)
        paired = self._paired_fall(held, metrics, looks)
        if paired is not None or fell.errors > bound(RUN_LENGTH_CRITICAL, looks, KNOWN):
            fell = paired or fell
            # What is lost in training as well is a collapse, and others speak of it.
            if not self.history.fallen(reward_key(self.history)):
                yield self.finding(
                    "held_out_falls",
                    "critical" if fell.share > self.held_out_lost else "warning",
                    f"the held-out reward has fallen, by {fell.errors:.1f} standard errors, the training one not",
                    (HELD, len(held), fell.now, fell.before - self.held_out_lost * fell.scale, fell.before),
                    onset=self.history.steps[HELD][fell.place],
                )
            return
        third = len(held) // 3
        if third < 2:
            return
        gain, error = _gain(held, errors, third)
        # The noise of now, which is known better than that of the first rollouts.
        error_each = statistics.noise(self.history.values[reward_key(self.history)]) / math.sqrt(2 * self.smooth)
        trained, trained_error = _gain(self.history.values[TRAINED], [error_each] * len(held), third)
        sure = trained > bound(RUN_LENGTH, len(held)) * trained_error > 0
        if sure and gain + HELD_OUT_SURE * error < self.held_out_gain * trained:
            yield self.finding(
                "held_out_flat",
                "warning",
                f"the training reward has gained {trained:.2g}, and the held-out reward {gain:.2g}",
                ("reward gained", len(held), trained, trained_error),
                ("val/reward gained", len(held), gain, self.held_out_gain * trained),
                onset=self.history.steps[HELD][third - 1],
            )

    def _paired_fall(self, held: list[float], metrics: Mapping[str, float], looks: int) -> statistics.Change | None:
        """Return the change since the best evaluation on the same questions, if chance does not explain the fall."""
        # The best evaluation may be from before a jump, and was then judged otherwise.
        if self.history.jump is not None:
            return None
        sets = [key for key in metrics if key.startswith("val/") and key.endswith("/reward/change")]
        for key in sets:
            change, error = metrics[key], metrics.get(f"{key}/se", math.nan)
            prompts = metrics.get(f"{key.removesuffix('reward/change')}prompts", math.nan)
            # All changes alike have no error, which a few questions may well be by chance.
            if not (error > 0 and prompts > 10):
                continue
            if -change / error > bound(RUN_LENGTH_CRITICAL, looks * len(sets), round(prompts) - 1):
                best = max(range(len(held)), key=held.__getitem__)
                return statistics.Change(held[-1] - change, held[-1], -change / error, best)
        return None

    def _format(self, step: int) -> Iterable[Finding]:
        values = self.history.values.get(self.format_key)
        if not values:
            return
        fell = statistics.fall(values, self.smooth, self.smooth)
        sure = fell.errors > self.history.bound(self.format_key, len(values), RUN_LENGTH)
        least = fell.before - (1 - self.format_share) * fell.scale
        if fell.now < least and sure:
            yield self.finding(
                "format_lost",
                "warning",
                f"{self.format_key} fell to {fell.now:.2g} from {fell.before:.2g}: an early sign of collapse",
                (self.format_key, self.smooth, fell.now, least, fell.before),
                onset=self.history.began(self.format_key, lambda value: value < fell.before, step),
            )


def _gain(values: Sequence[float], errors: Sequence[float], size: int) -> tuple[float, float]:
    """Return the mean of the last ``size`` values less that of the first, and its standard error."""
    gain = math.fsum(values[-size:]) / size - math.fsum(values[:size]) / size
    return gain, math.hypot(*errors[:size], *errors[-size:]) / size
