"""How a run is changed before it goes on after an alarm."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer

from lit_grpo.errors import UserError

SAFEGUARDS = ("exploration", "both_signs", "pay_for_reward", "no_entropy_bonus")
"""Values of :attr:`Remedy.adds`."""
LOWER = 0.5
"""Scale of the learning rate where the objective cannot be changed."""


@runtime_checkable
class AdjustableModule(Protocol):
    """Module whose objective can be changed in mid-run; :class:`lit_grpo.LitGRPO` is one."""

    def changes_that_add(self, safeguard: str) -> dict[str, Any]:
        """Return the changes of the present objective that add a safeguard and keep everything else."""
        ...

    def can_change_objective(self, changes: dict[str, Any]) -> UserError | None:
        """Return the error that :meth:`change_objective` would end with; None without one."""
        ...

    def change_objective(self, changes: dict[str, Any]) -> None:
        """Go on with another objective, between two rollouts and on all ranks."""
        ...


@dataclass(frozen=True)
class Remedy:
    """A change of the run that is made before it goes on.

    Attributes:
        lr_scale: the learning rate of every optimizer, and what its schedule makes of it, is multiplied by this.
        objective: overrides of the objective (``{clip_high: 0.28}``, ``{entropy_filter: all, entropy_gamma: 0.1}``).
            With ``recipe`` it is another objective, without the overrides of the old one.
        adds: safeguard that the objective gets if it lacks it, while everything else of it is kept: ``exploration``,
            ``both_signs``, ``pay_for_reward`` or ``no_entropy_bonus``, see
            :data:`lit_grpo.objectives.safeguards.Safeguard`.
    """

    lr_scale: float = 0.5
    objective: dict[str, Any] = field(default_factory=dict)
    adds: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.lr_scale <= 1:
            raise UserError(f"lr_scale is {self.lr_scale}, must be above 0 and at most 1", where="Remedy.lr_scale")
        if self.adds not in ("", *SAFEGUARDS):
            raise UserError(
                f"{self.adds!r} is no safeguard", where="Remedy.adds", remedy=f"choose one of {', '.join(SAFEGUARDS)}"
            )
        if self.lr_scale == 1 and not self.objective and not self.adds:
            raise UserError(
                "a remedy that changes nothing leads to the same end again",
                where="Remedy",
                remedy="set lr_scale below 1, or change the objective",
            )

    def plain(self) -> dict[str, Any]:
        """Return the remedy as plain types, for checkpoints and the journal."""
        return {key: value for key, value in asdict(self).items() if key != "adds" or value}

    def fitted(self, pl_module: LightningModule) -> tuple[Remedy, str]:
        """Return what the remedy is for a module as it is now, and why that is no change of its objective, or "".

        A module whose objective cannot be changed, or not in this way, gets a lower learning rate instead: a remedy
        must not end the run that it is to save.
        """
        lower = Remedy(min(self.lr_scale, LOWER))
        if not isinstance(pl_module, AdjustableModule):
            return lower if self.objective or self.adds else self, ""
        changes = (pl_module.changes_that_add(self.adds) if self.adds else {}) | self.objective
        if not changes:
            return lower if self.lr_scale == 1 else Remedy(self.lr_scale), ""
        error = pl_module.can_change_objective(dict(changes))
        return (Remedy(self.lr_scale, changes), "") if error is None else (lower, error.what)

    def apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change learning rates and objective. It is to be called between two rollouts, on all ranks.

        Raises:
            UserError: the run does not fit the changed objective; :meth:`fitted` gives a remedy that it does fit.
        """
        if self.objective:
            # A module may have change_objective; Lightning declares only what every module has.
            pl_module.change_objective(dict(self.objective))  # type: ignore[operator]
        scale_learning_rate(trainer, self.lr_scale)


def scale_learning_rate(trainer: Trainer, factor: float) -> None:
    """Multiply every learning rate, now and in what its schedule makes of it."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor
            # A schedule computes from its base: with the old one it would undo the change at its next step.
            if "initial_lr" in group:
                group["initial_lr"] *= factor
    for config in trainer.lr_scheduler_configs:
        scheduler: Any = config.scheduler
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
            scheduler._last_lr = [lr * factor for lr in scheduler._last_lr]
