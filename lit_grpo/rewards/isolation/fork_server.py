"""The process that forks the workers of :mod:`lit_grpo.rewards.isolation.pool`.

It is run as a script, with the standard library alone. It imports the function once (SymPy takes 1.5 s), then a new
worker costs one fork, about 10 ms. It has a single thread, so forking is safe, and it is the only one to reap its
children, so it can never kill a process that took over an id. It ends, and its workers with it, when the pool
closes the control socket, which the kernel does at the latest when the pool's process dies, however it dies.

Messages on the control socket, in: the set-up as JSON, then ``start`` followed by one descriptor, or ``kill <pid>``;
out: an empty message or the text of an error, then the process id after each ``start``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main(control_fd: int, parent: int) -> None:
    """Serve the control socket ``control_fd`` until it is closed or the process ``parent`` is gone."""
    with socket.socket(fileno=control_fd) as control, Connection(os.dup(control_fd)) as messages:
        try:
            setup = json.loads(messages.recv_bytes())
        # The program was ended, by Ctrl-C for example, while this process was starting.
        except (EOFError, ConnectionError):
            return
        sys.path[:] = setup["path"]
        try:
            function, prepare = _import(setup["module"], setup["function"], setup["preload"])
        except BaseException:
            messages.send_bytes(traceback.format_exc(limit=-4).encode())
            return
        messages.send_bytes(b"")
        die_with_parent = _die_with_parent()
        children: set[int] = set()
        try:
            # A closed socket tells of the pool's end at once; a new parent tells of it even where another process holds
            # a copy of the socket.
            while os.getppid() == parent:
                _reap(children)
                if not messages.poll(_POLL_SECONDS):
                    continue
                command, _, pid = messages.recv_bytes().partition(b" ")
                if command == b"kill":
                    _kill(int(pid), children)
                    continue
                _, (fd,), _, _ = socket.recv_fds(control, 1, 1)
                child = os.fork()
                if child == 0:
                    messages.close()
                    control.close()
                    die_with_parent()
                    _serve(Connection(fd), function, setup["memory"], setup["max_bytes"], prepare)
                children.add(child)
                os.close(fd)
                messages.send_bytes(str(child).encode())
        except (EOFError, OSError):
            # The pool is gone.
            pass
        finally:
            for child in list(children):
                _kill(child, children)


# Its own import by path: this file is run as a script, before lit_grpo can be imported.
def _import(module: str, name: str, preload: str | None) -> tuple[Callable[[Any], Any], Callable[[], None] | None]:
    if preload is not None:
        importlib.import_module(preload)
    imported = importlib.import_module(module)
    warm_up = getattr(imported, "warm_up", None)
    if callable(warm_up):
        warm_up()
    return getattr(imported, name), getattr(imported, "start_worker", None)


def _serve(
    connection: Connection,
    function: Callable[[Any], Any],
    memory: int | None,
    max_bytes: int,
    prepare: Callable[[], None] | None,
) -> None:
    """Serve items in a worker, one in and one result out, until the pool hangs up. Never returns."""
    try:
        # With a process group of its own, whatever the worker starts is killed with it.
        os.setsid()
        _limit(memory)
        if prepare is not None:
            prepare()
        while True:
            item = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_result(function, item, max_bytes))
    except (EOFError, OSError):
        pass
    finally:
        # Not sys.exit: the copy must not run what its parent has registered to do at its own exit.
        os._exit(0)


def _result(function: Callable[[Any], Any], item: Any, max_bytes: int) -> bytes:
    # JSON, not pickle: only plain values can leave, and nothing that a worker sends can run code in the pool.
    try:
        result = json.dumps({"value": function(item)}).encode()
        # A short result is written in one piece, so the pool need not wait for the rest of a message.
        if len(result) <= max_bytes:
            return result
        error = f"the result has {len(result)} bytes, more than {max_bytes}"
    except BaseException as raised:
        # Type and place only: the message may hold an object whose repr never ends.
        frame = traceback.extract_tb(raised.__traceback__, limit=-1)[0]
        error = f"{type(raised).__name__} at {frame.filename}:{frame.lineno}"
    return json.dumps({"error": error[:1000]}).encode()


def _limit(memory: int | None) -> None:
    try:
        import resource
    except ImportError:
        return
    # A worker that crashes must not leave a file of its whole memory behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _die_with_parent() -> Callable[[], object]:
    """Return what a worker calls to be killed when this process dies, on Linux; elsewhere this process kills it."""
    if sys.platform != "linux":
        return lambda: None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(pid: int, children: set[int]) -> None:
    # A child that is reaped already must not be killed: its id may be another process's by now.
    if pid in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        # By itself too: it may not have come to setsid yet.
        os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.discard(pid)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
