"""What the record of a run needs of Lightning's loop, so that no kill leaves a step out of it or puts one in twice."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.run.folder import run_logger


class TrackedRun(Callback):
    """Callback that tells the logger at which step a run goes on, and logs each step before the run can be saved.

    Lightning logs a step after its callbacks. A run that is killed after its checkpoint and before that would go on
    behind the step, which no line would ever tell of.
    """

    def __init__(self) -> None:
        self._begun = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = False

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
            # Every rollout, whatever `log_every_n_steps` is: it thins the other loggers, and takes nothing from the record.
            values = dict(trainer._logger_connector.metrics["log"])
            if values:
                metrics = {key: float(value) for key, value in values.items()}
                logger.log_metrics(
                    {**metrics, "epoch": float(trainer.current_epoch)},
                    step=trainer.fit_loop.epoch_loop._batches_that_stepped,
                )
