"""Runs one program against its tests, in a worker of :class:`lit_grpo.rewards.isolation.pool.WorkerPool`.

Each worker has a nursery: a process forked at its birth, before it has seen any test, which forks the candidates. So no
candidate has the memory of a process that held tests. Standard library only.
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
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypedDict

from lit_grpo.rewards.code import roles, values  # loaded before anything is confined
from lit_grpo.rewards.isolation.sandbox import Limits, confine

_MOST_OUTPUT = 1_000_000
_GRACE = 0.05


class Job(TypedDict):
    """One program and its tests."""

    source: str
    tests: list[str]
    entry: str | None
    cases: list[tuple[str, str]]
    """Standard input and the output that is wanted."""
    seconds: float
    """On the clock, for everything."""
    memory: int
    partly: bool


class _Nursery:
    """Where candidates are born, seen from the worker."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            line = os.dup2(theirs.fileno(), 3) if theirs.fileno() != 3 else 3
            os.closerange(4, 65_536)  # the pool's connection among them
            _nurse(socket.socket(fileno=line))
        theirs.close()
        self._line = ours

    def birth(self, files: list[int], limits: Limits, script: bool, partly: bool) -> int:
        """A new candidate with the channel and, for a script, standard input and output; its process id."""
        message = b"f" + struct.pack("qqqbb", *limits, script, partly)
        socket.send_fds(self._line, [message], files)
        return int(struct.unpack("q", self._line.recv(8))[0])

    def end(self, pid: int) -> int:
        """Kill it, if it is not gone; how it ended (exit status of wait)."""
        self._line.send(b"k" + struct.pack("q", pid))
        return int(struct.unpack("q", self._line.recv(8))[0])


_nursery: _Nursery | None = None


def start_worker() -> None:
    """Called by the pool in a new worker, before its first item."""
    global _nursery
    _nursery = _Nursery()


def warm_up() -> None:
    """Load what confined processes can no longer load, or only slowly."""
    import bisect, collections, copy, datetime, decimal, fractions, functools, heapq, itertools  # noqa: E401, F401, I001
    import math, operator, random, re, statistics, string, typing, unittest  # noqa: E401, F401


def _nurse(line: socket.socket) -> NoReturn:
    _quiet()
    os.environ.clear()  # keys and tokens
    while True:
        message, files, _, _ = socket.recv_fds(line, 64, 3)
        if not message:
            os._exit(0)
        if message[:1] == b"k":
            (pid,) = struct.unpack("q", message[1:])
            line.send(struct.pack("q", _end(pid)))
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
        line.send(struct.pack("q", pid))


def _become_candidate(files: list[int], limits: Limits, script: bool, partly: bool) -> None:
    channel = _only(files)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    confine(limits, partly=partly)
    roles.candidate(channel, script)


def _only(files: list[int]) -> Connection:
    """Close everything but the first file, which becomes the channel, and standard input and output, if given."""
    null = os.open(os.devnull, os.O_RDWR)
    kept = [os.dup(file) for file in files]
    spare = [os.dup2(kept[i], 100 + i) for i in range(len(kept))]
    os.dup2(spare[1] if len(spare) > 1 else null, 0)
    os.dup2(spare[2] if len(spare) > 2 else null, 1)
    os.dup2(null, 2)
    channel = os.dup2(spare[0], 3)
    os.closerange(4, 65_536)
    return Connection(channel)


def _quiet() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(null, file)


