"""The folder of a run and the interface of the logger that makes it, whatever logger is used."""

from __future__ import annotations

import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

RUNS = "runs"
"""Name of the folder of all runs, below the Trainer's ``default_root_dir``."""
ROOT_DIR = "trainer.default_root_dir"
"""Key of the folder that ``runs`` is in; without it that is the folder in which a command is typed."""
MOST_NAME_BYTES = 200
"""Longest name of a run: file systems take 255 bytes, and a number may be added."""
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

    It is the folder of a :class:`RunRecord` among the loggers. :class:`lit_grpo.LitGRPO` sees to it that there is one;
    for another module, without one, it is a folder ``runs/<date and time>`` in ``default_root_dir``, made here, so that
    no two runs have the same. With ``fast_dev_run``, which leaves nothing behind, it is a folder that goes with the
    process.
    """
    logger = run_logger(trainer)
    if logger is not None:
        # Rank 0 alone makes the folder and sends its path: a name from the clock would differ from rank to rank.
        return Path(trainer.strategy.broadcast(str(logger.run_dir)))
    if trainer not in _chosen:
        chosen = ""
        if trainer.is_global_zero and getattr(trainer, "fast_dev_run", False):
            _temporary[trainer] = tempfile.TemporaryDirectory(prefix="lit-grpo-fast-dev-run-")
            chosen = _temporary[trainer].name
        elif trainer.is_global_zero:
            chosen = str(_own_folder(Path(trainer.default_root_dir), _going_on.get(trainer)))
        _chosen[trainer] = Path(trainer.strategy.broadcast(chosen))
    return _chosen[trainer]


def goes_on_from(trainer: Trainer, checkpoint: Path) -> None:
    """Tell, before the fit, which checkpoint a run goes on from: Lightning itself says so only after the set-up."""
    _going_on[trainer] = checkpoint


# Asked for by many callbacks, and the answer must stay the same for all of them.
_chosen: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()
_going_on: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()
_temporary: WeakKeyDictionary[Any, tempfile.TemporaryDirectory[str]] = WeakKeyDictionary()


def _own_folder(root: Path, checkpoint: Path | None) -> Path:
    """Return the folder that a run goes on in, or make one that is no other run's."""
    runs = root / RUNS
    if checkpoint is not None and checkpoint.parent.name == "checkpoints":
        folder = checkpoint.parent.parent
        if folder.resolve().parent == runs.resolve():
            return folder
    return new_folder(runs, folder_name())


def folder_name() -> str:
    """Return the name of a run that has none: date and time."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def new_folder(root: Path, name: str) -> Path:
    """Create ``root/name``, with a number added if a run is there already.

    Raises:
        UserError: ten thousand numbers are taken.
        OSError: the folder cannot be made.
    """
    for number in range(1, 10_000):
        path = root / (name if number == 1 else f"{name}-{number}")
        # mkdir itself decides whether the name is free, so that two runs started at once get two folders.
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise UserError(f"{root / name} and 9999 more are taken", where="run_name", remedy="choose another run name")


def run_logger(trainer: Trainer) -> Any:
    """Return the first of the trainer's loggers that is a :class:`RunRecord`, or None."""
    return next((logger for logger in trainer.loggers if isinstance(logger, RunRecord)), None)


def check_place(root: Path | None, run_name: str | None) -> None:
    """Check that a run can have its folder; makes nothing.

    Args:
        root: folder of all runs, which may not be there yet; None: it is not known yet.
        run_name: name of the run and its folder; None: made from the clock.

    Raises:
        UserError: the name leads out of ``root`` or is none that a file system takes; or nothing can be made in
            ``root``.
    """
    key = "RunLogger.run_name"
    if run_name:
        parts = PurePath(run_name).parts
        if PurePath(run_name).is_absolute() or ".." in parts or not run_name.strip(" ./\\"):
            raise UserError(
                f"the run name {run_name!r} leads out of the folder of all runs, {root or RUNS}",
                where=key,
                remedy="give a plain name, and the folder of all runs with root",
            )
        if bad := next((c for c in run_name if not c.isprintable()), None):
            raise UserError(f"the run name {run_name!r} holds the character {bad!r}", where=key)
        if longest := next((p for p in parts if len(p.encode("utf-8", "replace")) > MOST_NAME_BYTES), None):
            raise UserError(
                f"the run name has {len(longest.encode('utf-8', 'replace'))} bytes",
                where=key,
                remedy=f"file systems take some 250: stay below {MOST_NAME_BYTES}",
            )
    if root is not None:
        check_can_be_made(root, "RunLogger.root")


def check_can_be_made(folder: Path, key: str) -> None:
    """Check that a folder is there or can be made, and can be written in; makes nothing.

    Args:
        folder: the folder.
        key: key of the configuration that names it.

    Raises:
        UserError: a file is in its way, or its nearest parent cannot be written in.
    """
    folder = folder.absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file, not a folder", where=key, remedy="give the path of a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"nothing can be written in {there}",
            where=key,
            remedy=f"give another folder, for example --{ROOT_DIR} {Path.home() / 'lit-grpo'}"
            if key == ROOT_DIR
            else "give another folder",
        )


def shown(path: Path) -> str:
    """Write a path as a person would type it: relative if it is below the current folder."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
