"""Supervision of the threads of a confined process: the kernel asks before each, and no more than a few are alive.

Memory does not bound threads, which may share one stack, and neither does a limit of the user's processes, which does
not hold for root and counts everything else of the user. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

MAX_THREADS = 64
"""Threads of one process that may be alive. While several ask at once, there may for a moment be twice as many."""

# struct seccomp_notif and seccomp_notif_resp, and the requests that read and write them.
_QUESTION, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1


class ThreadSupervisor:
    """Supervisor of one confined process; it answers whenever :func:`wait_beside` is called with it.

    Attributes:
        pid: the process; set when it is known.
    """

    def __init__(self) -> None:
        self._channel, self.given = socket.socketpair()
        """Second: the socket for ``confine(threads=...)``, to be closed here once the process has it."""
        self._listener = -1
        self.pid = 0

    @property
    def open(self) -> bool:
        """True while questions may come."""
        return self._listener >= 0 or self._channel.fileno() >= 0

    def fileno(self) -> int:
        """Return the descriptor to wait for: of the channel, later of the questions."""
        return self._listener if self._listener >= 0 else self._channel.fileno()

    def serve(self) -> None:
        """Do what has come: take the descriptor of the questions, or answer one."""
        if self._listener < 0:
            try:
                _, files, _, _ = socket.recv_fds(self._channel, 1, 1)
            except OSError:
                files = []
            self._channel.close()
            if files:
                self._listener = files[0]
            return
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        events = poll.poll(0)
        if not events:
            return
        if not events[0][1] & select.POLLIN:
            # The process is gone.
            self.close()
            return
        self._answer()

    def _answer(self) -> None:
        question = bytearray(_QUESTION.size)
        # The thread that asked may have been killed meanwhile.
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _RECEIVE, question, True)
            number = _QUESTION.unpack(question)[0]
            allowed = self._count() < MAX_THREADS
            answer = _ANSWER.pack(number, 0, 0 if allowed else -errno.EAGAIN, _CONTINUE if allowed else 0)
            fcntl.ioctl(self._listener, _SEND, answer)

    def _count(self) -> int:
        try:
            return sum(1 for _ in Path("/proc", str(self.pid), "task").iterdir())
        except OSError:
            return MAX_THREADS

    def close(self) -> None:
        """Close the files; a question that is open is then answered by an error. Safe to call twice."""
        self._channel.close()
        self.given.close()
        if self._listener >= 0:
            os.close(self._listener)
            self._listener = -1


def wait_beside(
    supervisors: Sequence[ThreadSupervisor], readers: Sequence[Connection | int], seconds: float
) -> list[Connection | int]:
    """Wait until one of the readers can be read, and answer the supervisors' questions meanwhile.

    Returns:
        The readers that can be read; empty when the time is over.
    """
    end = monotonic() + seconds
    while True:
        asking = [supervisor for supervisor in supervisors if supervisor.open]
        waited: list[Any] = [*readers, *asking]
        ready = wait(waited, max(0.0, end - monotonic()))
        for supervisor in asking:
            if supervisor in ready:
                supervisor.serve()
        found = [reader for reader in readers if reader in ready]
        if found or monotonic() >= end:
            return found
