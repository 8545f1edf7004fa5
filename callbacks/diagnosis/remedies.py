"""How a run is changed before it goes on after an alarm."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_grpo.errors import UserError


@dataclass(frozen=True)
class Remedy:
    """A change of the run that is made before it goes on.

    Attributes:
        lr_scale: the learning rate of every optimizer, and what its schedule makes of it, is multiplied by this.
        objective: overrides of the objective (``{clip_high: 0.28}``, ``{entropy_filter: all, entropy_gamma: 0.1}``).
            With ``recipe`` it is another objective, without the overrides of the old one.
    """

    lr_scale: float = 0.5
    objective: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.lr_scale <= 1:
            raise UserError(f"lr_scale is {self.lr_scale}, must be above 0 and at most 1", where="Remedy.lr_scale")
        if self.lr_scale == 1 and not self.objective:
            raise UserError(
                "a remedy that changes nothing leads to the same end again",
                where="Remedy",
                remedy="set lr_scale below 1, or change the objective",
            )

    def plain(self) -> dict[str, Any]:
        """Return the remedy as plain types, for checkpoints and the journal."""
        return asdict(self)

    def apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change learning rates and objective. It is to be called between two rollouts, on all ranks."""
        scale_learning_rate(trainer, self.lr_scale)
        self.change_objective(pl_module)

    def change_objective(self, pl_module: LightningModule) -> None:
        """Change the objective alone, if the remedy names a change of it."""
        if self.objective:
            # A module may have change_objective; Lightning declares only what every module has.
            pl_module.change_objective(dict(self.objective))  # type: ignore[operator]


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
