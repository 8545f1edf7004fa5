"""What the record of a run needs of Lightning's loop: what it is made of, and each step once, whatever kills it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger

from lit_grpo.run.folder import run_logger
from lit_grpo.tracking.environment import environment_tags, system_metrics
from lit_grpo.tracking.parameters import log_parameters, settings_of_module
from lit_grpo.tracking.save_config import SaveRunConfig

log = logging.getLogger(__name__)


class TrackedRun(Callback):
    """Callback that tells the loggers what a run is made of and at which step it goes on, and logs each step in time.

    Lightning logs a step after its callbacks. A run that is killed after its checkpoint and before that would go on
    behind the step, which no line would ever tell of. The record of the run gets every rollout, whatever
    ``log_every_n_steps`` is, and beside it how busy the machine is (``system/...``).
    """

    def __init__(self) -> None:
        self._begun = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(trainer, "fast_dev_run", False) or not trainer.is_global_zero:
            return
        logger, datamodule = run_logger(trainer), getattr(trainer, "datamodule", None)
        # From the command line the whole configuration is there.
        configured = any(isinstance(one, SaveRunConfig) for one in trainer.callbacks)  # type: ignore[attr-defined]
        if not configured and trainer.loggers:
            log_parameters(trainer.loggers, settings_of_module(pl_module, datamodule))
        tags = environment_tags() if trainer.loggers else {}
        for one in trainer.loggers:
            if isinstance(one, MLFlowLogger):
                _tag(one, tags)
        if logger is not None and getattr(logger, "wanted", True):
            logger.set_tags(tags)
            sets = getattr(datamodule, "prompt_sets", None)
            if sets is not None and hasattr(logger, "log_inputs"):
                logger.log_inputs({name: one.identity() for name, one in sets().items()}, _model(pl_module))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = False
        # The first call says nothing yet.
        system_metrics()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not in an earlier hook: what a checkpoint says of the step is one behind where it was saved within a batch.
        if not self._begun:
            self._begun = True
            logger = run_logger(trainer)
            if logger is not None and not getattr(trainer, "fast_dev_run", False):
                logger.continue_from(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Checkpoints come after all other callbacks. The logger leaves out what Lightning then logs once more.
        logger = run_logger(trainer)
        if logger is not None and not getattr(trainer, "fast_dev_run", False):
            values = dict(trainer._logger_connector.metrics["log"])
            if values:
                metrics = {key: float(value) for key, value in values.items()} | system_metrics()
                logger.log_metrics(
                    {**metrics, "epoch": float(trainer.current_epoch)},
                    step=trainer.fit_loop.epoch_loop._batches_that_stepped,
                )


def _tag(logger: MLFlowLogger, tags: Mapping[str, str]) -> None:
    """Give tags to Lightning's own MLflow logger, whose server may refuse them."""
    try:
        for key, value in tags.items():
            logger.experiment.set_tag(logger.run_id, key, value[:5000])
    # Whatever the client raises: the run goes on without them.
    except Exception as error:
        log.warning("MLFlowLogger takes no tags: %s: %s", type(error).__name__, error)


def _model(pl_module: LightningModule) -> dict[str, Any]:
    """Return name and settings of the model that a run begins with."""
    settings = dict(pl_module.hparams).get("policy") or {}
    path = settings.get("path") if isinstance(settings, dict) else None
    return {"name": str(path).rstrip("/").rpartition("/")[2] if path else "tiny", "path": path, "settings": settings}
