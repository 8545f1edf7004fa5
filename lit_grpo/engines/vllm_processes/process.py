"""A process of its own for one vLLM engine: started with a connection, and ended even when this process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lit_grpo.engines.vllm_server.launch import ROOT, SUPERVISOR, without_launcher
from lit_grpo.engines.vllm_server.supervisor import LOG_NOTE, PASSED

WORKER = "lit_grpo.engines.vllm_processes.worker"
_STOP_SECONDS = 10.0
_TIME = struct.Struct("@ll")
"""The system's ``struct timeval``: seconds and microseconds."""
_LOG_TAIL_LINES = 15


class EngineLog:
    """One file for what all engine processes of a rank write; removed at the end, unless a message has named it.

    Args:
        scratch: folder whose removal takes the file with it where this process was killed; None: it stays then.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        descriptor, name = tempfile.mkstemp(prefix="lit-grpo-vllm-", suffix=".log")
        os.close(descriptor)
        self.path = Path(name)
        self._note = None if scratch is None else scratch / LOG_NOTE
        if self._note is not None:
            self._note.write_text(name, encoding="utf-8")
        self._remove = weakref.finalize(self, _remove_log, self.path, os.getpid())

    def tail(self) -> str:
        """Return the end of the file, and keep it from now on."""
        self._remove.detach()
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        lines = self.path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
        return f"The end of the log of the engine processes ({self.path}):\n  " + "\n  ".join(lines)

    def close(self) -> None:
        """Remove the file, unless a message has named it."""
        self._remove()


def _remove_log(path: Path, owner: int) -> None:
    # A process that this one has forked ends by itself, and leaves the file.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


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

    It is started by the supervisor of :mod:`lit_grpo.engines.vllm_server`, which ends with the pipe that this process
    holds, however that comes to its end, and takes everything with it. A signal at the death of the parent alone
    (``PR_SET_PDEATHSIG``) would be sent when the thread ends that started the process, and a rollout thread does.
    Processes that this one forks do not have the pipe, and for them this one was never started.

    Args:
        env: variables added to this process's environment; None leaves one out.
        scratch: folder that is removed when this process ends, however it ends.
        log: takes what the process writes to its standard output and error.
        patience: seconds after which a message that the process has begun to write or to read has failed.
    """

    def __init__(self, env: Mapping[str, str | None], scratch: Path, log: EngineLog, patience: float = 300.0) -> None:
        wanted = {**without_launcher(os.environ), **env}
        self._env = {name: value for name, value in wanted.items() if value is not None}
        # On its path, so that it finds lit_grpo in an uninstalled checkout too.
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), self._env.get("PYTHONPATH")]))
        self._scratch, self._log, self._patience = scratch, log, patience
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        # A run may be given up while a thread is still starting its processes.
        self._lock = threading.RLock()
        self._closed = False
        with _launching:
            _all.add(self)

    def start(self) -> None:
        """Start the process; one that runs is ended first.

        Raises:
            Gone: it was closed.
        """
        with self._lock:
            if self._closed:
                raise Gone
            self.stop()
            with _launching:
                self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        _limit(ours, self._patience)
        with theirs, self._log.path.open("ab") as log:
            command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(SUPERVISOR), str(self._scratch), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self._env, PASSED: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def forget(self) -> None:
        """Let go of the process, in one that was forked from the process that started it."""
        # Another thread may have held it, and is not here.
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        nothing = os.open(os.devnull, os.O_RDWR)
        # The numbers stay taken until the objects give them up.
        if connection is not None:
            os.dup2(nothing, connection.fileno(), inheritable=False)
        if process is not None:
            assert process.stdin is not None
            os.dup2(nothing, process.stdin.fileno(), inheritable=False)
            # It is not this process's child, and is not waited for.
            process.returncode = 0
        os.close(nothing)

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

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
            process, self._process = self._process, None
        if connection is not None:
            _hang_up(connection)
        if process is None:
            return
        if kill:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        # Any byte asks the supervisor to end the process, which has mostly ended already: its connection was closed.
        with contextlib.suppress(OSError):
            process.stdin.write(b"x")
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        # The group outlives its leader if the supervisor itself was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait_gone(self, seconds: float) -> bool:
        """Wait until the process has ended, at most ``seconds``, and tell whether it has."""
        end = time.monotonic() + seconds
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


_all: weakref.WeakSet[EngineProcess] = weakref.WeakSet()
_launching = threading.RLock()
"""Held while a process has descriptors that :meth:`EngineProcess.forget` does not know of: nothing is forked then."""


def _forget_all() -> None:
    for process in list(_all):
        process.forget()
    _launching.release()


# A reward's pool of processes would keep engines and weights for as long as it lives itself.
os.register_at_fork(before=_launching.acquire, after_in_parent=_launching.release, after_in_child=_forget_all)


def close_all(processes: Sequence[EngineProcess]) -> None:
    """End processes, which close their engines beside each other. Safe to call twice."""
    # All are told before the first is waited for.
    for process in processes:
        with contextlib.suppress(Gone):
            process.send(("close",))
    for process in processes:
        process.close()
