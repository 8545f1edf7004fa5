"""Stopping a run on purpose: one call ends it, and every other part of the program can ask why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_grpo.run.folder import run_logger

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

KEYBOARD = "keyboard"
"""Value of ``StopReason.monitor`` where a person stopped the run."""

_ATTRIBUTE = "_lit_grpo_stop_reason"


@dataclass(frozen=True)
class StopReason:
    """Reason why a run was stopped on purpose.

    Attributes:
        reason: the reason in one sentence.
        monitor: name of the callback that decided.
        step: number of rollouts trained on by then.
    """

    reason: str
    monitor: str
    step: int


def request_stop(trainer: Trainer, reason: str, monitor: str) -> None:
    """End the run after this rollout; of several reasons the first one holds.

    The run is saved and ends as ``KILLED`` in MLflow, with the tags ``stop.reason``, ``stop.callback`` and
    ``stop.step``; the command line returns exit code 3. Every rank must call it in the same hook of the same rollout.

    Args:
        trainer: the trainer of the run.
        reason: the reason in one sentence.
        monitor: name of the callback that decides.
    """
    if stop_reason(trainer) is None:
        step = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        # On the trainer, which callbacks, loggers and the command line all reach.
        setattr(trainer, _ATTRIBUTE, StopReason(reason, monitor, step))
        logger = run_logger(trainer)
        if logger is not None:
            logger.mark_stopped(reason)
            logger.set_tags({"stop.callback": monitor, "stop.step": step})
    trainer.should_stop = True


def stop_reason(trainer: Trainer) -> StopReason | None:
    """Return why the run was stopped on purpose; None if it was not."""
    return getattr(trainer, _ATTRIBUTE, None)
