"""A process that ends this one when it should have ended by itself, whatever it is doing.

Python runs the handler of a signal in the main thread, between two of its instructions. A main thread that waits in a
library, or a thread that never gives back the interpreter's lock, keeps it from running, and then a run could be ended
by SIGKILL alone. So the kernel's half of each handler, which needs no lock, writes the number of the signal into a pipe
(``signal.set_wakeup_fd``), and a small process of its own reads it, counts, and kills this one in the end.

That process is this file, run as a script, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

END_SECONDS = 9.5
"""Seconds from SIGTERM, or the second Ctrl-C, until a run of one process is killed: it is over within 10."""
END_SECONDS_RANKS = 60.0
"""Seconds from SIGTERM with several processes, which have to agree on where to stop."""
_SAVE_SECONDS = 60.0
_AFTER_SAVE_SECONDS = 1.0
_SAVING, _SAVED = 83, 84  # no signal has a number above 64
_POLL_SECONDS = 1.0

_process: subprocess.Popen[bytes] | None = None
_writing = -1
_previous = -1
_handlers: dict[int, Any] = {}


def arm(seconds: float = END_SECONDS) -> None:
    """Start to watch this process: SIGTERM ends it in ``seconds``, the second Ctrl-C in 10.

    Nothing happens where it is watched already, and outside the main thread, where Python takes no handlers.
    """
    global _process, _writing, _previous
    if _process is not None or threading.current_thread() is not threading.main_thread():
        return
    reading, _writing = os.pipe()
    # Written by the signal handler, which must never wait.
    os.set_blocking(_writing, False)
    _process = subprocess.Popen(
        # -I and -S: none of the user's modules, and a start in some 10 ms.
        [sys.executable, "-I", "-S", __file__, str(reading), str(os.getpid()), str(seconds)],
        pass_fds=[reading],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Ctrl-C goes to the whole group of the terminal, and is not for this one.
        start_new_session=True,
    )
    os.close(reading)
    _handlers.update({number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)})
    _previous = signal.set_wakeup_fd(_writing, warn_on_full_buffer=False)


def disarm() -> None:
    """Stop to watch this process, and put back the handlers that were there before."""
    global _process, _writing
    if _process is None:
        return
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number, handler in _handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(_previous)
    os.close(_writing)
    _process.wait()
    _process, _writing = None, -1


def saving() -> None:
    """Say that a checkpoint is being written: where the end is near already, it is put off once, by a minute."""
    _tell(_SAVING)


def saved() -> None:
    """Say that the checkpoint is written: what is left to do has the time that was left before."""
    _tell(_SAVED)


def _tell(number: int) -> None:
    if _process is not None:
        with contextlib.suppress(OSError):
            os.write(_writing, bytes([number]))


def _forget() -> None:
    # A forked child has its parent's handlers, and must not count its own signals as the parent's.
    global _process, _writing
    if _process is not None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        os.close(_writing)
        _process, _writing = None, -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def watch(reading: int, parent: int, seconds: float) -> None:
    """Read signal numbers until the pipe is closed, the process ``parent`` is gone, or it has to be killed."""
    interrupts, deadline, first, put_off = 0, float("inf"), float("inf"), False
    what = ""
    while os.getppid() == parent:
        left = max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))
        if not select.select([reading], [], [], left)[0]:
            if time.monotonic() >= deadline:
                break
            continue
        numbers = os.read(reading, 4096)
        if not numbers:
            return
        for number in numbers:
            interrupts += number == signal.SIGINT
            if deadline == float("inf") and (number == signal.SIGTERM or interrupts >= 2):
                what = "SIGTERM" if number == signal.SIGTERM else "the second Ctrl-C"
                limit = seconds if number == signal.SIGTERM else END_SECONDS
                deadline = first = time.monotonic() + limit
            elif number == _SAVING and deadline < float("inf") and not put_off:
                deadline, put_off = max(deadline, time.monotonic() + _SAVE_SECONDS), True
            elif number == _SAVED and put_off:
                deadline = max(first, time.monotonic() + _AFTER_SAVE_SECONDS)
    if os.getppid() == parent:
        # What is drawn on a terminal hides its cursor.
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        print(f"{cursor}lit-grpo: not ended by itself after {what}, and killed", file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
