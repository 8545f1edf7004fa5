"""The module meets the Trainer: what Lightning leaves open for rollouts is set here, before anything is set up.

Lightning has no hook this early, and none at all for some of it, so that methods of the Trainer's own objects are
wrapped: on the one object, never on the class.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.run.folder import RUNS, run_logger
from lit_grpo.tracking.completions import CompletionTable
from lit_grpo.tracking.folder_record import FolderRecord
from lit_grpo.tracking.mlflow_logger import RunLogger
from lit_grpo.tracking.run_note import RUN_FILE
from lit_grpo.tracking.tracked_run import TrackedRun
from lit_grpo.trainer.checkpoint_words import (
    CheckpointPlaces,
    Word,
    begins_anew,
    check_is_there,
    no_checkpoint,
    runs_named,
)
from lit_grpo.trainer.logged_moment import LoggedMoment, watch_in_time
from lit_grpo.trainer.refused import check_trainer

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_CONNECTED = "_lit_grpo_connected"
LIGHTNINGS_LOG_INTERVAL = 50
"""Default of ``log_every_n_steps``, made for batches that take milliseconds: here it stands for 1."""


def connect(trainer: Trainer) -> None:
    """Fit a Trainer to runs of rollouts; a second call for the same one only checks it again.

    - ``ckpt_path: last`` and ``best`` find the checkpoints of :class:`lit_grpo.callbacks.RolloutCheckpoint`.
    - A step of Lightning (``global_step``, ``max_steps``, ``every_n_train_steps``) is a rollout, whatever the number of
      optimizer steps on it, and whether any was taken.
    - The run has a folder of its own and a record in it, whatever the loggers are.
    - ``EarlyStopping`` and ``ModelCheckpoint`` look at a metric when it is logged, and each rollout is logged under its
      number, from 1.

    Raises:
        UserError: the Trainer has arguments or callbacks that a run cannot follow.
    """
    check_trainer(trainer)
    _add_callbacks(trainer)
    watch_in_time(trainer)
    if getattr(trainer, _CONNECTED, False):
        return
    setattr(trainer, _CONNECTED, True)
    # Lightning's text for modules with manual optimization, whose weights it would save from before the step.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    if trainer.log_every_n_steps == LIGHTNINGS_LOG_INTERVAL:  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging inter")
    _count_rollouts(trainer)
    trainer._logger_connector.__class__ = _EveryRollout
    _keep_in_a_folder(trainer)
    _resolve_words(trainer)


def _add_callbacks(trainer: Trainer) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for cls in (TrackedRun, LoggedMoment):
        if not any(isinstance(callback, cls) for callback in callbacks):
            # Before the checkpoints, which come last.
            first = next((i for i, one in enumerate(callbacks) if isinstance(one, Checkpoint)), len(callbacks))
            callbacks.insert(first, cls())


def _count_rollouts(trainer: Trainer) -> None:
    """Let ``global_step`` count rollouts, not the steps of all optimizers together."""
    manual: Any = trainer.fit_loop.epoch_loop.manual_optimization
    end = manual.on_run_end

    def on_run_end() -> Any:
        # Whatever the module's optimizers did: a rollout without anything to learn from is one too, and a run that is
        # bounded by `max_steps`, or saved every so many, must not stand still on it.
        manual.optim_step_progress.increment_ready()
        manual.optim_step_progress.increment_completed()
        return end()

    # Every Trainer has a profiler, but Lightning does not declare it.
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    manual._on_before_step = lambda: profiler.start("optimizer_step")
    manual._on_after_step = lambda: profiler.stop("optimizer_step")
    manual.on_run_end = on_run_end


class _EveryRollout(_LoggerConnector):
    """Lightning's connector to the loggers, whose interval counts rollouts from 1."""

    @property
    def should_update_logs(self) -> bool:
        trainer: Any = self.trainer
        if trainer._active_loop is not trainer.fit_loop:
            return super().should_update_logs
        every = 1 if trainer.log_every_n_steps == LIGHTNINGS_LOG_INTERVAL else trainer.log_every_n_steps
        if every == 0:
            return False
        return trainer.fit_loop.epoch_loop._batches_that_stepped % every == 0 or trainer.should_stop


