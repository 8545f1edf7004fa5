"""A process of its own for one vLLM engine: started with a connection, and ended even when this process is killed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lit_grpo.engines.vllm_server.launch import ROOT, without_launcher
from lit_grpo.engines.vllm_server.process_log import ProcessLog
from lit_grpo.engines.vllm_server.supervised import Supervised, launching, let_go_when_forked, replace_by_nothing

WORKER = "lit_grpo.engines.vllm_processes.worker"
_STOP_SECONDS = 10.0
_TIME = struct.Struct("@ll")
"""The system's ``struct timeval``: seconds and microseconds."""


class Gone(Exception):  # noqa: N818 - what happened to the process, and not yet a failure
    """The process has ended, or closed its connection."""


class Hung(Gone):
    """The process is there and does nothing."""


def _hang_up(connection: Connection) -> None:
    """Close a connection; a thread that waits for a message on it learns of that at once."""
    # Closing alone would leave that thread waiting, on a number that the next file to be opened gets.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    connection.close()


def _limit(line: socket.socket, seconds: float) -> None:
    # A process that is stopped in the middle of a message, or does not read, would block this one for ever.
    for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        line.setsockopt(socket.SOL_SOCKET, direction, _TIME.pack(*_parts(seconds)))


def _parts(seconds: float) -> tuple[int, int]:
    """Return whole seconds and the microseconds beside them; both 0 would stand for no limit."""
    whole, micro = divmod(max(1, round(seconds * 1e6)), 1_000_000)
    return whole, micro


class EngineProcess:
    """One process that can be started again and again, and the connection to it.

    It ends with this one, and is none of those that this one forks, see
    :class:`lit_grpo.engines.vllm_server.supervised.Supervised`.

    Args:
        env: variables added to this process's environment; None leaves one out.
        scratch: folder that is removed when this process ends, however it ends.
        log: takes what the process writes to its standard output and error.
        patience: seconds after which a message that the process has begun to write or to read has failed.
    """

    def __init__(self, env: Mapping[str, str | None], scratch: Path, log: ProcessLog, patience: float = 300.0) -> None:
        wanted = {**without_launcher(os.environ), **env}
        self._env = {name: value for name, value in wanted.items() if value is not None}
        # On its path, so that it finds lit_grpo in an uninstalled checkout too.
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), self._env.get("PYTHONPATH")]))
        self._patience = patience
        self._process = Supervised(scratch, log.path, _STOP_SECONDS)
        self._connection: Connection | None = None
        # A run may be given up while a thread is still starting its processes.
        self._lock = threading.RLock()
        self._closed = False
        let_go_when_forked(self)

    def start(self) -> None:
        """Start the process; one that runs is ended first.

        Raises:
            Gone: it was closed.
        """
        with self._lock:
            if self._closed:
                raise Gone
            self.stop()
            with launching:
                self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        _limit(ours, self._patience)
        with theirs:
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            self._process.start(command, self._env, [theirs.fileno()])
        self._connection = Connection(ours.detach())

    def forget(self) -> None:
        """Let go of the process, in one that was forked from the process that started it."""
        # Another thread may have held it, and is not here.
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is not None:
            replace_by_nothing(connection.fileno())

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process.running

    @property
    def environment(self) -> dict[str, str]:
        """All variables that the process has, or will have."""
        return dict(self._env)

    @property
    def patience(self) -> float:
        """Seconds after which a message that the process has begun to write or to read has failed."""
        return self._patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._patience = seconds
        if self._connection is not None:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                _limit(line, seconds)

    @property
    def connection(self) -> Connection:
        """The connection to the process, to wait for several of them at once.

        Raises:
            Gone: it is not running.
        """
        if self._connection is None:
            raise Gone
        return self._connection

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message.

        Raises:
            Gone: the process has ended, or does not read.
        """
        try:
            self.connection.send(message)
        except BlockingIOError as error:
            raise Hung from error
        except OSError as error:
            raise Gone from error

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        """Wait for the next message, at most ``seconds``.

        Raises:
            Gone: the process has ended, or is hung up on.
            TimeoutError: nothing came in time.
        """
        try:
            if seconds is not None and not self.connection.poll(seconds):
                raise TimeoutError
            message: tuple[Any, ...] = self.connection.recv()
        except TimeoutError:
            raise
        except BlockingIOError as error:
            raise Hung from error
        # What a process that is killed was just writing is cut anywhere.
        except (OSError, EOFError) as error:
            raise Gone from error
        return message

    def close(self) -> None:
        """End the process for good: a thread that is about to start it then finds it gone. Safe to call twice."""
        with self._lock:
            self._closed = True
            self.stop()

    def stop(self, kill: bool = False) -> None:
        """End the process and everything it started. Safe to call twice.

        Args:
            kill: at once, since it would not hear.
        """
        with self._lock:
            connection, self._connection = self._connection, None
        # The process mostly ends by this alone.
        if connection is not None:
            _hang_up(connection)
        self._process.stop(kill=kill)

    def wait_gone(self, seconds: float) -> bool:
        """Wait until the process has ended, at most ``seconds``, and tell whether it has."""
        end = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


def close_all(processes: Sequence[EngineProcess]) -> None:
    """End processes, which close their engines beside each other. Safe to call twice."""
    # All are told before the first is waited for.
    for process in processes:
        with contextlib.suppress(Gone):
            process.send(("close",))
    for process in processes:
        process.close()
