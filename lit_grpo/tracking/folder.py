"""The place of a run on disk, whatever logger is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


REPORT_FILE = "report.html"
"""The page that ``lit-grpo report`` and the end of a fit write into the folder of a run."""


def run_folder(trainer: Trainer) -> Path:
    """The folder of the run, equal on all ranks; call it on all of them.

    The logger's folder if it has one (:class:`lit_grpo.tracking.RunLogger` always has), else ``default_root_dir``.
    """
    logger = run_logger(trainer)
    if logger is not None:
        return Path(trainer.strategy.broadcast(str(logger.run_dir)))
    return Path(trainer.log_dir or trainer.default_root_dir)


def run_logger(trainer: Trainer) -> Any:
    """The trainer's :class:`lit_grpo.tracking.RunLogger`, or None."""
    from lit_grpo.tracking.mlflow_logger import RunLogger

    return next((logger for logger in trainer.loggers if isinstance(logger, RunLogger)), None)


def shown(path: Path) -> str:
    """The path as a person would type it from where they are."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
