"""Run a command until it ends or the parent does, whichever comes first; then leave nothing of it behind.

Run as a script, by path, so that it starts in no time and imports nothing of this package:

    python supervisor.py SCRATCH_FOLDER [COMMAND...]

Standard input is a pipe that the parent holds open. A byte in it means: end the command. The pipe ends with the parent,
however that ends, SIGKILL included; then ``SCRATCH_FOLDER`` (weights in shared memory) is removed too. Whatever ended
the command, the whole process group is killed. The parent starts this script as leader of a group of its own.

A command that ends by itself leaves a supervisor without one, which waits for the byte or for the end of the parent:
that may be killed before it has noticed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

PASSED = "LIT_GRPO_PASSED_DESCRIPTORS"
"""Environment variable with the numbers of descriptors that the command inherits."""
LOG_NOTE = "log"
"""File in the scratch folder with the path of a log that is removed with it."""
GRACE_SECONDS = 10.0
"""How long the command may take to end before it is killed."""


def main(scratch: str, command: list[str]) -> int:
    # The SIGTERM that the group gets below is meant for the command.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not command:
        if _what_parent_did(None) == "ended":
            remove(scratch)
        return 0
    # Connections of the parent to the command; a copy of them here would hide the command's end from the parent.
    passed = [int(number) for number in os.environ.pop(PASSED, "").split()]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals, pass_fds=passed)
    for number in passed:
        os.close(number)
    threading.Thread(target=_watch_parent, args=(child,), daemon=True).start()
    code = child.wait()
    did = _what_parent_did(0)
    if did == "ended":
        remove(scratch)
    elif did == "nothing":
        # In a group of its own, since this one is killed.
        with contextlib.suppress(OSError):
            subprocess.Popen([sys.executable, "-I", __file__, scratch], start_new_session=True)
    # The command's own children (vLLM's engine process) outlive a killed command. This kills this process too.
    print(f"supervisor: the server ended with code {code}", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    return 1  # not reached


def remove(scratch: str) -> None:
    """Remove a scratch folder, and the log that it names."""
    with contextlib.suppress(OSError), open(os.path.join(scratch, LOG_NOTE), encoding="utf-8") as note:  # noqa: PTH118, PTH123
        os.unlink(note.read())  # noqa: PTH108
    shutil.rmtree(scratch, ignore_errors=True)


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C is for the parent, which ends the command in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _what_parent_did(seconds: float | None) -> str:
    """Return what has come of the parent after at most ``seconds``; None: wait for it.

    Returns:
        ``asked`` for the command's end, ``ended`` itself, or ``nothing``.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    came = poll.poll(None if seconds is None else seconds * 1000)
    if not came:
        return "nothing"
    # The byte is left where it is: the thread and the supervisor that comes after this one look for it too.
    return "asked" if came[0][1] & select.POLLIN else "ended"


def _watch_parent(child: subprocess.Popen[bytes]) -> None:
    _what_parent_did(None)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGTERM)
        end = time.monotonic() + GRACE_SECONDS
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
