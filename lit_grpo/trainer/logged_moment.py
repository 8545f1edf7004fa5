"""``EarlyStopping`` and ``ModelCheckpoint`` at the moment at which their metric is logged, and rollouts from 1 on."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_grpo.errors import UserError
from lit_grpo.run.steps import counts_as_evaluation, number_from_one
from lit_grpo.utils.spelling import nearest

HELD_OUT = "val/"
"""Beginning of the keys that an evaluation logs."""


class LoggedMoment(Callback):
    """Callback that lets stock callbacks look at a metric when it is logged, not at the end of the epoch.

    A run is one epoch, at whose end Lightning would ask most of them once. ``EarlyStopping`` on a metric of training is
    asked after each rollout that logs it, on ``val/...`` after each evaluation, and ``ModelCheckpoint`` on a metric of
    training compares after each rollout, unless it is given ``every_n_train_steps`` or ``train_time_interval``. A key
    that neither a rollout nor an evaluation logs ends the run after the first of them. An evaluation of all held-out
    questions before training (``num_sanity_val_steps: -1``) is logged as step 0.
    """

    def __init__(self) -> None:
        self._asked: set[str] = set()
        """Kinds of keys ("train", "val") of which is known that all that are watched are logged."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._asked = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number_from_one(trainer)
        if not trainer.enable_validation or not sum(_batches(trainer)):
            for callback, key in _watched(trainer):
                if key.startswith(HELD_OUT):
                    raise UserError(
                        f"{type(callback).__name__} watches {key!r}, and nothing is evaluated during this fit",
                        where="trainer.callbacks",
                        remedy="add a set to data.val, and trainer.val_check_interval: 10 for every tenth rollout; or "
                        "watch a metric of training, such as reward",
                    )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # An evaluation alone is logged under the number of rollouts that the weights were trained on.
        if trainer.state.fn != "fit":
            loop: Any = trainer.fit_loop.epoch_loop
            loop._batches_that_stepped = int(getattr(pl_module, "policy_version", loop._batches_that_stepped))

    on_test_start = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" and not trainer.fit_loop.epoch_loop.batch_progress.total.ready:
            trainer.fit_loop.epoch_loop._batches_that_stepped = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._check_keys(trainer, "train")
        for callback in _of(trainer, EarlyStopping):
            # A rollout that lacks the key logs NaN under it, which is no value that went bad.
            value = trainer.callback_metrics.get(callback.monitor)
            if _is_of_training(callback) and value is not None and not math.isnan(float(value)):
                callback._run_early_stopping_check(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning drops what is logged then. The untrained policy is step 0: rollouts count from 1.
        result: Any = getattr(pl_module, "evaluation", None)
        if result is not None and counts_as_evaluation(trainer):
            for logger in trainer.loggers:
                logger.log_metrics(result.metrics(), step=0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._check_keys(trainer, "val")

    def _check_keys(self, trainer: Trainer, kind: str) -> None:
        if kind in self._asked or getattr(trainer, "fast_dev_run", False):
            return
        self._asked.add(kind)
        for callback, key in _watched(trainer):
            # Only where something is watched: reading them makes Lightning compute what is still being accumulated.
            known = trainer.callback_metrics
            if key not in known and key.startswith(HELD_OUT) == (kind == "val"):
                raise _unknown(callback, key, [str(name) for name in known])


def watch_in_time(trainer: Trainer) -> None:
    """Let the stock callbacks of a Trainer look when something is logged; before their ``setup``, which decides it."""
    for callback in _of(trainer, EarlyStopping):
        _ask_in_time(callback)
    for callback in _of(trainer, ModelCheckpoint):
        _save_in_time(callback)


def _of(trainer: Trainer, cls: type) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, cls)]  # type: ignore[attr-defined]


def _batches(trainer: Trainer) -> list[float]:
    count = trainer.num_val_batches
    return list(count) if isinstance(count, list) else [count]


def _watched(trainer: Trainer) -> list[tuple[Any, str]]:
    """Return (callback, key) of those that cannot do without their metric."""
    found = [(one, one.monitor) for one in _of(trainer, EarlyStopping) if one.strict]
    return found + [
        (one, one.monitor) for one in _of(trainer, ModelCheckpoint) if one.monitor not in (None, "step", "epoch")
    ]


def _unknown(callback: Any, key: str, known: list[str]) -> UserError:
    near = nearest(key, known) or nearest(key.replace("_", "/", 1), known)
    listed = ", ".join(sorted(name for name in known if "/" not in name or name.startswith(HELD_OUT))[:12])
    name = type(callback).__name__
    return UserError(
        f"{name} watches {key!r}, which nothing logs",
        where="trainer.callbacks",
        remedy=(f"did you mean {near!r}?" if near else f"there are {listed} and those of docs/metrics.md")
        + ("; strict: false if a callback of your own logs it later" if isinstance(callback, EarlyStopping) else ""),
    )


def _is_of_training(callback: Any) -> bool:
    return not callback.monitor.startswith(HELD_OUT)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in the place of a hook."""


def _ask_in_time(callback: Any) -> None:
    if _is_of_training(callback):
        # Asked by LoggedMoment alone: each value counts once against the patience.
        callback.on_train_epoch_end = callback.on_validation_end = _nothing
    elif callback._check_on_train_epoch_end is None:
        # Lightning takes `val_check_interval: 1` for "once an epoch".
        callback._check_on_train_epoch_end = False


def _save_in_time(callback: Any) -> None:
    interval: timedelta | None = callback._train_time_interval
    key, steps = callback.monitor, callback._every_n_train_steps
    if key is not None and key.startswith(HELD_OUT):
        if callback._save_on_train_epoch_end is None:
            callback._save_on_train_epoch_end = False
    elif key is not None and interval is None and (callback._save_on_train_epoch_end, steps) == (None, 0):
        callback._every_n_train_steps, callback._every_n_epochs = 1, 0
    if interval is not None and not hasattr(callback.on_train_batch_end, "by_time"):
        callback.on_train_batch_end = _by_time(callback, interval)


def _by_time(callback: Any, interval: timedelta) -> Any:
    """Return the hook of a checkpoint that is saved every so often, which Lightning leaves out for this module."""

    def on_train_batch_end(trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        due = time.monotonic() - (callback._last_time_checked or 0.0) >= interval.total_seconds()
        # Rank 0 decides for all: saving needs all of them.
        if not trainer.strategy.broadcast(due) or callback._should_skip_saving_checkpoint(trainer):
            return
        callback._last_time_checked = time.monotonic()
        candidates = callback._monitor_candidates(trainer)
        if callback.monitor is not None and callback.monitor not in candidates:
            callback._defer_save_until_validation = True
            return
        callback._save_topk_checkpoint(trainer, candidates)
        callback._save_last_checkpoint(trainer, candidates)

    on_train_batch_end.by_time = True  # type: ignore[attr-defined]
    return on_train_batch_end
