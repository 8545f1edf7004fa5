"""Is every optimizer step of a size that the steps before it make believable?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.monitors.monitor import Monitor, positive

REMEDIES = (
    "halve the learning rate",
    "clip gradients (max_grad_norm)",
    "return to the last checkpoint before the spike",
)


class GradientNormMonitor(Monitor):
    """Global gradient norm before clipping against its running median m, and the step against the weights it moves.

    Findings: ``non_finite`` (loss, gradient or entropy is NaN or infinite: such steps are always skipped; critical when
    it lasts, or when what the policy says is no number, for then the weights are lost), ``gradient_spikes`` (more than
    ``spikes`` m in ``patience`` rollouts in a row, or more than ``skip`` m once; only a warning while the reward rises
    beyond doubt, since a policy that takes off from nothing has steep gradients too), ``gradient_vanished`` (below
    ``vanished`` m for ``vanished_patience`` rollouts though groups have a gradient), ``updates_too_large`` (an
    optimizer step moves the weights by more than ``update`` of their norm).

    Before the optimizer steps, a norm above ``skip`` m is vetoed (see
    :class:`lit_grpo.learner.optimizer_step.OptimizerStepper`): weights, optimizer and schedule stay as they are.

    Args:
        window: rollouts of the median.
        warmup: norms that must be known before one is called a spike. Ours.
        spikes: multiple of m.
        patience: rollouts.
        skip: multiple of m; the step is left out.
        skip_spikes: whether it really is.
        vanished: multiple of m. Ours.
        vanished_patience: rollouts. Ours.
        update: share of the weights' norm. Ours: healthy fine-tuning moves them by 1e-5 to 1e-3 a step, and small
            models that are trained from nothing by up to 0.03.
        lasts: non-finite rollouts in a row that are critical. Ours.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "grad_norm",
        "critic/grad_norm",
        "update_size",
        "groups/zero_gradient",
        "reward",
    )
    also_saved: ClassVar[tuple[str, ...]] = ("_bad", "_skipped", "_norms")

    def __init__(
        self,
        window: int = 50,
        warmup: int = 10,
        spikes: float = 5.0,
        patience: int = 3,
        skip: float = 10.0,
        skip_spikes: bool = True,
        vanished: float = 1e-3,
        vanished_patience: int = 10,
        update: float = 0.1,
        lasts: int = 3,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("GradientNormMonitor", window=window, spikes=spikes, patience=patience, skip=skip, update=update)
        self.window, self.warmup, self.spikes, self.patience = window, warmup, spikes, patience
        self.skip, self.skip_spikes = skip, skip_spikes
        self.vanished, self.vanished_patience = vanished, vanished_patience
        self.update, self.lasts = update, lasts
        self._bad = 0
        """Rollouts in a row with a number that is none."""
        self._skipped = 0.0
        self._norms: dict[str, list[float]] = {}
        """Norms of single optimizer steps, for the veto."""

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._non_finite(step, metrics)
        for key in ("grad_norm", "critic/grad_norm"):
            yield from self._spikes(key, step)
        yield from self._vanished(step)
        size = self.history.now("update_size", step)
        if size is not None and size > self.update:
            yield self.finding(
                "updates_too_large",
                "critical"
                if self.history.holds("update_size", self.patience, lambda v: v > self.update)
                else "warning",
                f"an optimizer step moves the weights by {size:.1%} of their norm",
                ("update_size", 1, size, self.update),
                onset=self.history.began("update_size", lambda value: value > self.update, step),
                remedies=("lower the learning rate tenfold", "lengthen the warm-up"),
            )

    def _non_finite(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        watched = ("loss", "grad_norm", "critic/grad_norm", "entropy", "reward")
        bad = [key for key in watched if not math.isfinite(metrics.get(key, 0.0))]
        self._bad = self._bad + 1 if bad else 0
        if bad:
            lost = "entropy" in bad or self._bad >= self.lasts
            yield self.finding(
                "non_finite",
                "critical" if lost else "warning",
                f"{', '.join(bad)} not finite" + (f" for {self._bad} rollouts" if self._bad > 1 else ""),
                *((key, 1, metrics[key], math.inf) for key in bad),
                onset=step - self._bad + 1,
                remedies=(
                    "nothing, if it happens once: the step was left out",
                    "return to the last checkpoint and halve the learning rate",
                    "look for an overflow: log-probabilities of -inf, float16, rewards that are not finite",
                ),
            )

    def _spikes(self, key: str, step: int) -> Iterable[Finding]:
        now = self.history.now(key, step)
        usual = self.history.median(key, self.window, back=1)
        if now is None or not usual or self.history.count(key) <= self.warmup:
            return
        many = self.history.holds(key, self.patience, lambda value: value > self.spikes * usual)
        if now > self.skip * usual or many:
            yield self.finding(
                "gradient_spikes",
                "critical" if many and not self.history.rises("reward") else "warning",
                f"{key} is {now / usual:.1f} times its median"
                + (f", for {self.patience} rollouts" if many else "; the step was left out" * self.skip_spikes),
                (f"{key} / median", self.window, now / usual, self.spikes if many else self.skip),
                onset=self.history.began(key, lambda value: value > self.spikes * usual, step),
                remedies=REMEDIES,
            )

    def _vanished(self, step: int) -> Iterable[Finding]:
        usual = self.history.median("grad_norm", self.window, back=self.vanished_patience)
        flat = self.history.mean("groups/zero_gradient", self.vanished_patience)
        if not usual or (flat is not None and flat > 0.9):
            return
        bound = self.vanished * usual
        if self.history.holds("grad_norm", self.vanished_patience, lambda value: value < bound):
            now = self.history.mean("grad_norm", self.vanished_patience) or 0.0
            yield self.finding(
                "gradient_vanished",
                "warning",
                f"the gradient has vanished: its norm is {now:.2g}, usually {usual:.2g}",
                ("grad_norm", self.vanished_patience, now, bound, usual),
                onset=self.history.began("grad_norm", lambda value: value < bound, step),
                remedies=("check that rewards differ within groups", "check that the policy's weights need gradients"),
            )

    def veto_update(self, trainer: Any, module: Any, metrics: dict[str, float]) -> str | None:
        """Why the optimizer step that is about to be taken should be left out, or None."""
        reasons = []
        for key in ("grad_norm", "critic/grad_norm"):
            norm, known = metrics.get(key), self._norms.setdefault(key, [])
            if norm is None or not math.isfinite(norm):
                continue
            usual = sorted(known)[len(known) // 2] if len(known) >= self.warmup else None
            known.append(norm)
            del known[: -self.window]
            if self.skip_spikes and usual and norm > self.skip * usual:
                reasons.append(f"{key} {norm:.3g} is more than {self.skip:g} times its median {usual:.3g}")
        return "; ".join(reasons) or None
