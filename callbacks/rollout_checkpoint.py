"""Checkpoints every few rollouts, whole or not at all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_grpo.callbacks.monitors.monitor import trained_rollouts
from lit_grpo.errors import StopRun, UserError
from lit_grpo.run.folder import run_folder
from lit_grpo.utils.files import link_atomically, move_into_place, remove

log = logging.getLogger(__name__)

LAST = "last.ckpt"


class RolloutCheckpoint(Checkpoint):
    """Checkpoints of a run: ``rollout-000120.ckpt`` after 120 rollouts, and ``last.ckpt``, a link to the newest.

    A checkpoint is written under another name, synced to disk and renamed, so what bears its name is whole. It is a
    folder where the strategy saves in shards.

    Besides every ``every_n_rollouts``, the run is saved at its end, when it is stopped, and on an exception, SIGTERM or
    Ctrl-C if the weights are those after a whole rollout; inside a rollout nothing is saved and the previous checkpoint
    holds. With several processes only a stop and SIGTERM save: an exception may be one process's own, and saving needs
    all of them.

    ``last.ckpt`` is a relative symbolic link: it survives moving or copying the folder (``mv``, ``cp -a``, ``tar``,
    ``rsync -a``) but means nothing alone. Where links cannot be made it is a hard link, which a copy turns into a
    second file.

    A finished or stopped run goes on from its last checkpoint if the data module's ``rollouts`` is larger than the
    number of rollouts that it was trained on.

    It saves before the module's own ``on_train_batch_end``: whatever a module counts there would be missing. Counters
    belong into ``training_step``.

    Args:
        every_n_rollouts: distance between two checkpoints.
        keep_last: number of checkpoints of this run to keep; None keeps all.
        dirpath: folder of the checkpoints; by default ``checkpoints`` in the folder of the run.
    """

    best_model_path = ""
    """Path that ``ckpt_path="best"`` asks for; empty, because this callback compares no checkpoints."""

    def __init__(self, every_n_rollouts: int = 50, keep_last: int | None = 2, dirpath: str | None = None) -> None:
        for name, value in (("every_n_rollouts", every_n_rollouts), ("keep_last", keep_last)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, must be at least 1", where=f"RolloutCheckpoint.{name}")
        self.every_n_rollouts = every_n_rollouts
        self.keep_last = keep_last
        self.dirpath = Path(dirpath).absolute() if dirpath else None
        self._saved: list[str] = []
        self._saved_rollout = 0
        self._loader_state: Any = None

    @property
    def last_path(self) -> Path | None:
        """Path of this run's newest checkpoint, or None if there is none."""
        path = self.dirpath / self._saved[-1] if self.dirpath and self._saved else None
        return path if path and path.exists() else None

    @property
    def saved_rollout(self) -> int:
        """Rollouts trained on in the newest checkpoint; 0 if there is none."""
        return self._saved_rollout

    # Hooks.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            folder = run_folder(trainer)
            self.dirpath = self.dirpath or folder / "checkpoints"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loader_state = _loader_state(trainer)
        last = trainer.is_last_batch or trainer.should_stop or trainer.received_sigterm
        if last or trained_rollouts(trainer) % self.every_n_rollouts == 0:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A callback that came after this one may have stopped the run in the last batch.
        self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.save_what_is_whole(trainer, exception)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        length = getattr(getattr(trainer, "datamodule", None), "rollouts", None)
        if length is not None and trainer.max_epochs == 1:
            _reopen(checkpoint["loops"]["fit_loop"], length)

    def state_dict(self) -> dict[str, Any]:
        return {"saved": list(self._saved), "saved_rollout": self._saved_rollout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = list(state_dict["saved"])
        self._saved_rollout = state_dict["saved_rollout"]

    # Saving.

    def save(self, trainer: Trainer) -> None:
        """Save the run, unless this rollout is saved already. All processes must call it."""
        rollout = trained_rollouts(trainer)
        if rollout == self._saved_rollout or getattr(trainer, "fast_dev_run", False) or trainer.sanity_checking:
            return
        assert self.dirpath is not None
        path = self.dirpath / f"rollout-{rollout:06d}.ckpt"
        # Noted before saving, since the checkpoint holds this callback's state too; taken back if saving fails.
        before = self._saved, self._saved_rollout
        self._saved = [name for name in self._saved if name != path.name] + [path.name]
        self._saved_rollout = rollout
        surplus = self._saved[: -self.keep_last] if self.keep_last else []
        self._saved = self._saved[len(surplus) :]
        temporary = self.dirpath / f".{path.name}.tmp"
        try:
            if trainer.is_global_zero:
                self.dirpath.mkdir(parents=True, exist_ok=True)
                remove(temporary)
            # The whole state, said outright.
            trainer.save_checkpoint(temporary, weights_only=False)
        except BaseException:
            self._saved, self._saved_rollout = before
            raise
        if trainer.is_global_zero:
            move_into_place(temporary, path)
            _link(self.dirpath / LAST, path)
            for name in surplus:
                remove(self.dirpath / name)
        trainer.strategy.barrier("RolloutCheckpoint.save")

    def go_back(self, trainer: Trainer, rollout: int) -> None:
        """Follow a run that went back to ``rollout``: remove later checkpoints, and save it as it is now.

        All processes must call it, at the end of a batch.
        """
        given_up = [name for name in self._saved if int(name.removeprefix("rollout-").removesuffix(".ckpt")) > rollout]
        self._saved = [name for name in self._saved if name not in given_up]
        # No rollout is -1, so that this one is saved again: it is the one gone back to, changed by the remedy.
        self._saved_rollout = -1
        self._loader_state = _loader_state(trainer)
        self.save(trainer)
        if trainer.is_global_zero and self.dirpath is not None:
            for name in given_up:
                remove(self.dirpath / name)

    def save_what_is_whole(self, trainer: Trainer, exception: BaseException) -> None:
        """Save the run because of an exception, if its state is that after a whole rollout. Never raises."""
        if trainer.state.fn != TrainerFn.FITTING or self.dirpath is None:
            return
        # Any other exception may be this process's own, and saving needs all of them.
        if trainer.world_size > 1 and not isinstance(exception, StopRun | SIGTERMException):
            return
        try:
            if self._is_whole(trainer):
                self.save(trainer)
        # The exception that ends the run must be seen, not one of its last save.
        except Exception as error:
            log.warning("The run could not be saved on the way out: %s", error)

    def _is_whole(self, trainer: Trainer) -> bool:
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        # Unequal counts: inside training_step, or a rollout was taken that is not trained on.
        if not batches.ready == batches.started == batches.processed > 0:
            return False
        # The batch is not completed where a monitor stopped the run before this callback's hook ran. Otherwise the
        # loader must not have moved on since the last one.
        return batches.completed < batches.processed or _loader_state(trainer) == self._loader_state


def _loader_state(trainer: Trainer) -> Any:
    loader = trainer.fit_loop._combined_loader
    return loader._state_dicts() if loader is not None else None


def _reopen(loops: dict[str, Any], length: int) -> None:
    """Let a run go on that ended before ``length`` rollouts, because it was stopped or is to be longer now.

    Lightning takes the one epoch of such a run for finished and would return at once.
    """
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    if batches["current"]["ready"] >= length:
        return
    batches["is_last_batch"] = False
    for counts in (epochs["current"], epochs["total"]):
        counts["processed"] = counts["completed"] = counts["started"] - 1


def _link(link: Path, target: Path) -> None:
    try:
        link_atomically(link, target)
    except OSError as error:
        log.warning("%s cannot be made (%s); resume from %s", link, error, target)
