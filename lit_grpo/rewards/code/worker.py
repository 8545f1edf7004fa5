"""One program run against its tests, in a worker of :class:`lit_grpo.rewards.isolation.pool.WorkerPool`.

Each worker has a process factory: a process that is forked when the worker starts, before it has seen any test, and
that forks the candidates. So no candidate has the memory of a process that held tests. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypedDict

# At the top, because a confined process can no longer read them.
from lit_grpo.rewards.code import roles, values
from lit_grpo.rewards.isolation.sandbox import Limits, confine
from lit_grpo.rewards.isolation.threads import ThreadSupervisor, wait_beside

_MAX_OUTPUT_BYTES = 1_000_000
# Between the end of its output and its exit a program needs a moment, or it would be killed and counted as failed. How
# long a moment is depends on the machine, and on what else it does: a twentieth of a second lost right answers.
_EXIT_GRACE_SECONDS = 1.0


class Job(TypedDict):
    """A program with its tests, as a worker gets it."""

    source: str
    tests: list[str]
    entry: str | None
    """Name of the function that ``check`` of the tests is called with."""
    cases: list[tuple[str, str]]
    """Pairs of standard input and wanted output."""
    seconds: float
    """Time on the clock for all tests together."""
    memory: int
    """Bytes of address space for each process."""
    partly: bool
    """True to run without the layers of the sandbox that this machine lacks."""


class _ProcessFactory:
    """Worker's handle of the process that forks candidates: one message to spawn, one to kill."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            descriptor = os.dup2(theirs.fileno(), 3) if theirs.fileno() != 3 else 3
            # Among the files that are closed is the worker's connection to the pool, on which a candidate could answer.
            os.closerange(4, 65_536)
            _serve_spawns(socket.socket(fileno=descriptor))
        theirs.close()
        self._control = ours

    def spawn(self, files: list[int], limits: Limits, script: bool, partly: bool) -> int:
        """Fork a candidate and return its process id.

        Args:
            files: channel of the candidate, channel of the supervisor of its threads and, for a script, standard input
                and output.
            limits: resources that the candidate may use.
            script: run the program as a script, not as a module whose functions are called.
            partly: True to run without the layers of the sandbox that this machine lacks.
        """
        message = b"f" + struct.pack("qqqbb", *limits, script, partly)
        socket.send_fds(self._control, [message], files)
        return int(struct.unpack("q", self._control.recv(8))[0])

    def end(self, pid: int) -> int:
        """Kill a candidate, if it still runs, and return its exit status in the form of ``os.waitpid``."""
        self._control.send(b"k" + struct.pack("q", pid))
        return int(struct.unpack("q", self._control.recv(8))[0])


_process_factory: _ProcessFactory | None = None


def start_worker() -> None:
    """Start this worker's process factory; called by the pool in a new worker, before its first item."""
    global _process_factory
    _process_factory = _ProcessFactory()


def warm_up() -> None:
    """Load what confined processes can no longer load, or only slowly."""
    import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, itertools  # noqa: E401, F401, I001
    import math, operator, random, re, statistics, string, typing, unittest  # noqa: E401, F401


def _serve_spawns(control: socket.socket) -> NoReturn:
    _silence_standard_streams()
    # Keys and tokens stand in the environment, and every candidate is a copy of this process.
    os.environ.clear()
    while True:
        message, files, _, _ = socket.recv_fds(control, 64, 4)
        if not message:
            os._exit(0)
        if message[:1] == b"k":
            (pid,) = struct.unpack("q", message[1:])
            control.send(struct.pack("q", _kill_and_reap(pid)))
            continue
        *numbers, script, partly = struct.unpack("qqqbb", message[1:])
        pid = os.fork()
        if pid == 0:
            try:
                _become_candidate(files, Limits(*numbers), bool(script), bool(partly))
            finally:
                os._exit(1)
        for file in files:
            os.close(file)
        control.send(struct.pack("q", pid))


