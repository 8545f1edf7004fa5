"""Run a command until it ends or the script does, however that ends; then leave none of its processes behind.

Run as a script, by path and with the standard library alone; :func:`kept` does it:

    python keeper.py GRACE_SECONDS COMMAND...

Standard input is a pipe whose other end the script holds: where it is closed, by SIGKILL too, the command is ended.
Processes that the command leaves become children of this one, those in sessions of their own too, as the ranks of
torchrun are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def kept(
    command: Sequence[str], *, grace: float, held: Sequence[int] = (), **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that is ended, with all that it started, at the end of the block or of this process.

    Args:
        command: whose exit code the process has, or 128 and its signal.
        grace: seconds that it has to end, and as many again each generation that outlives its parent.
        held: descriptors, of locks, that stay open until nothing of the command is left.
        options: of ``Popen``.
    """
    keeper = [sys.executable, "-I", "-S", __file__, str(grace), *command]
    # In a session of its own, Ctrl-C of a terminal is the script's alone.
    process = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True, pass_fds=tuple(held), **options)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def main(grace: float, command: list[str]) -> int:
    """Run the command, and return its exit code."""
    # A handler, unlike SIG_IGN, is not inherited by the command.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignored)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None and not select.select([0], [], [], _POLL_SECONDS)[0]:
        pass
    if child.poll() is None:
        # Lightning's ranks are in the group and hear of it too; torchrun tells its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    _end_rest(grace)
    return code if code >= 0 else 128 - code


def _end_rest(grace: float) -> None:
    """Wait for what the command has left, and kill what does not end.

    One generation after another: an engine's supervisor ends with its rank, and removes the weights in shared memory.
    """
    end = time.monotonic() + grace
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:
            continue
        if time.monotonic() >= end:
            for left in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            end = time.monotonic() + grace
        time.sleep(_POLL_SECONDS)


def _children() -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            # After the name, which may have spaces: state and parent.
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(status.parent.name))
    return found


def _ignored(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
