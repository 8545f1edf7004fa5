"""Return to an earlier point of the same fit: the checkpoints to return to, and the state of Lightning's loops."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_grpo.callbacks.monitors.monitor import trained_rollouts
from lit_grpo.callbacks.rollout_checkpoint import RolloutCheckpoint
from lit_grpo.run.folder import run_folder

log = logging.getLogger(__name__)

FOLDER = "rollback"
"""Subfolder of the run's folder with the checkpoints to return to."""


class CheckpointRing:
    """The newest checkpoints of a run and its first, to return to. They are whole Lightning checkpoints.

    Args:
        every: rollouts between two checkpoints.
        keep: number of checkpoints to keep besides the first.
    """

    def __init__(self, every: int, keep: int) -> None:
        self.every, self.keep = every, keep
        self.saved: list[int] = []
        """Rollouts trained on in each checkpoint, oldest first."""
        self.folder = Path(FOLDER)

    def open(self, trainer: Trainer) -> None:
        """Find the folder, and forget checkpoints that are no longer there. All ranks must call it."""
        self.folder = run_folder(trainer) / FOLDER
        self.saved = trainer.strategy.broadcast([step for step in self.saved if self.path(step).exists()])

    def path(self, step: int) -> Path:
        """Path of the checkpoint after ``step`` rollouts."""
        return self.folder / f"rollout-{step:06d}.ckpt"

    def save(self, trainer: Trainer, step: int) -> None:
        """Save the run as it is after ``step`` rollouts, and remove what the ring has no room for.

        All ranks must call it.
        """
        self.saved = [*(s for s in self.saved if s != step), step]
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(self.path(step), weights_only=False)
        self._drop(trainer, [] if len(self.saved) <= self.keep + 1 else self.saved[1 : -self.keep])

    def before(self, step: int) -> int | None:
        """Find the newest checkpoint of fewer than ``step`` rollouts; None if there is none."""
        return max((saved for saved in self.saved if saved < step), default=None)

    def drop_after(self, trainer: Trainer, step: int) -> None:
        """Remove the checkpoints of more than ``step`` rollouts, which a rollback has made void."""
        self._drop(trainer, [saved for saved in self.saved if saved > step])

    def clear(self, trainer: Trainer) -> None:
        """Remove all checkpoints, at the end of the run."""
        self._drop(trainer, list(self.saved))
        if trainer.is_global_zero and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _drop(self, trainer: Trainer, steps: list[int]) -> None:
        self.saved = [step for step in self.saved if step not in steps]
        if trainer.is_global_zero:
            for step in steps:
                path = self.path(step)
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class AfterAll(Callback):
    """Callback that runs a function after every other callback of a batch, checkpoints included."""

    def __init__(self, function: Callable[[Trainer, LightningModule], None]) -> None:
        self.function = function
        self._true_step: int | None = None

    def attach(self, trainer: Trainer) -> None:
        """Become the trainer's last callback."""
        # Lightning moves checkpoints behind the callbacks it is given, so only one that is added later is really last.
        # It must be: then all others see the same rollout, and none sees half of a rollback.
        # Every Trainer has callbacks, but Lightning does not declare them.
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self not in callbacks:
            callbacks.append(self)

    def detach(self, trainer: Trainer) -> None:
        # Every Trainer has callbacks, but Lightning does not declare them.
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.function(trainer, pl_module)

    def at_next_batch(self, logged_steps: int) -> None:
        """Set the step under which metrics are logged, as soon as the next batch begins.

        Args:
            logged_steps: step to log under from then on.
        """
        # Not at once: Lightning has yet to log the batch that is ending.
        self._true_step = logged_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._true_step is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._true_step
            self._true_step = None


def can_return(trainer: Trainer) -> bool:
    """Tell whether the train loader can be set back, for which it needs ``state_dict`` and ``load_state_dict``."""
    loader = trainer.fit_loop._combined_loader
    return loader is not None and bool(loader._state_dicts())


def restore(trainer: Trainer, pl_module: LightningModule, path: Path, after_all: AfterAll) -> dict[str, Any]:
    """Make the running fit what it was when the checkpoint was saved, as a run resumed from it would be.

    Restored are weights, optimizers, schedules, the module's and the data module's own state, loop progress, position
    of the train loader (what it sampled ahead is dropped), the random state, and the state of all callbacks but
    checkpoints and those with the attribute ``survives_rollback``. It is to be called at the end of a batch, on all
    ranks.

    Returns:
        The checkpoint.
    """
    module: Any = pl_module
    checkpoint: dict[str, Any] = trainer.strategy.load_checkpoint(path, weights_only=True)
    # Lightning's own steps of resuming a run, which read the checkpoint from the connector.
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    try:
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
    finally:
        connector._loaded_checkpoint = {}
    # What is accumulated belongs to weights that are gone.
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()
    _restore_callbacks(trainer, pl_module, checkpoint)
    _restore_loops(trainer, checkpoint["loops"]["fit_loop"], after_all)
    # A module sets it when a fit starts, which is not to come.
    if hasattr(module, "restore_random_state"):
        module.restore_random_state()
    return checkpoint


def _restore_callbacks(trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
    states = checkpoint.get("callbacks", {})
    # Every Trainer has them, but Lightning does not declare them.
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, Checkpoint) or getattr(callback, "survives_rollback", False):
            continue
        callback.on_load_checkpoint(trainer, pl_module, checkpoint)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])


def _restore_loops(trainer: Trainer, saved: dict[str, Any], after_all: AfterAll) -> None:
    """Set the progress of Lightning's loops and loader to that of a checkpoint."""
    # As it is at the end of a batch: Lightning itself counts the batch under way as completed when the hook returns.
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    loader = trainer.fit_loop._combined_loader
    assert fetcher is not None
    assert loader is not None
    batches = epoch_loop.batch_progress
    batches.load_state_dict(saved["epoch_loop.batch_progress"])
    # True of a checkpoint that was saved in a hook of its last batch, which Lightning had not counted as completed yet.
    current: Any = batches.current
    inside = current.completed < current.processed
    counts: Any
    for counts in (batches.current, batches.total):
        counts.completed = counts.processed - 1
    batches.is_last_batch = False
    epoch_loop.scheduler_progress.load_state_dict(saved["epoch_loop.scheduler_progress"])
    epoch_loop.manual_optimization.optim_step_progress.load_state_dict(
        saved["epoch_loop.manual_optimization.optim_step_progress"]
    )
    epoch_loop.automatic_optimization.optim_progress.load_state_dict(
        saved["epoch_loop.automatic_optimization.optim_progress"]
    )
    epoch_loop.val_loop.batch_progress.load_state_dict(saved["epoch_loop.val_loop.batch_progress"])
    after_all.at_next_batch(saved["epoch_loop.state_dict"]["_batches_that_stepped"] + inside)
    loader._load_state_dicts(saved["state_dict"]["combined_loader"])
    # As for a run that is resumed: a new iterator starts from the restored position.
    iter(fetcher)
    fetcher.fetched += batches.current.ready
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length


def give_up_later_checkpoints(trainer: Trainer) -> None:
    """Let the run's own checkpoints follow a rollback: remove later ones, and save the run as it is now."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RolloutCheckpoint):
            callback.go_back(trainer, trained_rollouts(trainer))