def _keep_in_a_folder(trainer: Trainer) -> None:
    """Give the run a record in a folder of its own: a ``RunLogger`` if there is none, without MLflow."""
    root = Path(trainer.default_root_dir)
    for logger in trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.place_below(root)
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            _claim_version(logger)
    if run_logger(trainer) is None and not getattr(trainer, "fast_dev_run", False) and not trainer.barebones:
        first = next((one for one in trainer.loggers if isinstance(one, CSVLogger | TensorBoardLogger)), None)
        record = FolderRecord(root / RUNS, None if first is None else Path(first.log_dir), always=bool(trainer.loggers))
        trainer.loggers = [*trainer.loggers, record]
    logger, callbacks = run_logger(trainer), trainer.callbacks  # type: ignore[attr-defined]
    if getattr(logger, "wanted", True) and not any(isinstance(one, CompletionTable) for one in callbacks):
        callbacks.insert(0, CompletionTable())


@rank_zero_only
def _claim_version(logger: Any) -> None:
    """Make the folder of a logger that numbers its runs, so that two that start at once get two numbers."""
    if logger._version is not None or "://" in str(logger.root_dir):
        return
    number = logger._get_next_version()
    while True:
        folder = Path(logger.root_dir) / f"version_{number}"
        # mkdir itself decides whether the number is free.
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError:
            # The logger tells of a place that cannot be written in its own words.
            return
        logger._version = number
        return


def _resolve_words(trainer: Trainer) -> None:
    connector: Any = trainer._checkpoint_connector
    parse = connector._parse_ckpt_path

    def parse_ckpt_path(state_fn: Any, ckpt_path: Any, **kwargs: Any) -> Any:
        if ckpt_path in ("last", "best"):
            ckpt_path = _find(trainer, ckpt_path, parse, state_fn, kwargs)
            if ckpt_path is None:
                return None
        if ckpt_path is not None:
            check_is_there(ckpt_path)
        path = parse(state_fn, ckpt_path, **kwargs)
        if path is not None and state_fn == "fit":
            _go_on_in_its_folder(trainer, Path(str(path)))
        return path

    connector._parse_ckpt_path = parse_ckpt_path


def _find(trainer: Trainer, word: Word, parse: Any, state_fn: Any, kwargs: dict[str, Any]) -> Any:
    """Return the path that a word stands for; None where a run with ``last`` begins anew."""
    savers: list[Any] = [one for one in trainer.checkpoint_callbacks if isinstance(one, RolloutCheckpoint)]
    lightnings = [one for one in trainer.checkpoint_callbacks if not isinstance(one, RolloutCheckpoint)]
    places = places_of(trainer)
    within = [Path(str(one.best_model_path)) for one in savers if word == "best" and one.best_model_path]
    found = next((path for path in within if path.exists()), None) or places.find(word)
    if found is not None:
        return str(found)
    if lightnings:
        return parse(state_fn, word, **kwargs)
    if word == "best" or state_fn != "fit":
        raise no_checkpoint(word, places)
    # As Lightning has it: a job that is started again and again with `last` begins where there is nothing yet.
    rank_zero_warn(f"{begins_anew(places)}.")
    if (run := places.begun()) is not None and isinstance(logger := run_logger(trainer), RunLogger):
        logger.continue_run(run)
    return None


def places_of(trainer: Trainer) -> CheckpointPlaces:
    """Return where the checkpoints that ``last`` and ``best`` stand for may lie."""
    given = [one.dirpath for one in trainer.checkpoint_callbacks if isinstance(one, RolloutCheckpoint) and one.dirpath]
    logger = run_logger(trainer)
    root = Path(trainer.default_root_dir) / RUNS
    if logger is None:
        return CheckpointPlaces(folders=given, roots=[root])
    numbered = [one for one in trainer.loggers if isinstance(one, CSVLogger | TensorBoardLogger)]
    if isinstance(logger, FolderRecord) and numbered:
        return CheckpointPlaces(folders=given, roots=[Path(one.root_dir) for one in numbered])
    if not isinstance(logger, FolderRecord) and logger.named_folder is not None:
        return CheckpointPlaces(folders=given, runs=[logger.named_folder])
    runs = runs_named(logger.root, logger.run_name) if logger.run_name else []
    return CheckpointPlaces(folders=given, runs=runs, roots=[logger.root])


def _go_on_in_its_folder(trainer: Trainer, checkpoint: Path) -> None:
    """Let a run that goes on from a checkpoint in the folder of a run go on there."""
    logger, folder = run_logger(trainer), checkpoint.absolute().parent.parent
    if isinstance(logger, RunLogger) and (folder / RUN_FILE).is_file():
        logger.continue_run(folder)
        if logger.named_folder != folder:
            logger.begin_from(folder, checkpoint)
