"""The lock on a run's folder: one process writes a run, and one that died leaves a mark that others can tell.

The file ``run.lock`` holds the process, its host and the time. What counts is the operating system's lock on it, which
ends with the process however that ends, so that a lock that is left behind never has to be removed by hand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError

LOCK_FILE = "run.lock"

# The operating system's lock belongs to the process: within it, this set tells two runs apart. It also guards against
# opening the file again, since closing any of a process's descriptors of a file gives up its lock.
_held: set[Path] = set()
_held_lock = threading.Lock()


class FolderLock:
    """The lock on the folder of a run; not taken before :meth:`take`.

    Args:
        folder: folder of the run, which must exist when the lock is taken.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / LOCK_FILE
        self._descriptor: int | None = None
        self._owner = 0

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        # A process that was forked inherits the object and not the lock.
        return self._descriptor is not None and self._owner == os.getpid()

    def take(self) -> None:
        """Take the lock; one of a process that is dead is taken over.

        Raises:
            UserError: another run has it; the message names its process and host.
        """
        owner = self.try_take()
        if owner is not None:
            raise UserError(
                f"another run is going on in this folder: {_described(owner)}",
                where=str(self.path.parent),
                remedy="wait for it or end it, or choose another folder (trainer.logger.run_name)",
            )

    def try_take(self) -> dict[str, Any] | None:
        """Take the lock if it is free.

        Returns:
            None if it was taken, else what is known of the process that has it.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.held:
            return None
        with _held_lock:
            if self.path in _held:
                return {"pid": os.getpid(), "host": socket.gethostname()}
            # Not followed if it is a link: it would be written through.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            while True:
                descriptor = os.open(self.path, flags, 0o644)
                try:
                    owner = _lock(descriptor)
                    if owner is not None:
                        os.close(descriptor)
                        return owner
                    # Whoever had it may have removed the file between our opening and locking it.
                    if _same_file(descriptor, self.path):
                        break
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
            self._descriptor, self._owner = descriptor, os.getpid()
            _held.add(self.path)
            return None

    def release(self, *, leave_file: bool = False) -> None:
        """Give up the lock and remove its file; does nothing where it is not held.

        Args:
            leave_file: keep the file, as it stays behind where the process dies.
        """
        if not self.held:
            return
        assert self._descriptor is not None
        with _held_lock:
            if not leave_file:
                # Where the file cannot be removed, it is known for a dead one as well.
                with contextlib.suppress(OSError):
                    self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self.path)


def _lock(descriptor: int) -> dict[str, Any] | None:
    """Lock an open file, or return who has locked it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        note = _read(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return note
        # A file system without locks: what the file says is all there is.
        return note if note and not _is_dead(note) else None
    return None


def _read(descriptor: int) -> dict[str, Any]:
    try:
        note = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _is_dead(note: dict[str, Any]) -> bool:
    """Tell whether a process is known to have ended; of another host nothing is known."""
    if note.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(note["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError, TypeError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _described(note: dict[str, Any]) -> str:
    if not note:
        return "a process that has only just begun"
    return f"process {note.get('pid', '?')} on {note.get('host', '?')}"