def _become_candidate(files: list[int], limits: Limits, script: bool, partly: bool) -> None:
    channel, threads = _keep_only(files)
    # The candidate inherits the handlers of the process that forks it, and is to have none of them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    confine(limits, partly=partly, threads=threads)
    threads.close()
    roles.candidate(channel, script)


def _keep_only(files: list[int]) -> tuple[Connection, socket.socket]:
    """Close every file but the two channels (the first ones given), and standard input and output where they are."""
    null = os.open(os.devnull, os.O_RDWR)
    # Copies first, far above all targets: a file may already stand on the number that another one is to take.
    kept = [os.dup(file) for file in files]
    spare = [os.dup2(kept[i], 100 + i) for i in range(len(kept))]
    os.dup2(spare[2] if len(spare) > 2 else null, 0)
    os.dup2(spare[3] if len(spare) > 3 else null, 1)
    os.dup2(null, 2)
    channel, threads = os.dup2(spare[0], 3), os.dup2(spare[1], 4)
    os.closerange(5, 65_536)
    return Connection(channel), socket.socket(fileno=threads)


def _silence_standard_streams() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(null, file)


def _kill_and_reap(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def run(job: Job) -> dict[str, Any]:
    """Run one job in a worker.

    Returns:
        ``passed`` and ``total`` tests, ``timed_out``, and ``error``: why the program could not be loaded, or "".
    """
    deadline = time.monotonic() + job["seconds"]
    # A second more of CPU time than on the clock: the clock, which can name a timeout, is to end the program first.
    limits = Limits(job["memory"], int(job["seconds"]) + 1)
    if job["cases"]:
        return _run_cases(job, limits, deadline)
    return _run_tests(job, limits, deadline)


def _run_tests(job: Job, limits: Limits, deadline: float) -> dict[str, Any]:
    assert _process_factory is not None
    theirs, ours = socket.socketpair()
    reading, writing = os.pipe()
    of_candidate, of_runner = ThreadSupervisor(), ThreadSupervisor()
    with theirs, ours:
        files = [theirs.fileno(), of_candidate.given.fileno()]
        candidate = of_candidate.pid = _process_factory.spawn(files, limits, False, job["partly"])
        theirs.close()
        test_runner = of_runner.pid = os.fork()
        if test_runner == 0:
            try:
                _become_test_runner(ours.fileno(), writing, of_runner.given.fileno(), job, limits)
            finally:
                os._exit(1)
    os.close(writing)
    of_candidate.given.close()
    of_runner.given.close()
    result: dict[str, Any] = {"passed": 0, "total": len(job["tests"]), "timed_out": False, "error": ""}
    num_reported = 0
    try:
        with Connection(reading) as results:
            while num_reported < len(job["tests"]):
                left = deadline - time.monotonic()
                if left <= 0 or not wait_beside([of_candidate, of_runner], [results], left):
                    result["timed_out"] = True
                    break
                # Only the test runner writes here, so the candidate cannot report a test as passed.
                message = values.read(results.recv_bytes(10_000))
                if "load" in message:
                    result["error"] = message["load"]
                    break
                result["passed"] += message["passed"] is True
                num_reported += 1
    except (EOFError, OSError):
        result["error"] = "the program ended its process"
    finally:
        _kill_and_reap(test_runner)
        _process_factory.end(candidate)
        of_candidate.close()
        of_runner.close()
    return result


def _become_test_runner(channel: int, results: int, threads: int, job: Job, limits: Limits) -> None:
    # Copies first, far above all targets, as in _keep_only.
    spare = [os.dup2(os.dup(file), 100 + i) for i, file in enumerate((channel, results, threads))]
    _silence_standard_streams()
    for i, file in enumerate(spare):
        os.dup2(file, 3 + i)
    os.closerange(6, 65_536)
    with socket.socket(fileno=5) as asked:
        confine(limits, partly=job["partly"], threads=asked)
    roles.test_runner(Connection(3), Connection(4), job["source"], job["tests"], job["entry"])


def _run_cases(job: Job, limits: Limits, deadline: float) -> dict[str, Any]:
    result: dict[str, Any] = {"passed": 0, "total": len(job["cases"]), "timed_out": False, "error": ""}
    for stdin, expected in job["cases"]:
        output, status = _run_script(job, stdin, limits, deadline)
        if time.monotonic() >= deadline:
            result["timed_out"] = True
            break
        result["passed"] += output is not None and status == 0 and _same_output(output, expected)
    return result


def _run_script(job: Job, stdin: str, limits: Limits, deadline: float) -> tuple[str | None, int]:
    assert _process_factory is not None
    theirs, ours = socket.socketpair()
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    threads = ThreadSupervisor()
    files = [theirs.fileno(), threads.given.fileno(), in_read, out_write]
    candidate = threads.pid = _process_factory.spawn(files, limits, True, job["partly"])
    theirs.close()
    threads.given.close()
    os.close(in_read)
    os.close(out_write)
    channel = Connection(ours.detach())
    try:
        with channel, contextlib.suppress(OSError):
            channel.send_bytes(job["source"].encode("utf-8", "surrogatepass"))
        output = _exchange(in_write, out_read, stdin.encode("utf-8", "surrogatepass"), deadline, threads)
    finally:
        status = _wait_for_exit(candidate, min(deadline, time.monotonic() + _EXIT_GRACE_SECONDS), threads)
        threads.close()
    return output, status


def _wait_for_exit(candidate: int, until: float, threads: ThreadSupervisor) -> int:
    assert _process_factory is not None
    while time.monotonic() < until:
        # The candidate is a child of the factory, which alone can wait for it. To everyone its end shows in /proc, as
        # state Z.
        with contextlib.suppress(OSError), open(f"/proc/{candidate}/stat", "rb") as file:  # noqa: PTH123
            if file.read().rpartition(b")")[2].split()[:1] == [b"Z"]:
                break
        wait_beside([threads], [], 0.001)
    return _process_factory.end(candidate)


def _exchange(in_write: int, out_read: int, stdin: bytes, deadline: float, threads: ThreadSupervisor) -> str | None:
    """Feed standard input and collect standard output; return None if time or room ran out. Closes both files."""
    collected = bytearray()
    with selectors.DefaultSelector() as selector:
        os.set_blocking(in_write, False)
        os.set_blocking(out_read, False)
        selector.register(in_write, selectors.EVENT_WRITE)
        selector.register(out_read, selectors.EVENT_READ)
        open_files = {in_write, out_read}
        asking = -1

        def close(file: int) -> None:
            selector.unregister(file)
            os.close(file)
            open_files.discard(file)

        try:
            while out_read in open_files:
                left = deadline - time.monotonic()
                if left <= 0 or len(collected) > _MAX_OUTPUT_BYTES:
                    return None
                # The supervisor begins with a channel, and goes on with the descriptor that came over it.
                if asking != (descriptor := threads.fileno() if threads.open else -1):
                    if asking >= 0:
                        selector.unregister(asking)
                    if descriptor >= 0:
                        selector.register(descriptor, selectors.EVENT_READ)
                    asking = descriptor
                for key, _ in selector.select(left):
                    if key.fd == asking:
                        threads.serve()
                    elif key.fd == in_write:
                        # A program that ends without having read its input breaks the pipe, which is no failure.
                        try:
                            stdin = stdin[os.write(in_write, stdin[:65_536]) :] if stdin else stdin
                        except OSError:
                            stdin = b""
                        if not stdin:
                            close(in_write)
                    elif chunk := os.read(out_read, 65_536):
                        collected += chunk
                    else:
                        close(out_read)
            return collected.decode("utf-8", "replace")
        finally:
            for file in list(open_files):
                close(file)


def _same_output(output: str, expected: str) -> bool:
    """Compare line for line, without space at line ends and empty lines at the end."""
    return list(_lines(output)) == list(_lines(expected))


def _lines(text: str) -> Iterator[str]:
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    yield from lines


# A candidate that crashes must not leave a file of its whole memory behind; forked processes inherit this.
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
