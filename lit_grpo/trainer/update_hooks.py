"""The part that callbacks take in an optimizer step: they may veto it, limit its gradient, or mend lost weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class UpdateHooks:
    """Asks the callbacks of a Trainer about optimizer steps, by methods that Lightning does not know.

    A callback without such a method has no opinion. Each answer must be the same on every rank. What the answers do is
    described at :class:`lit_grpo.learner.optimizer_step.OptimizerStepper`.
    """

    trainer: Trainer
    """Trainer of the run, whose callbacks are asked."""
    module: LightningModule
    """The module that learns, which is only handed on to the callbacks."""

    def veto(self, metrics: dict[str, float]) -> str | None:
        """Return why a callback wants a step to be left out; None if none does.

        Callbacks answer by a method ``veto_update(trainer, module, metrics) -> str | None``.
        """
        # All are asked, also after a first veto: a monitor that keeps a history must see every step.
        reasons = [
            callback.veto_update(self.trainer, self.module, metrics) for callback in self._callbacks_with("veto_update")
        ]
        return next((reason for reason in reasons if reason), None)

    def limits(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the gradient norms that callbacks want a step to be clipped to, by the key of the norm.

        Callbacks answer by a method ``limit_update(trainer, module, metrics) -> dict[str, float] | None``. Of several
        limits the smallest holds.
        """
        limits: dict[str, float] = {}
        for callback in self._callbacks_with("limit_update"):
            for key, limit in (callback.limit_update(self.trainer, self.module, metrics) or {}).items():
                limits[key] = min(limit, limits.get(key, limit))
        return limits

    def mends_lost_weights(self) -> bool:
        """Tell whether a callback will go back to a checkpoint when the weights are no longer finite.

        Callbacks answer by a method ``mends_lost_weights(trainer) -> bool``.
        """
        return any(callback.mends_lost_weights(self.trainer) for callback in self._callbacks_with("mends_lost_weights"))

    def _callbacks_with(self, method: str) -> list[Any]:
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if hasattr(callback, method)]
