"""What a run is changed to before it goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_grpo.callbacks.diagnosis.diagnosis import DiagnosisName
from lit_grpo.errors import UserError


@dataclass(frozen=True)
class Remedy:
    """A change of the run.

    Attributes:
        lr_scale: the learning rate of every optimizer, and what its schedule makes of it, is multiplied by this.
        objective: overrides of the objective (``{clip_high: 0.28}``, ``{entropy_filter: true, entropy_gamma: 0.1}``),
            or with ``recipe`` another one, without the overrides of the old.
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
        """For checkpoints and the journal."""
        return asdict(self)

    def apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the run, between two rollouts, on all ranks."""
        scale_learning_rate(trainer, self.lr_scale)
        self.change_objective(pl_module)

    def change_objective(self, pl_module: LightningModule) -> None:
        """The part of it that optimizers and schedules do not remember in a checkpoint."""
        if self.objective:
            # Any module may have it; Lightning declares only what every module has.
            pl_module.change_objective(dict(self.objective))  # type: ignore[operator]


GRPO = {"recipe": "grpo"}

REMEDIES: dict[str, Remedy] = {
    "C_PL": Remedy(0.5, GRPO),  # needs negatives
    "C_NL": Remedy(0.5, GRPO),  # needs positives and a clip
    "TN_PL": Remedy(0.5, GRPO),
    "TN_NL": Remedy(0.5, GRPO),
    "advantage_inverted": Remedy(0.5, GRPO),  # pays for the reward alone
    "entropy_collapse": Remedy(0.5, GRPO),  # neither pays for certainty nor punishes exploration
    "learning_rate_too_high": Remedy(0.1),
    "non_finite": Remedy(0.5),
}
"""What helps by default, by name of the diagnosis; every other diagnosis halves the learning rate."""

NOT_CURED_BY_GOING_BACK: frozenset[DiagnosisName] = frozenset(
    {
        "stale_or_mismatched_sampler",
        "plumbing_mask",
        "plumbing_groups",
        "plumbing_ratio",
        "verifier_failure",
        "reward_noise",
        "no_signal",
        "slow_down",
    }
)
"""Faults that would still be there: a rollback chosen by severity is a stop for these."""


def scale_learning_rate(trainer: Trainer, factor: float) -> None:
    """Multiply the learning rate and the schedule's base, else the schedule undoes it at the next step."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor
            if "initial_lr" in group:
                group["initial_lr"] *= factor
    for config in trainer.lr_scheduler_configs:
        scheduler: Any = config.scheduler
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
            scheduler._last_lr = [lr * factor for lr in scheduler._last_lr]
