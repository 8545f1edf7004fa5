"""A process below a supervisor: it ends with this one, however that ends, and is none of those that this one forks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lit_grpo.engines.vllm_server.launch import SUPERVISOR
from lit_grpo.engines.vllm_server.supervisor import PASSED

launching = threading.RLock()
"""Held while this process has descriptors that no :class:`Holder` knows of yet: nothing is forked then."""


class Holder(Protocol):
    """Something with descriptors that keep another process alive."""

    def forget(self) -> None:
        """Let go of the process, in one that was forked from the process that started it."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def let_go_when_forked(holder: Holder) -> None:
    """Have ``holder.forget()`` called in every process that this one forks."""
    with launching:
        _holders.add(holder)


def _forget_all() -> None:
    for holder in list(_holders):
        holder.forget()
    launching.release()


# A reward's pool of processes would keep engines and weights for as long as it lives itself.
os.register_at_fork(before=launching.acquire, after_in_parent=launching.release, after_in_child=_forget_all)


class Supervised:
    """One process that can be started again and again, with everything that it starts itself.

    The supervisor ends with the pipe that this process holds, however that comes to its end, and takes everything with
    it. A signal at the death of the parent alone (``PR_SET_PDEATHSIG``) would be sent when the thread ends that started
    the process, and a rollout thread does. Processes that this one forks do not have the pipe, and for them this one
    was never started.

    Args:
        scratch: folder that is removed when this process ends, however it ends.
        log: takes what the process writes to its standard output and error.
        stop_seconds: the process may take so long to end before it is killed.
    """

    def __init__(self, scratch: Path, log: Path, stop_seconds: float) -> None:
        self._scratch, self._log, self._stop_seconds = scratch, log, stop_seconds
        self._popen: subprocess.Popen[bytes] | None = None
        # A run may be given up while a thread is still starting its processes.
        self._lock = threading.Lock()
        let_go_when_forked(self)

    def start(self, command: Sequence[str], env: Mapping[str, str], passed: Sequence[int] = ()) -> None:
        """Start the process; one that runs is to be stopped first.

        Args:
            command: what is to run.
            env: its whole environment.
            passed: descriptors that it inherits, under the same numbers.
        """
        with launching, self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", str(SUPERVISOR), str(self._scratch), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**env, PASSED: " ".join(map(str, passed))},
                pass_fds=tuple(passed),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Number of the supervisor, and of the group of processes that it leads; one must have been started."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        # Looked at once: another thread may stop it meanwhile.
        process = self._popen
        return process is not None and process.poll() is None

    def stop(self, *, kill: bool = False) -> None:
        """End the process and everything it started. Safe to call twice.

        Args:
            kill: at once, since it would not hear.
        """
        with self._lock:
            process, self._popen = self._popen, None
        if process is None:
            return
        if kill:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        # Any byte asks the supervisor to end the process. It may be gone already.
        with contextlib.suppress(OSError):
            process.stdin.write(b"x")
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._stop_seconds)
        # The group outlives its leader if the supervisor itself was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def forget(self) -> None:
        """Let go of the process, in one that was forked from the process that started it."""
        # Another thread may have held it, and is not here.
        self._lock = threading.Lock()
        process, self._popen = self._popen, None
        if process is None:
            return
        assert process.stdin is not None
        # A thread that is not here may have had the object too, which then never closes its pipe.
        replace_by_nothing(process.stdin.fileno())
        # It is not this process's child, and is not waited for.
        process.returncode = 0


def replace_by_nothing(descriptor: int) -> None:
    """Have a descriptor stand for nothing; its number stays taken until the object gives it up that has it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
