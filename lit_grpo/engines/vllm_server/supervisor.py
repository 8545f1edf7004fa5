"""Run a command until it ends or the parent does, whichever comes first; then leave nothing of it behind.

Run as a script, by path, so that it starts in no time and imports nothing of this package:

    python vllm_server_supervisor.py SCRATCH_FOLDER COMMAND...

Standard input is a pipe that the parent holds open. A byte in it means: end the command. The pipe ends with the parent,
however that ends, SIGKILL included; then ``SCRATCH_FOLDER`` (weights in shared memory) is removed too. Whatever ended
the command, the whole process group is killed. The parent starts this script as leader of a group of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

PASSED = "LIT_GRPO_PASSED_DESCRIPTORS"
"""Environment variable with the numbers of descriptors that the command inherits."""
GRACE_SECONDS = 10.0
"""How long the command may take to end before it is killed."""


def main(scratch: str, command: list[str]) -> int:
    # The SIGTERM that the group gets below is meant for the command.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Connections of the parent to the command; a copy of them here would hide the command's end from the parent.
    passed = [int(number) for number in os.environ.pop(PASSED, "").split()]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_signals, pass_fds=passed)
    for number in passed:
        os.close(number)
    orphaned = threading.Event()
    threading.Thread(target=_watch_parent, args=(child, orphaned), daemon=True).start()
    code = child.wait()
    if orphaned.is_set():
        shutil.rmtree(scratch, ignore_errors=True)
    # The command's own children (vLLM's engine process) outlive a killed command. This kills this process too.
    print(f"supervisor: the server ended with code {code}", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    return 1  # not reached


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C is for the parent, which ends the command in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _watch_parent(child: subprocess.Popen[bytes], orphaned: threading.Event) -> None:
    if not os.read(0, 1):
        orphaned.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGTERM)
        end = time.monotonic() + GRACE_SECONDS
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
