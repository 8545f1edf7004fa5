"""The checkpoints of a run on disk: whether one is whole, and which to take in the place of one that is not."""

from __future__ import annotations

import re
from pathlib import Path

from lit_grpo.errors import UserError
from lit_grpo.run.folder import shown
from lit_grpo.utils.integrity import DamagedError, check

ROLLBACK_FOLDER = "rollback"
"""Subfolder of the run's folder with the checkpoints that a rollback returns to."""
_NAME = re.compile(r"rollout-(\d+)\.ckpt")
_checked: dict[tuple[str, int, int], bool] = {}
"""What was found whole in this process, by path, size and time of change: hashing takes a second a gigabyte."""


def check_whole(path: Path) -> bool:
    """Check a checkpoint before it is loaded.

    Returns:
        Whether it has a seal, see :mod:`lit_grpo.utils.integrity`.

    Raises:
        UserError: it is damaged or no checkpoint; the remedy names the newest whole one of the same run.
    """
    key = _key(path)
    if key not in _checked:
        try:
            _checked[key] = check(path)
        except DamagedError as error:
            raise damaged(path, str(error)) from error
    return _checked[key]


def damaged(path: Path, why: str) -> UserError:
    """Return the error of a checkpoint that cannot be used, with the newest one that can as its remedy."""
    good = newest_whole(path)
    return UserError(
        f"the checkpoint {shown(path)} cannot be used: {why}",
        where="ckpt_path",
        remedy=f"go on from {shown(good)}, the newest of this run that is whole"
        if good is not None
        else "there is no other whole one beside it: give a checkpoint of another run, or begin anew",
    )


def newest_whole(path: Path) -> Path | None:
    """Return the newest whole checkpoint beside ``path``, those to roll back to included; None if there is none."""
    folder = path.absolute().parent
    # last.ckpt and its like lead to one of the others.
    real = path.resolve()
    roots = {folder, folder.parent / ROLLBACK_FOLDER, folder.parent / "checkpoints"}
    found = [(int(match[1]), one) for root in roots if root.is_dir() for one in root.iterdir()
             if (match := _NAME.fullmatch(one.name)) and one.resolve() != real]  # fmt: skip
    # Of two after the same rollout the run's own comes first: it has what a rollback changed.
    for _, one in sorted(found, key=lambda entry: (entry[0], entry[1].parent.name != ROLLBACK_FOLDER), reverse=True):
        try:
            check(one)
        except DamagedError:
            continue
        return one
    return None


def _key(path: Path) -> tuple[str, int, int]:
    try:
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError:
        return str(path), -1, -1
    return str(path.resolve()), sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)
