"""A folder through which weights go to processes of vLLM, and which is gone when whoever made it is.

The process that makes one holds a lock in it, which ends with that process. Whatever was to remove the folder may have
been killed as well; so whoever makes the next one removes those whose lock is free. A folder that has none, or was made
by another user or on another host, is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from lit_grpo.engines.vllm_server.supervisor import remove

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "lit-grpo-"
_LOCK = "owner.lock"

_made: dict[Path, tuple[int, int]] = {}
"""Folders that were made and not yet removed: the process that made each, and the descriptor of its lock."""


def make_scratch_folder(chosen: str | None, weight_bytes: int) -> Path:
    """Make a new folder below ``chosen``; None: in shared memory if the weights fit twice, else for temporary files.

    Folders there whose owners were killed are removed first.
    """
    if chosen is not None:
        Path(chosen).mkdir(parents=True, exist_ok=True)
        where = Path(chosen).resolve()
        _remove_abandoned(where)
    else:
        where = Path(tempfile.gettempdir()).resolve()
        _remove_abandoned(where)
        if SHARED_MEMORY.is_dir():
            _remove_abandoned(SHARED_MEMORY)
            where = SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > 2 * weight_bytes else where
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    _lock(folder)
    return folder


def remove_scratch_folder(folder: Path) -> None:
    """Remove a folder with all that is in it. Safe to call twice.

    Processes that this one has forked own none of its folders: there it does nothing.
    """
    owner, descriptor = _made.get(folder, (os.getpid(), None))
    if owner != os.getpid():
        return
    shutil.rmtree(folder, ignore_errors=True)
    _made.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _lock(folder: Path) -> None:
    being_made = folder / f"{_LOCK}.new"
    descriptor = os.open(being_made, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # This kind of lock is not handed on to processes that are forked.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, socket.gethostname().encode())
        # Others look for it under this name alone, and so find it locked.
        being_made.rename(folder / _LOCK)
    except OSError:
        # A file system without locks, or a full one: without the file nobody takes the folder for abandoned.
        being_made.unlink(missing_ok=True)
        os.close(descriptor)
        return
    _made[folder] = os.getpid(), descriptor


def _remove_abandoned(where: Path) -> None:
    for lock in where.glob(f"{_PREFIX}*/{_LOCK}"):
        # Closing the file of a lock of one's own would give it up.
        if _made.get(lock.parent, (None, 0))[0] == os.getpid():
            continue
        # Removed by another process meanwhile, or locked.
        with contextlib.suppress(OSError):
            if lock.parent.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between hosts a lock may not count.
                if os.read(descriptor, 1024) == socket.gethostname().encode():
                    remove(str(lock.parent))
            finally:
                os.close(descriptor)
