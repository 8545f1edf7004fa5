"""The callback that writes the report at the end of a fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.errors import StopRun
from lit_grpo.run.folder import run_folder, run_logger, shown
from lit_grpo.run.steps import number_from_one
from lit_grpo.run.stop import KEYBOARD, stop_reason

log = logging.getLogger(__name__)

State = Literal["finished", "stopped", "interrupted", "broken"]


class ReportWriter(Callback):
    """Callback that writes ``report.html`` and ``report/*.png`` into the run folder, and sends the page to MLflow.

    A report that fails never fails the run but is a warning of one line. It needs the record of the run in its folder,
    which :class:`lit_grpo.LitGRPO` has whatever the loggers are; for another module it takes a
    :class:`lit_grpo.tracking.RunLogger`.

    Attributes:
        report_path: path of the page, once it is written.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self.report_path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._folder = run_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number_from_one(trainer)

    # Lightning calls `teardown` after a fit that ended by itself, and only `on_exception` after any other.

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        reason = stop_reason(trainer)
        if reason is None:
            self._write(trainer, "finished", "finished")
        elif reason.monitor == KEYBOARD:
            self._write(trainer, "interrupted", "interrupted")
        else:
            self._write(trainer, "stopped", f"stopped by {reason.monitor}", reason.reason)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            text = str(exception).strip().partition("\n")[0][:300]
            name = type(exception).__name__
            if isinstance(exception, StopRun):
                self._write(trainer, "stopped", "stopped", text)
            else:
                self._write(trainer, "broken", "broke off", f"{name}: {text}" if text else name)

    def _write(self, trainer: Trainer, state: State, ending: str, reason: str = "") -> None:
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
            from lit_grpo.report.run import Ending, read_folder

            # A run that ended before its first step has written nothing yet.
            if not (self._folder / "metrics.jsonl").exists():
                return
            run = read_folder(self._folder)
            # Where nothing was trained on, the error that ended the run says more.
            if not run.steps and not run.records:
                return
            ending += f" after {run.steps[-1]} rollouts" if run.steps else ""
            log.debug("writing the report")
            text = f"{ending}: {reason}" if reason else ending
            self.report_path = write_report(run, self._folder, Ending(state, text))
            log.debug("the report is written")
            logger.log_artifact(self.report_path)
        # A run is not lost for want of a report.
        except Exception as error:
            what, command = f"{type(error).__name__}: {error}", f"lit-grpo report {shown(self._folder)}"
            log.warning("The report could not be written (%s). To try again: %s", what, command)
