"""Return to an earlier point of the same fit: the checkpoints to return to, and the state of Lightning's loops."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_grpo.callbacks.checkpoint_files import checkpoint_name, remove_half_written, rollout_of
from lit_grpo.callbacks.checkpoint_writer import CheckpointWriter, Save
from lit_grpo.callbacks.monitors.monitor import trained_rollouts
from lit_grpo.callbacks.rollout_checkpoint import RolloutCheckpoint
from lit_grpo.callbacks.rollout_end import RolloutEnd
from lit_grpo.run.checkpoints import ROLLBACK_FOLDER
from lit_grpo.run.folder import run_folder
from lit_grpo.utils.files import remove
from lit_grpo.utils.integrity import DamagedError, check

log = logging.getLogger(__name__)


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
        self.folder = Path(ROLLBACK_FOLDER)

    def open(self, trainer: Trainer) -> None:
        """Find the folder, and remove what a killed run left there. All ranks must call it.

        What is listed and not there stays listed: it was removed for a newer one, which the resumed run is about to
        save again.
        """
        self.folder = run_folder(trainer) / ROLLBACK_FOLDER
        if trainer.is_global_zero:
            remove_half_written(self.folder)
            for path in self._on_disk():
                if rollout_of(path.name) not in self.saved:
                    remove(path)

    def path(self, step: int) -> Path:
        """Path of the checkpoint after ``step`` rollouts."""
        return self.folder / checkpoint_name(step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Save the run as it is after ``step`` rollouts, and remove what the ring has no room for.

        It is written while the training goes on. A disk that refuses is warned of: the run then has one place less to
        return to. All ranks must call it.
        """
        writer = CheckpointWriter.of(trainer)
        writer.make_way(step)
        before = list(self.saved)
        saved = [*(s for s in self.saved if s != step), step]
        surplus = [] if len(saved) <= self.keep + 1 else saved[1 : -self.keep]
        # Noted before saving, since the checkpoint holds this list too.
        self.saved = [one for one in saved if one not in surplus]

        def failed(error: BaseException) -> None:
            self.saved = before
            if isinstance(error, OSError):
                rank_zero_warn(f"Rollout {step} could not be saved to roll back to ({error.strerror or error}).")

        save = Save(path=self.path(step), then=lambda: self.remove(trainer, surplus), failed=failed)
        writer.save(trainer, save, moment=step, behind=True)

    def before(self, trainer: Trainer, step: int) -> int | None:
        """Find the newest checkpoint of fewer than ``step`` rollouts that is whole; None if there is none.

        All ranks must call it.
        """
        CheckpointWriter.finish_of(trainer)
        found = None
        if trainer.is_global_zero:
            for saved in sorted((saved for saved in self.saved if saved < step), reverse=True):
                if self._is_whole(saved):
                    found = saved
                    break
        return trainer.strategy.broadcast(found)

    def _is_whole(self, step: int) -> bool:
        if not self.path(step).exists():
            return False
        try:
            check(self.path(step))
        except DamagedError as error:
            log.warning("%s is left out as a place to return to: %s", self.path(step), error)
            return False
        return True

    def forget_after(self, step: int) -> list[int]:
        """Take the checkpoints of more than ``step`` rollouts off the list, and return them; files stay."""
        void = [saved for saved in self.saved if saved > step]
        self.saved = [saved for saved in self.saved if saved <= step]
        return void

    def clear(self, trainer: Trainer) -> None:
        """Remove all checkpoints, at the end of the run, those of an earlier part of it included."""
        CheckpointWriter.finish_of(trainer)
        self.saved = []
        if trainer.is_global_zero and self.folder.is_dir():
            remove_half_written(self.folder)
            for path in self._on_disk():
                remove(path)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()

    def remove(self, trainer: Trainer, steps: list[int]) -> None:
        """Remove the files of some checkpoints."""
        if trainer.is_global_zero:
            for step in steps:
                remove(self.path(step))

    def _on_disk(self) -> list[Path]:
        return sorted(self.folder.glob("rollout-*.ckpt")) if self.folder.is_dir() else []


def can_return(trainer: Trainer) -> bool:
    """Tell whether the train loader can be set back, for which it needs ``state_dict`` and ``load_state_dict``."""
    loader = trainer.fit_loop._combined_loader
    return loader is not None and any(hasattr(one, "load_state_dict") for one in loader.flattened)


def restore(trainer: Trainer, pl_module: LightningModule, path: Path) -> dict[str, Any]:
    """Make the running fit what it was when the checkpoint was saved, as a run resumed from it would be.

    Restored are weights, optimizers, schedules, the module's and the data module's own state, loop progress, position
    of the train loader (what it sampled ahead is dropped), the random state, and the state of all callbacks but
    checkpoints and those with the attribute ``survives_rollback``. It is to be called between two rollouts
    (:class:`lit_grpo.callbacks.rollout_end.RolloutEnd`), on all ranks. It waits for a checkpoint that is being written,
    which may be this one.

    Returns:
        The checkpoint.
    """
    module: Any = pl_module
    CheckpointWriter.finish_of(trainer)
    # Rank 0 moves what all have written into place.
    trainer.strategy.barrier()
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
    RolloutEnd.of(trainer).restore(trainer)
    _restore_loops(trainer, checkpoint["loops"]["fit_loop"])
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


def _restore_loops(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Set the progress of Lightning's loops and loader to that of a checkpoint."""
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    loader = trainer.fit_loop._combined_loader
    assert fetcher is not None
    assert loader is not None
    batches = epoch_loop.batch_progress
    batches.load_state_dict(saved["epoch_loop.batch_progress"])
    batches.is_last_batch = False
    epoch_loop.scheduler_progress.load_state_dict(saved["epoch_loop.scheduler_progress"])
    epoch_loop.manual_optimization.optim_step_progress.load_state_dict(
        saved["epoch_loop.manual_optimization.optim_step_progress"]
    )
    epoch_loop.automatic_optimization.optim_progress.load_state_dict(
        saved["epoch_loop.automatic_optimization.optim_progress"]
    )
    epoch_loop.val_loop.batch_progress.load_state_dict(saved["epoch_loop.val_loop.batch_progress"])
    loader._load_state_dicts(saved["state_dict"]["combined_loader"])
    # As for a run that is resumed: a new iterator starts from the restored position.
    iter(fetcher)
    fetcher.fetched += batches.current.ready
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length


def give_up_later_checkpoints(trainer: Trainer) -> bool:
    """Let the run's own checkpoints follow a rollback: save the run as it is now, and remove later ones.

    Returns:
        Whether it is saved; True where the run saves nothing.
    """
    own = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, RolloutCheckpoint)]
    saved = [callback.go_back(trainer, trained_rollouts(trainer)) for callback in own]
    return all(saved)
