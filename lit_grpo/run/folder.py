"""The folder of a run and the interface of the logger that makes it, whatever logger is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


REPORT_FILE = "report.html"
"""Name of the page that ``lit-grpo report`` and the end of a fit write into the folder of a run."""


class RunRecord(ABC):
    """Interface of a logger that gives the run a folder and notes why it ended.

    :class:`lit_grpo.tracking.RunLogger` implements it; callbacks look for this class and so need no tracking code.
    """

    @property
    @abstractmethod
    def run_dir(self) -> Path | None:
        """Folder of the run, created at the first use; None on ranks other than 0."""

    @abstractmethod
    def mark_stopped(self, reason: str) -> None:
        """Note that the run is being stopped on purpose, with the reason in one sentence."""

    @abstractmethod
    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Attach tags to the run."""

    # Not abstract: a logger that keeps whatever it is given has nothing to do here.
    def continue_from(self, step: int) -> None:  # noqa: B027
        """Take note that the steps from ``step`` on are made (again): what was recorded of them is replaced."""


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of the run, equal on all ranks, each of which must call this.

    It is the folder of a :class:`RunRecord` among the loggers, else ``trainer.log_dir``, else ``default_root_dir``.
    """
    logger = run_logger(trainer)
    if logger is not None:
        # Rank 0 alone makes the folder and sends its path: a name from the clock would differ from rank to rank.
        return Path(trainer.strategy.broadcast(str(logger.run_dir)))
    return Path(trainer.log_dir or trainer.default_root_dir)


def run_logger(trainer: Trainer) -> Any:
    """Return the first of the trainer's loggers that is a :class:`RunRecord`, or None."""
    return next((logger for logger in trainer.loggers if isinstance(logger, RunRecord)), None)


def shown(path: Path) -> str:
    """Write a path as a person would type it: relative if it is below the current folder."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
