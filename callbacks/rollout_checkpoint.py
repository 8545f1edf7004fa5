"""Checkpoints every few rollouts, whole or not at all; which of them are kept, and what a full disk does."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_grpo.callbacks.checkpoint_files import (
    FULL,
    Ranks,
    checkpoint_name,
    expected_bytes,
    free_bytes,
    on_rank_zero,
    remove_half_written,
    rollout_of,
    size_of,
)
from lit_grpo.callbacks.checkpoint_writer import CheckpointWriter, Save
from lit_grpo.callbacks.monitors.monitor import trained_rollouts
from lit_grpo.callbacks.new_settings import take_new_settings
from lit_grpo.callbacks.rollout_end import SECOND, RolloutEnd
from lit_grpo.errors import StopRun, UserError
from lit_grpo.run.changes import changes_between, check_accepted, flat, keys_in
from lit_grpo.run.checkpoints import ROLLBACK_FOLDER, check_whole
from lit_grpo.run.folder import run_folder, shown
from lit_grpo.utils.files import link_atomically, remove
from lit_grpo.utils.text import in_bytes

log = logging.getLogger(__name__)

LAST, BEST = "last.ckpt", "best.ckpt"
PROBE = ".writable"
PATIENCE = 5.0
"""Seconds that a run which is being ended waits for a rollout that is sampled ahead, to save it too."""


class RolloutCheckpoint(Checkpoint):
    """Checkpoints of a run: ``rollout-000120.ckpt`` after 120 rollouts, and ``last.ckpt``, a link to the newest.

    A checkpoint is written under another name, sealed with a hash of each part, synced to disk and renamed, so what
    bears its name is whole, and damage that comes later is found before it is loaded. It is a folder where the strategy
    saves in shards.

    The run is saved between two rollouts, once Lightning has validated and logged the last one: every
    ``every_n_rollouts``, where an evaluation is the best so far, at its end, when it is stopped, and on an exception,
    SIGTERM or Ctrl-C if the weights are those after a whole rollout; inside a rollout nothing is saved and the previous
    checkpoint holds. With several processes only a stop and SIGTERM save: an exception may be one process's own, and
    saving needs all of them.

    Between two rollouts the run waits only for a copy of itself in main memory, which a thread writes while training
    goes on (:mod:`lit_grpo.callbacks.checkpoint_writer`); at its end, at a stop, on a signal and in a rollback it waits
    until the checkpoint is in place.

    Kept are the newest ``keep_last`` and the best ``keep_best`` by ``monitor``, which ``best.ckpt`` leads to; the rest
    is removed once the next one is in place. A disk that is full pauses saving with a warning: checkpoints to roll back
    to are removed first, the oldest first, then older ones of the run, never the newest; if that is not enough the run
    goes on unsaved, and it is tried again when the next one is due.

    ``last.ckpt`` is a relative symbolic link: it survives moving or copying the folder (``mv``, ``cp -a``, ``tar``,
    ``rsync -a``) but means nothing alone. Where links cannot be made it is a hard link, which a copy turns into a
    second file.

    A finished or stopped run goes on from its last checkpoint if the data module's ``rollouts`` is larger than the
    number of rollouts that it was trained on. A run that goes on with other settings of the model than those it was
    saved with is refused, with the differences, unless they are named in ``accept_changes``.

    Args:
        every_n_rollouts: distance between two checkpoints.
        keep_last: number of the newest checkpoints of this run to keep; None keeps all.
        dirpath: folder of the checkpoints; by default ``checkpoints`` in the folder of the run.
        keep_best: number of checkpoints to keep besides, of the rollouts whose evaluation was best; 0: none.
        monitor: metric of the evaluation by which they are compared.
        mode: whether a large value (``max``) or a small one (``min``) is good.
        in_background: whether the training goes on while a checkpoint is written. The copy takes as much main memory as
            the checkpoint does on disk; without it the training waits for the disk.
        accept_changes: keys that may differ from those that a resumed run was saved with, in a list or with commas
            between them; a key stands for all below it: ``model.optimizer.lr,data.rewards``.
    """

    best_model_path = ""
    """Path that ``ckpt_path="best"`` asks for; empty as long as no checkpoint is the best."""

    def __init__(
        self,
        every_n_rollouts: int = 50,
        keep_last: int | None = 2,
        dirpath: str | None = None,
        keep_best: int = 1,
        monitor: str = "val/reward",
        mode: Literal["max", "min"] = "max",
        in_background: bool = True,
        accept_changes: list[str] | str | None = None,
    ) -> None:
        for name, value, least in (
            ("every_n_rollouts", every_n_rollouts, 1),
            ("keep_last", keep_last, 1),
            ("keep_best", keep_best, 0),
        ):
            if value is not None and value < least:
                raise UserError(f"{name} is {value}, must be at least {least}", where=f"RolloutCheckpoint.{name}")
        self.every_n_rollouts = every_n_rollouts
        self.keep_last, self.keep_best = keep_last, keep_best
        self.monitor_key, self.mode, self.in_background = monitor, mode, in_background
        self.accepted = keys_in(accept_changes)
        self.dirpath = Path(dirpath).absolute() if dirpath else None
        self._saved: list[str] = []
        self._saved_rollout = 0
        self._values: dict[str, float] = {}
        """Value of ``monitor`` of each saved checkpoint that was evaluated, by name."""
        self._to_remove: list[str] = []
        self._reserved = False
        """Whether room for a copy of the run was asked for."""
        """Checkpoints that are not kept any more, as soon as the newest is in place."""
        self._evaluated_rollout = -1
        self._ring: Path | None = None
        self._unsaved_because: str | None = None
        """Why the newest state could not be saved; None if it could."""
        self._rollout_end: RolloutEnd | None = None
        self._changed: list[str] = []
        self._loader_state: Any = None

    @property
    def last_path(self) -> Path | None:
        """Path of this run's newest checkpoint, or None if there is none."""
        # The newest of the list may still be written; those that it makes surplus stay as long.
        listed = [self.dirpath / name for name in (*self._to_remove, *self._saved)] if self.dirpath else []
        return next((path for path in reversed(listed) if path.exists()), None)

    @property
    def saved_rollout(self) -> int:
        """Rollouts trained on in the newest checkpoint; 0 if there is none."""
        path = self.last_path
        return 0 if path is None else rollout_of(path.name)

    # Hooks.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        folder = run_folder(trainer)
        self.dirpath = self.dirpath or folder / "checkpoints"
        self._ring = folder / ROLLBACK_FOLDER
        self._reserved = False
        self._rollout_end = RolloutEnd.of(trainer)
        self._rollout_end.add(self._after_rollout, SECOND)
        if trainer.ckpt_path is not None:
            # Before the model is loaded, which takes longer.
            _check_on_rank_zero(trainer, Path(str(trainer.ckpt_path)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._rollout_end is not None:
            self._rollout_end.remove(self._after_rollout)
        CheckpointWriter.close_of(trainer)
        # Also here: a run that was killed after its last checkpoint has nothing left to train, and never starts.
        if stage == "fit" and trainer.is_global_zero and self.dirpath is not None:
            self._remove_surplus(self.dirpath)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved, now = checkpoint.get("hyper_parameters"), dict(pl_module.hparams)
        if saved and now:
            found = changes_between(flat(saved, "model"), flat(now, "model"))
            self._changed = check_accepted(found, self.accepted)
        length = getattr(getattr(trainer, "datamodule", None), "rollouts", None)
        if length is not None and trainer.max_epochs == 1:
            _reopen(checkpoint["loops"]["fit_loop"], length)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        take_new_settings(trainer, pl_module, self._changed)
        self._loader_state = _loader_state(trainer)
        if getattr(trainer, "fast_dev_run", False):
            return
        assert self.dirpath is not None
        folder = self.dirpath
        try:
            on_rank_zero(Ranks.of(trainer), lambda: self._make_ready(folder, trainer.ckpt_path))
        except OSError as error:
            raise UserError(
                f"no checkpoint can be written into {shown(folder)}: {error.strerror or error}",
                where="checkpoint.dirpath",
                remedy="name a folder that can be written, or leave checkpoints out: "
                "`trainer: {enable_checkpointing: false}`",
            ) from error
        self._say_what_it_takes(trainer, folder)

    def _make_ready(self, folder: Path, going_on: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._refuse_another_runs(folder, going_on)
        # A run is not to find out after its first fifty rollouts that this folder is not its own.
        try:
            (folder / PROBE).write_bytes(b"")
            (folder / PROBE).unlink()
        except OSError as error:
            # A full disk is no wrong folder: saving pauses, and is tried again.
            if error.errno not in FULL:
                raise
        if left := remove_half_written(folder):
            log.warning("removed what a killed run left half-written in %s: %s", shown(folder), ", ".join(left))
        self._remove_surplus(folder)

    def _refuse_another_runs(self, folder: Path, going_on: Any) -> None:
        """Refuse a folder with the checkpoints of another run, which would be replaced one by one."""
        # A run that goes on from an earlier checkpoint of its own makes the later ones anew.
        if going_on is not None and Path(str(going_on)).resolve().parent == folder.resolve():
            return
        others = sorted(path.name for path in folder.glob("rollout-*.ckpt") if path.name not in self._saved)
        if others:
            raise UserError(
                f"{shown(folder)} holds checkpoints of another run ({others[0]}), which this one would replace",
                where="checkpoint.dirpath",
                remedy="name another folder or remove that one; to go on with that run, "
                f"--ckpt_path {shown(folder / others[-1])}",
            )

    def _remove_surplus(self, folder: Path) -> None:
        """Remove what the newest checkpoint has made surplus, which a killed run may not have come to."""
        for name in self._to_remove:
            if name not in self._saved:
                remove(folder / name)

    def _say_what_it_takes(self, trainer: Trainer, folder: Path) -> None:
        each, free = expected_bytes(trainer), free_bytes(folder)
        if self.keep_last is None:
            length = getattr(getattr(trainer, "datamodule", None), "rollouts", None)
            kept = "all" if length is None else f"all {max(1, -(-length // self.every_n_rollouts))}"
            count = None if length is None else max(1, -(-length // self.every_n_rollouts))
        else:
            evaluations = getattr(getattr(trainer, "datamodule", None), "evaluations", None)
            validates = trainer.enable_validation and (evaluations is None or bool(evaluations.get("val")))
            # One more while the newest is written and the oldest is still there.
            count = self.keep_last + (self.keep_best if validates else 0) + 1
            kept = f"the newest {self.keep_last}"
            kept += f" and the best {self.keep_best} by {self.monitor_key}" if validates else ""
        most = "" if count is None else f", at most {in_bytes(count * each)} in {shown(folder)}"
        rank_zero_info(
            f"checkpoints take about {in_bytes(each)} each; {kept} are kept{most}; {in_bytes(free)} are free"
        )
        if free < (count or 1) * each:
            rank_zero_warn(
                f"The disk of {shown(folder)} has {in_bytes(free)} free, and checkpoints may take "
                f"{in_bytes((count or 1) * each)}: saving pauses when it is full. checkpoint.dirpath is the place."
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._evaluated_rollout = trained_rollouts(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loader_state = _loader_state(trainer)

    def _after_rollout(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The last one is saved at the end of the epoch, where Lightning counts it as finished.
        if trainer.is_last_batch:
            return
        if self.in_background and not self._reserved:
            self._reserved = CheckpointWriter.of(trainer).reserve(trainer)
        CheckpointWriter.poll_of(trainer, trained_rollouts(trainer))
        due = trainer.should_stop or trained_rollouts(trainer) % self.every_n_rollouts == 0
        if due or self._is_best(trainer):
            self.save(trainer, wait=trainer.should_stop or not self.in_background)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        CheckpointWriter.finish_of(trainer)
        if self._unsaved_because is None:
            return
        rollout, last = trained_rollouts(trainer), self.last_path
        raise UserError(
            f"the run is trained on {rollout} rollouts, and its last state could not be saved: {self._unsaved_because}",
            where=str(self.dirpath),
            remedy="make room on the disk, and "
            + (f"go on from {shown(last)}, the last that was saved" if last is not None else "begin the run again"),
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.save_what_is_whole(trainer, exception)

    def state_dict(self) -> dict[str, Any]:
        return {
            "saved": list(self._saved),
            "saved_rollout": self._saved_rollout,
            "values": dict(self._values),
            "evaluated_rollout": self._evaluated_rollout,
            "to_remove": list(self._to_remove),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = list(state_dict["saved"])
        self._saved_rollout = state_dict["saved_rollout"]
        self._values = dict(state_dict.get("values", {}))
        self._evaluated_rollout = state_dict.get("evaluated_rollout", -1)
        self._to_remove = list(state_dict.get("to_remove", []))

    # The best.

    def _value(self, trainer: Trainer) -> float | None:
        """Return the monitored value of the present weights; None if they were not evaluated, or it is not finite."""
        if not self.keep_best or self._evaluated_rollout != trained_rollouts(trainer):
            return None
        value = trainer.callback_metrics.get(self.monitor_key)
        return None if value is None or not math.isfinite(float(value)) else float(value)

    def _is_best(self, trainer: Trainer) -> bool:
        value = self._value(trainer)
        if value is None:
            return False
        # Rank 0 decides for all: saving needs all of them.
        better = not self._values or self._ranked([*self._values.values(), value])[0] != self._best_value()
        return bool(trainer.strategy.broadcast(better))

    def _best_value(self) -> float | None:
        return self._ranked(self._values.values())[0] if self._values else None

    def _ranked(self, values: Any) -> list[float]:
        return sorted(values, reverse=self.mode == "max")

    def _best_names(self) -> list[str]:
        """Return the names of the checkpoints that are kept as the best, best first; of equal ones the older first."""
        sign = -1.0 if self.mode == "max" else 1.0
        return sorted(self._values, key=lambda name: (sign * self._values[name], name))[: self.keep_best]

    # Saving.

    def save(self, trainer: Trainer, *, given_up: Sequence[str] = (), wait: bool = True) -> bool:
        """Save the run, unless this rollout is saved already. All processes must call it.

        Args:
            trainer: the trainer of the run.
            given_up: names of checkpoints that are removed, whatever their number, once this one is in place.
            wait: whether to wait until it is in place; otherwise it may be under way, and a failure is told later.

        Returns:
            Whether the present state is saved, or under way. A disk that refuses is warned of and not raised.
        """
        rollout = trained_rollouts(trainer)
        if getattr(trainer, "fast_dev_run", False) or trainer.sanity_checking:
            return False
        # Before anything is noted: a write that has failed takes its own note back.
        if wait:
            CheckpointWriter.finish_of(trainer)
        else:
            CheckpointWriter.of(trainer).make_way(rollout)
        if rollout == self._saved_rollout:
            return True
        if self._rollout_end is not None and self._rollout_end.given_up:
            return False
        assert self.dirpath is not None
        folder, path = self.dirpath, self.dirpath / checkpoint_name(rollout)
        # Noted before saving, since the checkpoint holds this callback's state too; taken back if saving fails.
        before = self.state_dict()
        self._note_saved(path.name, rollout, self._value(trainer), given_up)
        best = next(iter(self._best_names()), None)
        surplus = [name for name in self._to_remove if name not in self._saved]
        needed = expected_bytes(trainer)

        def then() -> None:
            _link(folder / LAST, path)
            if best is not None:
                _link(folder / BEST, folder / best)
            for name in surplus:
                remove(folder / name)

        def failed(error: BaseException) -> None:
            # What has been evaluated since stays so.
            self.load_state_dict(before | {"evaluated_rollout": self._evaluated_rollout})
            if isinstance(error, OSError):
                self._note_unsaved(rollout, error)

        self._unsaved_because = None
        save = Save(path=path, then=then, failed=failed, make_room=lambda: self._make_room(path, needed))
        done = CheckpointWriter.of(trainer).save(trainer, save, moment=rollout, behind=not wait)
        best = next(iter(self._best_names()), None)
        self.best_model_path = str(folder / best) if best is not None else ""
        if wait:
            trainer.strategy.barrier("RolloutCheckpoint.save")
        return done

    def _note_unsaved(self, rollout: int, error: OSError) -> None:
        self._unsaved_because = str(error.strerror or error)
        last = self.last_path
        rank_zero_warn(
            f"Rollout {rollout} could not be saved ({self._unsaved_because}); training goes on, and saving is "
            f"tried again when the next checkpoint is due. "
            + (f"The last good one is {shown(last)}." if last is not None else "No checkpoint is there yet.")
        )

    def _note_saved(self, name: str, rollout: int, value: float | None, given_up: Sequence[str]) -> None:
        saved = [other for other in self._saved if other not in (name, *given_up)] + [name]
        self._values = {key: v for key, v in self._values.items() if key in saved and key != name}
        if value is not None:
            self._values[name] = value
        best = self._best_names()
        newest = saved[-self.keep_last :] if self.keep_last else saved
        self._saved = [other for other in saved if other in newest or other in best]
        # Values of those that go say nothing any more: they cannot be the best again.
        self._values = {key: v for key, v in self._values.items() if key in self._saved}
        self._to_remove = [*(other for other in saved if other not in self._saved), *given_up]
        self._saved_rollout = rollout

    def _make_room(self, path: Path, needed: int) -> bool:
        """Remove what is kept least urgently until the disk has room for one checkpoint; say whether anything went."""
        removed: list[str] = []
        needed = max(needed, *(size_of(one) for one in self._on_disk(path.parent)), 0)
        for victim in self._least_urgent(path.parent):
            if free_bytes(path.parent) > needed * 1.05:
                break
            remove(victim)
            removed.append(shown(victim))
        if removed:
            log.warning("The disk is full: removed %s to make room for %s.", ", ".join(removed), shown(path))
        return bool(removed)

    def _on_disk(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("rollout-*.ckpt"), key=lambda one: rollout_of(one.name)) if folder.is_dir() else []

    def _least_urgent(self, folder: Path) -> list[Path]:
        """Return what may go, first what is least missed; neither the newest of the run nor the newest of the ring."""
        ring = self._on_disk(self._ring)[:-1] if self._ring is not None else []
        # What the state before this save lists, so that nothing goes that a resume may lead to.
        own = [one for one in self._on_disk(folder) if one != (folder / LAST).resolve()]
        best = (folder / BEST).resolve()
        return [*ring, *sorted(own, key=lambda one: one == best)]

    def go_back(self, trainer: Trainer, rollout: int) -> bool:
        """Follow a run that went back to ``rollout``: save it as it is now, and remove later checkpoints.

        All processes must call it, between two rollouts. Until the new one is in place, a resumed run would begin
        before the rollback and make it again.

        Returns:
            Whether it could be saved; otherwise the later checkpoints are still there.
        """
        given_up = [name for name in self._saved if rollout_of(name) > rollout]
        # No rollout is -1, so that this one is saved again: it is the one gone back to, changed by the remedy.
        self._saved_rollout = -1
        self._loader_state = _loader_state(trainer)
        return self.save(trainer, given_up=given_up)

    def save_what_is_whole(self, trainer: Trainer, exception: BaseException) -> None:
        """Save the run because of an exception, if its state is that after a whole rollout. Never raises.

        What is being written is waited for in any case.
        """
        try:
            CheckpointWriter.finish_of(trainer)
        except Exception as error:
            log.warning("A checkpoint could not be written: %s", error)
        if trainer.state.fn != TrainerFn.FITTING or self.dirpath is None:
            return
        # Any other exception may be this process's own, and saving needs all of them.
        if trainer.world_size > 1 and not isinstance(exception, StopRun | SIGTERMException):
            return
        try:
            if self._is_whole(trainer):
                self._log_what_was_not(trainer)
                _be_quick(trainer)
                self.save(trainer)
        # The exception that ends the run must be seen, not one of its last save.
        except Exception as error:
            log.warning("The run could not be saved on the way out: %s", error)

    def _is_whole(self, trainer: Trainer) -> bool:
        loop = trainer.fit_loop.epoch_loop
        batches: Any = loop.batch_progress.total
        # Unequal counts: inside training_step, or a rollout was taken that is not trained on.
        if not batches.ready == batches.started == batches.processed > 0:
            return False
        # A callback raised in a hook of the batch. A validation that is due then would be lost for good.
        if batches.completed < batches.processed:
            fetcher = trainer.fit_loop._data_fetcher
            return fetcher is not None and not loop._should_check_val_fx(fetcher)
        # While it is validated or logged it is not whole; afterwards the loader must not have moved on.
        between = self._rollout_end is None or not self._rollout_end.under_way
        return between and _loader_state(trainer) == self._loader_state

    def _log_what_was_not(self, trainer: Trainer) -> None:
        # Lightning logs a rollout only after all hooks, which an exception in one of them prevents: a run that went on
        # from here would never log it.
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        if batches.completed < batches.processed:
            trainer._logger_connector.update_train_step_metrics()


def _check_on_rank_zero(trainer: Trainer, path: Path) -> None:
    """Check a checkpoint on one rank, for they all read the same; its error is raised on all."""
    found: UserError | None = None
    if trainer.is_global_zero:
        try:
            check_whole(path)
        except UserError as error:
            found = error
    found = trainer.strategy.broadcast(found)
    if found is not None:
        raise found


def _be_quick(trainer: Trainer) -> None:
    """Let loaders not wait for what they sample ahead: who sent a signal may not wait as long as a rollout takes."""
    loader = trainer.fit_loop._combined_loader
    for one in loader.flattened if loader is not None else ():
        if hasattr(one, "patience"):
            one.patience = PATIENCE


def _loader_state(trainer: Trainer) -> Any:
    """Return where the train loaders are; by ``position_state`` of those that have it, whose whole state is costly."""
    loader = trainer.fit_loop._combined_loader
    if loader is None:
        return None
    return [
        one.position_state() if hasattr(one, "position_state") else one.state_dict()
        for one in loader.flattened
        if hasattr(one, "state_dict")
    ]


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
