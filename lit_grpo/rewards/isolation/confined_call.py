"""One call in a confined process of its own, made from a worker of :class:`lit_grpo.rewards.isolation.pool.WorkerPool`.

For functions that look at text which nobody has read and may be made to run it. The process is forked for this call
alone, so what such text changes in it is gone with the next call, and confined before it sees the text. It needs the
standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
from collections.abc import Callable, Sequence

from lit_grpo.rewards.isolation.sandbox import Limits, confine

_RESULT = struct.Struct("=d")
_RESULT_FILE = 3
_MAX_ERROR_BYTES = 300


class ConfinedCallError(RuntimeError):
    """Error for a call that raised, or whose process ended without an answer."""


def call_confined(
    function: Callable[[], float], limits: Limits, readable: Sequence[str] = (), partly: bool = False
) -> float:
    """Return the number that a function computes in a new, confined process.

    Time on the clock is not limited here: the pool kills the worker, and the process with it.

    Args:
        function: called once, in the new process.
        limits: resources that it may use.
        readable: files and folders that it may read besides those of the sandbox.
        partly: go on without the layers of the sandbox that this machine lacks.

    Raises:
        ConfinedCallError: the function raised, or its process died.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _answer(function, writing, limits, readable, partly)
        finally:
            # Not sys.exit: the copy must not run what the worker has registered to do at its own exit.
            os._exit(1)
    os.close(writing)
    try:
        with open(reading, "rb", buffering=0) as results:  # noqa: PTH123
            # One read: the answer is shorter than what a pipe takes in one piece, and whoever sends more is not heard.
            message = results.read(1 + _MAX_ERROR_BYTES) or b""
    finally:
        # Killed whatever it answered: a thread that it has left behind would go on.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if message[:1] == b"v" and len(message) == 1 + _RESULT.size:
        return float(_RESULT.unpack(message[1:])[0])
    raise ConfinedCallError(message[1:].decode("utf-8", "replace") or "its process ended without an answer")


def _answer(function: Callable[[], float], writing: int, limits: Limits, readable: Sequence[str], partly: bool) -> None:
    # Nothing of the worker is kept: its connection to the pool could be answered on, its environment read.
    _keep_only(writing)
    os.environ.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    confine(limits, partly=partly, readable=readable)
    try:
        message = b"v" + _RESULT.pack(float(function()))
    except BaseException as error:
        # The type alone: the message may hold an object whose repr never ends.
        message = b"e" + type(error).__name__.encode("utf-8", "replace")[:_MAX_ERROR_BYTES]
    os.write(_RESULT_FILE, message)


def _keep_only(file: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    # A copy first, far above all targets: the file may itself stand on the number of another one.
    kept = os.dup2(file, 100)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(kept, _RESULT_FILE)
    os.closerange(_RESULT_FILE + 1, 65_536)
