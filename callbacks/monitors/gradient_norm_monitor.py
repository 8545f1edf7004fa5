"""Watches whether each optimizer step has the size that the steps before it lead to expect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import takewhile
from statistics import median
from typing import Any, ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import LEARNING_RATE_TOO_HIGH, DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import positive
from lit_grpo.callbacks.monitors.threshold import Rule, ThresholdMonitor

LOST_WEIGHTS = "sanity/nonfinite_weights"
"""Tensors of weights that an optimizer step has left with values that are not finite; logged where there are some."""
LEAST_SIGNAL = 0.01
"""Share of groups with an advantage that a norm is divided by at least: what is left then has other sources."""
REMEDIES_SPIKES = (
    "halve the learning rate",
    "clip gradients (max_grad_norm)",
    "return to the last checkpoint before the spike",
)


class GradientNormMonitor(ThresholdMonitor):
    """Monitor of the gradient norm before clipping against its running median m, and of steps against the weights.

    Findings: ``non_finite`` (loss, gradient or entropy is NaN or infinite: such steps are always skipped; critical when
    it lasts, or when what the policy says is no number, for then the weights are lost), ``gradient_spikes`` (more than
    ``spikes`` m in ``patience`` rollouts in a row, or more than ``clip`` m once, and as much more when each norm is
    divided by the share of groups that have an advantage: where a policy takes off from nothing these grow from few to
    all, and the norm with them; only a warning while the reward rises beyond doubt), ``gradient_vanished`` (below
    ``vanished`` m for ``vanished_patience`` rollouts though groups have a gradient), ``updates_too_large`` (an
    optimizer step moves the weights by more than ``update`` of their norm).

    Before the optimizer steps, a norm above ``clip`` m is answered by clipping that step to m (see
    :class:`lit_grpo.learner.optimizer_step.OptimizerStepper`), so the policy moves on and its next gradient is another.
    After ``new_normal`` such norms in a row the norm is the new normal, and m is made of what comes from then on.

    Args:
        window: rollouts that the median is taken over.
        warmup: norms that must be known before one is called a spike.
        spikes: multiple of m above which a norm is a spike.
        patience: spikes in a row that make a finding.
        clip: multiple of m above which a step is clipped to m.
        clip_spikes: whether such steps are really clipped.
        new_normal: norms above ``clip`` m in a row, of single optimizer steps, after which m is forgotten.
        vanished: multiple of m below which the gradient has vanished.
        vanished_patience: rollouts in a row for which it must have vanished.
        update: share of the weights' norm that a step may move them by. Healthy fine-tuning moves them by 1e-5 to 1e-3
            a step, and small models that are trained from nothing by up to 0.03.
        lasts: non-finite rollouts in a row that are critical.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "optim/grad_norm",
        "critic/grad_norm",
        "optim/update_to_weight_ratio",
        "groups/zero_advantage_frac",
        "reward",
        LOST_WEIGHTS,
    )
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "non_finite",
            DiagnosisKind(
                "non_finite", "NaN or infinity", "a step that overflowed, or weights that are no longer finite"
            ),
            rank=100,
            remedies=(
                "nothing, if it happens once: the step was left out",
                "return to the last checkpoint and halve the learning rate",
                "look for an overflow: log-probabilities of -inf, float16, rewards that are not finite",
            ),
        ),
        FindingKind(
            "updates_too_large",
            LEARNING_RATE_TOO_HIGH,
            rank=500,
            remedies=("lower the learning rate tenfold", "lengthen the warm-up"),
        ),
        FindingKind(
            "gradient_spikes",
            LEARNING_RATE_TOO_HIGH,
            587,
            REMEDIES_SPIKES,
            title="a gradient far larger than usual",
            likely_cause="prompts or completions unlike those before; if it lasts, a learning rate that is too high",
        ),
        FindingKind(
            "gradient_vanished",
            DiagnosisKind(
                "gradient_vanished",
                "the gradient has vanished",
                "rewards that hardly differ, weights that take no gradient, or a loss that is clipped away",
                outlives_rollback=True,
            ),
            rank=670,
            remedies=("check that rewards differ within groups", "check that the policy's weights need gradients"),
        ),
    )
    also_saved: ClassVar[tuple[str, ...]] = ("_bad", "_norms", "_spiking")

    def __init__(
        self,
        window: int = 50,
        warmup: int = 10,
        spikes: float = 5.0,
        patience: int = 3,
        clip: float = 10.0,
        clip_spikes: bool = True,
        new_normal: int = 3,
        vanished: float = 1e-3,
        vanished_patience: int = 10,
        update: float = 0.1,
        lasts: int = 3,
        actions: dict[str, str] | None = None,
    ) -> None:
        positive("GradientNormMonitor", window=window, spikes=spikes, patience=patience, clip=clip, update=update)
        positive("GradientNormMonitor", new_normal=new_normal)
        rule = Rule(
            "optim/grad_norm",
            below=vanished,
            of="usual",
            reference_rollouts=window,
            for_rollouts=vanished_patience,
            name="gradient_vanished",
            text="the gradient has vanished: its norm is {value:.2g}, usually {reference:.2g}",
            statistic="mean",
        )
        super().__init__([rule], actions)
        self.window, self.warmup, self.spikes, self.patience = window, warmup, spikes, patience
        self.clip, self.clip_spikes, self.new_normal = clip, clip_spikes, new_normal
        self.vanished_patience, self.update, self.lasts = vanished_patience, update, lasts
        self._bad = 0
        """Rollouts in a row with a metric that is not finite."""
        self._norms: dict[str, list[float]] = {}
        """Norms of single optimizer steps by metric: a step is answered before they are logged."""
        self._spiking: dict[str, int] = {}
        """Steps in a row whose norm was a spike, by metric."""

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._non_finite(step, metrics)
        for key in ("optim/grad_norm", "critic/grad_norm"):
            yield from self._spikes(key, step)
        flat = self.history.mean("groups/zero_advantage_frac", self.vanished_patience)
        # Without an advantage there is nothing that a gradient could come from.
        if flat is None or flat <= 0.9:
            yield from super().check(step, metrics)
        size = self.history.now("optim/update_to_weight_ratio", step)
        if size is not None and size > self.update:
            yield self.finding(
                "updates_too_large",
                "critical"
                if self.history.holds("optim/update_to_weight_ratio", self.patience, lambda v: v > self.update)
                else "warning",
                f"an optimizer step moves the weights by {size:.1%} of their norm",
                ("optim/update_to_weight_ratio", 1, size, self.update),
                onset=self.history.began("optim/update_to_weight_ratio", lambda value: value > self.update, step),
            )

    def _non_finite(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        watched = ("loss", "optim/grad_norm", "critic/grad_norm", "policy/entropy", "reward")
        bad = [key for key in watched if not math.isfinite(metrics.get(key, 0.0))]
        if metrics.get(LOST_WEIGHTS, 0.0) > 0:
            bad.append(LOST_WEIGHTS)
        self._bad = self._bad + 1 if bad else 0
        if bad:
            # Entropy comes from the forward pass alone: if that is no number, skipping the step does not help.
            lost = "policy/entropy" in bad or LOST_WEIGHTS in bad or self._bad >= self.lasts
            yield self.finding(
                "non_finite",
                "critical" if lost else "warning",
                (f"{', '.join(bad)} not finite" if bad != [LOST_WEIGHTS] else "the weights are not finite")
                + (f" for {self._bad} rollouts" if self._bad > 1 else ""),
                *((key, 1, metrics[key], math.inf) for key in bad),
                onset=step - self._bad + 1,
            )

    def _spikes(self, key: str, step: int) -> Iterable[Finding]:
        if self.history.now(key, step) is None or self.history.count(key) <= self.warmup:
            return
        sizes = self._sizes(key)
        if not sizes:
            return
        now, many = sizes[-1], len(sizes) >= self.patience and min(sizes[-self.patience :]) > self.spikes
        if now > self.clip or many:
            streak = len(list(takewhile(lambda size: size > self.spikes, reversed(sizes))))
            yield self.finding(
                "gradient_spikes",
                "critical" if many and not self.history.rises("reward") else "warning",
                f"{key} is {now:.1f} times its median"
                + (f", for {self.patience} rollouts" if many else "; the step was clipped to it" * self.clip_spikes),
                (f"{key} / median", self.window, now, self.spikes if many else self.clip),
                onset=self.history.steps[key][-max(1, streak)],
            )

    def _sizes(self, key: str) -> list[float]:
        """Return the last norms as multiples of their median, or of that of norms a group where this is smaller."""
        history, flat = self.history, "groups/zero_advantage_frac"
        norms, steps = history.values[key][-self.window - 1 :], history.steps[key][-self.window - 1 :]
        usual = median(norms[:-1])
        if not usual:
            return []
        # A critic learns from every group.
        zero: dict[int, float] = {}
        if key != "critic/grad_norm":
            zero = dict(zip(history.steps[flat], history.values[flat], strict=True))
        a_group = [norm / max(1 - zero.get(step, 0.0), LEAST_SIGNAL) for step, norm in zip(steps, norms, strict=True)]
        usual_a_group = median(a_group[:-1])
        return [min(norm / usual, one / usual_a_group) for norm, one in zip(norms, a_group, strict=True)]

    def limit_update(self, trainer: Any, module: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Name the norms that the optimizer step that is about to be taken is to be clipped to: usual ones for spikes.

        Args:
            trainer: not used.
            module: not used.
            metrics: loss and gradient norms of the step, the same on every rank.

        Returns:
            The median of the norms before, by the key of each norm that is a spike.
        """
        limits = {}
        for key in ("optim/grad_norm", "critic/grad_norm"):
            norm = metrics.get(key)
            if norm is None or not math.isfinite(norm):
                continue
            known = self._norms.setdefault(key, [])
            usual = sorted(known)[len(known) // 2] if len(known) >= self.warmup else None
            known.append(norm)
            del known[: -self.window]
            spike = bool(usual) and norm > self.clip * usual  # type: ignore[operator]
            row = self._spiking[key] = self._spiking.get(key, 0) + 1 if spike else 0
            if row > self.new_normal:
                # What came before the rise says nothing of the steps that are to come: of it no median is made.
                del known[:-row]
                self._spiking[key] = 0
            elif spike and self.clip_spikes:
                assert usual is not None
                limits[key] = usual
        return limits
