"""New settings of a run that is resumed: what a checkpoint restores over them is set again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

OPTIMIZERS = ("model.optimizer.", "model.critic.optimizer.")


def take_new_settings(trainer: Trainer, pl_module: LightningModule, changed: Sequence[str]) -> None:
    """Let optimizers and schedules go on with the settings that they were made with, not those of the checkpoint.

    Moments, numbers of steps and the position in the schedule stay those of the checkpoint.

    Args:
        trainer: the trainer, which has restored the checkpoint.
        pl_module: its module, whose ``configure_optimizers`` makes optimizers of the new settings.
        changed: keys of all settings that have changed and are accepted.
    """
    if not any(key.startswith(OPTIMIZERS) for key in changed):
        return
    # Made once more, because the checkpoint has been loaded over those of the trainer; they have no states yet.
    made: Any = pl_module.configure_optimizers()
    fresh = list(made) if isinstance(made, list | tuple) else [made]
    for entry, optimizer, live in zip(fresh, trainer.optimizers, trainer.lr_scheduler_configs, strict=True):
        new = entry["optimizer"]
        for group, of_new in zip(optimizer.param_groups, new.param_groups, strict=True):
            for name, value in of_new.items():
                if name != "params":
                    _set(group, name, value)
        scheduler: Any = live.scheduler
        new_scheduler: Any = entry["lr_scheduler"]["scheduler"]
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = list(new_scheduler.base_lrs)
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                _set(group, "lr", rate)
            scheduler._last_lr = rates
    rates = [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups[:1]]
    rank_zero_info(
        f"the run goes on with new settings of its optimizer; the learning rate is "
        f"{', '.join(f'{rate:g}' for rate in rates)} from now on"
    )


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    # Some optimizers keep the rate in a tensor, which compiled steps have in their hands.
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(float(value))
    else:
        group[name] = value
