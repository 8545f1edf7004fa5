"""The place of a run on disk, whatever logger is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


REPORT_FILE = "report.html"
"""The page that ``lit-grpo report`` and the end of a fit write into the folder of a run."""


class RunRecord(ABC):
    """A logger that gives the run a folder and is told how the run ended: :class:`lit_grpo.tracking.RunLogger`."""

    @property
    @abstractmethod
    def run_dir(self) -> Path | None:
        """Folder of the run, made at the first use; None on ranks other than 0."""

    @abstractmethod
    def mark_stopped(self, reason: str) -> None:
        """Note that the run is being stopped on purpose, and why (one sentence)."""

    @abstractmethod
    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Attach tags to the run."""


def run_folder(trainer: Trainer) -> Path:
    """The folder of the run, equal on all ranks; call it on all of them.

    The logger's folder if it has one (:class:`lit_grpo.tracking.RunLogger` always has), else ``default_root_dir``.
    """
    logger = run_logger(trainer)
    if logger is not None:
        return Path(trainer.strategy.broadcast(str(logger.run_dir)))
    return Path(trainer.log_dir or trainer.default_root_dir)


def run_logger(trainer: Trainer) -> Any:
    """The first of the trainer's loggers that is a :class:`RunRecord`, or None."""
    return next((logger for logger in trainer.loggers if isinstance(logger, RunRecord)), None)


def shown(path: Path) -> str:
    """The path as a person would type it from where they are."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
