"""The report at the end of a fit."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.run.folder import run_folder, run_logger, shown
from lit_grpo.run.stop import KEYBOARD, stop_reason

log = logging.getLogger(__name__)


class ReportWriter(Callback):
    """Writes ``report.html`` and ``report/*.png`` into the run folder when a fit ends, and sends the page to MLflow.

    A report that fails never fails the run; it is said in one line. It needs the files of a
    :class:`lit_grpo.tracking.RunLogger`; with another logger nothing is written.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self.report_path: Path | None = None
        """The page, once it is written."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._folder = run_folder(trainer)

    # As with the summary: `teardown` comes after a fit that ended by itself, `on_exception` alone after any other.

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        reason = stop_reason(trainer)
        if reason is None:
            self._write(trainer, "finished")
        elif reason.monitor == KEYBOARD:
            self._write(trainer, "interrupted")
        else:
            self._write(trainer, f"stopped by {reason.monitor}", reason.reason)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            text = str(exception).strip().partition("\n")[0][:300]
            name = type(exception).__name__
            self._write(trainer, "broke off", f"{name}: {text}" if text else name)

    def _write(self, trainer: Trainer, how: str, why: str = "") -> None:
        logger = run_logger(trainer)
        if (
            not trainer.is_global_zero
            or logger is None
            or not logger.started
            or getattr(trainer, "fast_dev_run", False)
        ):
            return
        try:
            from lit_grpo.report.page import write_report
            from lit_grpo.report.run import read_folder

            run = read_folder(self._folder)
            if not run.steps and not run.records:
                return  # nothing was trained on: the error says more
            how += f" after {run.steps[-1]} rollouts" if run.steps else ""
            self.report_path = write_report(run, self._folder, f"{how}: {why}" if why else how)
            logger.log_artifact(self.report_path)
        except Exception as error:  # a run is not lost for want of a report
            what, command = f"{type(error).__name__}: {error}", f"lit-grpo report {shown(self._folder)}"
            log.warning("The report could not be written (%s). To try again: %s", what, command)