def _end(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def run(job: Job) -> dict[str, Any]:
    """Tests passed, tests in all, whether time ran out, and why the program could not be loaded, if so."""
    deadline = time.monotonic() + job["seconds"]
    limits = Limits(job["memory"], int(job["seconds"]) + 1)
    if job["cases"]:
        return _run_cases(job, limits, deadline)
    return _run_tests(job, limits, deadline)


def _run_tests(job: Job, limits: Limits, deadline: float) -> dict[str, Any]:
    assert _nursery is not None
    theirs, ours = socket.socketpair()
    reading, writing = os.pipe()
    with theirs, ours:
        candidate = _nursery.birth([theirs.fileno()], limits, False, job["partly"])
        theirs.close()
        examiner = os.fork()
        if examiner == 0:
            try:
                _become_examiner(ours.fileno(), writing, job, limits)
            finally:
                os._exit(1)
    os.close(writing)
    found: dict[str, Any] = {"passed": 0, "total": len(job["tests"]), "timed_out": False, "error": ""}
    heard = 0
    try:
        with Connection(reading) as results:
            while heard < len(job["tests"]):
                left = deadline - time.monotonic()
                if left <= 0 or not wait([results], left):
                    found["timed_out"] = True
                    break
                message = values.read(results.recv_bytes(10_000))
                if "load" in message:
                    found["error"] = message["load"]
                    break
                found["passed"] += message["passed"] is True
                heard += 1
    except (EOFError, OSError):
        found["error"] = "the program ended its process"
    finally:
        _end(examiner)
        _nursery.end(candidate)
    return found


def _become_examiner(channel: int, results: int, job: Job, limits: Limits) -> None:
    os.dup2(channel, 100)
    os.dup2(results, 101)
    _quiet()
    os.dup2(100, 3)
    os.dup2(101, 4)
    os.closerange(5, 65_536)
    confine(limits, partly=job["partly"])
    roles.examiner(Connection(3), Connection(4), job["source"], job["tests"], job["entry"])


def _run_cases(job: Job, limits: Limits, deadline: float) -> dict[str, Any]:
    found: dict[str, Any] = {"passed": 0, "total": len(job["cases"]), "timed_out": False, "error": ""}
    for given, wanted in job["cases"]:
        output, status = _run_script(job, given, limits, deadline)
        if time.monotonic() >= deadline:
            found["timed_out"] = True
            break
        found["passed"] += output is not None and status == 0 and _same_output(output, wanted)
    return found


def _run_script(job: Job, given: str, limits: Limits, deadline: float) -> tuple[str | None, int]:
    assert _nursery is not None
    theirs, ours = socket.socketpair()
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    candidate = _nursery.birth([theirs.fileno(), in_read, out_write], limits, True, job["partly"])
    theirs.close()
    os.close(in_read)
    os.close(out_write)
    channel = Connection(ours.detach())
    try:
        with channel, contextlib.suppress(OSError):
            channel.send_bytes(job["source"].encode("utf-8", "surrogatepass"))
        output = _talk(in_write, out_read, given.encode("utf-8", "surrogatepass"), deadline)
    finally:
        status = _after(candidate, min(deadline, time.monotonic() + _GRACE))
    return output, status


def _after(candidate: int, until: float) -> int:
    assert _nursery is not None
    while time.monotonic() < until:
        # A child of the nursery: its end shows in /proc, and only the nursery can collect it.
        with contextlib.suppress(OSError), open(f"/proc/{candidate}/stat", "rb") as file:  # noqa: PTH123
            if file.read().rpartition(b")")[2].split()[:1] == [b"Z"]:
                break
        time.sleep(0.001)
    return _nursery.end(candidate)


def _talk(in_write: int, out_read: int, given: bytes, deadline: float) -> str | None:
    """Feed standard input and collect standard output; None if time or room ran out. Closes both."""
    collected = bytearray()
    with selectors.DefaultSelector() as selector:
        os.set_blocking(in_write, False)
        os.set_blocking(out_read, False)
        selector.register(in_write, selectors.EVENT_WRITE)
        selector.register(out_read, selectors.EVENT_READ)
        open_files = {in_write, out_read}

        def close(file: int) -> None:
            selector.unregister(file)
            os.close(file)
            open_files.discard(file)

        try:
            while out_read in open_files:
                left = deadline - time.monotonic()
                if left <= 0 or len(collected) > _MOST_OUTPUT:
                    return None
                for key, _ in selector.select(left):
                    if key.fd == in_write:
                        try:
                            given = given[os.write(in_write, given[:65_536]) :] if given else given
                        except OSError:
                            given = b""
                        if not given:
                            close(in_write)
                    elif chunk := os.read(out_read, 65_536):
                        collected += chunk
                    else:
                        close(out_read)
            return collected.decode("utf-8", "replace")
        finally:
            for file in list(open_files):
                close(file)


def _same_output(output: str, wanted: str) -> bool:
    """Line for line, space at line ends and empty lines at the end aside."""
    return list(_lines(output)) == list(_lines(wanted))


def _lines(text: str) -> Iterator[str]:
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    yield from lines


resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
