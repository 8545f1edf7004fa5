"""A pool of worker processes that can be killed: no input, however hostile, costs more than its time limit.

Neither a signal alarm (main thread only) nor an executor (waits for the hung call on exit) can end a computation that
does not want to end. Here each item runs in a process of its own, which is killed when the limit is over. The workers
are forked by a small helper process that imports neither torch nor the caller's ``__main__``
(:mod:`lit_grpo.rewards.isolation.fork_server`), so a pool works beside torch threads, in daemonic processes and in
unguarded scripts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

# A worker is replaced after so many items, before what it has cached fills its memory limit.
_MAX_ITEMS_PER_WORKER = 2_000
_START_SECONDS = 120.0
_MAX_MESSAGE_BYTES = 20_000_000
_FOREVER = 1e9


class PoolError(RuntimeError):
    """Error for workers that cannot be started at all."""


class Outcome(NamedTuple):
    """Outcome of one item: what the function returned, or why it returned nothing."""

    status: Literal["ok", "timeout", "error", "crash"]
    """``ok``: the function returned. ``timeout``: its worker was killed at the limit. ``error``: the function raised.
    ``crash``: the worker died of itself (segfault, ``os._exit``, out of memory)."""
    value: Any = None
    """Return value of the function; None where it returned nothing."""
    seconds: float = 0.0
    """Time from the moment a worker took the item."""
    error: str = ""
    """What went wrong, for a person to read; empty for ``ok`` and ``timeout``."""


@dataclass
class _Task:
    payload: bytes
    future: Future[Outcome]
    limit: float


@dataclass
class _Worker:
    pid: int
    connection: Connection
    task: _Task | None = None
    started: float = 0.0
    served: int = 0


class WorkerPool:
    """Pool that runs a pure function on picklable items in parallel, each within a hard time limit.

    Safe to use from any thread, from several at once, from asyncio (``run_in_executor``), and in forked or spawned
    processes: a copy in another process starts workers of its own. Processes start with the first item and die with
    this one, even if it is killed.

    Args:
        function: importable by module and name; takes one item, returns plain values (what JSON can hold). Its module
            should import quickly and may have a function ``warm_up()``, which is called once before any item, and
            ``start_worker()``, called in every new worker.
        limit: seconds for one item, counted from the moment a worker takes it, not from when it was queued.
        workers: processes at most; by default one a usable core, at most 8.
        memory: bytes of address space for each worker (not enforced on macOS). None: no limit.
        environment: workers see the variables of this process; False: next to none of them.
        preload: module that is imported once, before any worker is forked; None: none but the function's.
        output: what workers print appears on this process's standard error; False: nowhere.
        max_bytes: longest result, as JSON.

    Raises:
        ValueError: the function cannot be imported by name, or a limit is not positive.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        limit: float,
        workers: int | None = None,
        memory: int | None = 2 * 1024**3,
        environment: bool = True,
        preload: str | None = None,
        output: bool = False,
        max_bytes: int = 16_000,
    ) -> None:
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or not name.isidentifier():
            raise ValueError(f"{module}.{name} cannot be imported by a worker: define it at the top of a module")
        if not limit > 0 or (workers is not None and workers < 1):
            raise ValueError(f"limit = {limit} and workers = {workers} must be positive")
        self.limit = limit
        self.workers = workers or min(
            8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        )
        self._setup = {
            "module": module,
            "function": name,
            "memory": memory,
            "preload": preload,
            "max_bytes": max_bytes,
        }
        self._environment, self._output = environment, output
        self._thread: threading.Thread | None = None
        self._reset()
        _POOLS.add(self)

    def map(self, items: Sequence[Any], limit: float | None = None) -> list[Outcome]:
        """Return the outcome of every item, in the order of the items. Blocks, never longer than the limits allow.

        Args:
            items: as of :meth:`submit`.
            limit: as of :meth:`submit`.

        Raises:
            PoolError: the function cannot be imported, or no process can be started.
        """
        return [future.result() for future in self.submit(items, limit)]

    def submit(self, items: Sequence[Any], limit: float | None = None) -> list[Future[Outcome]]:
        """Queue the items and return at once; ``asyncio.wrap_future`` makes the futures awaitable.

        Args:
            items: what the function is called with, one by one.
            limit: seconds for each of them; None: the pool's own.
        """
        tasks = [_Task(pickle.dumps(item), Future(), self.limit if limit is None else limit) for item in items]
        if tasks:
            with self._lock:
                self._tasks.extend(tasks)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._dispatch, name="lit-grpo-pool", daemon=True)
                    self._thread.start()
            self._wake()
        return [task.future for task in tasks]

    def start(self) -> None:
        """Begin to import the function in a thread, so that the first item need not wait for that."""
        with self._lock:
            self._start_requested = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._dispatch, name="lit-grpo-pool", daemon=True)
                self._thread.start()
        self._wake()

    def close(self) -> None:
        """Kill the workers; items not done yet come back as crashes. Safe to call twice; a later item starts anew."""
        with self._lock:
            thread, self._closing = self._thread, True
        self._wake()
        if thread is not None:
            thread.join()
        self._closing = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("limit", "workers", "_setup", "_environment", "_output")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._thread = None
        self._closing = False
        self._start_requested = False
        # A pipe, because the dispatcher waits for it and for all workers in one call.
        self._wakeup_reader, self._wakeup_writer = Pipe(duplex=False)
        os.set_blocking(self._wakeup_writer.fileno(), False)
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._messages: Connection | None = None
        self._workers: list[_Worker] = []

    def _wake(self) -> None:
        # A full pipe wakes just as well.
        with contextlib.suppress(BlockingIOError):
            self._wakeup_writer.send_bytes(b"!")

    # Everything below runs in the dispatcher's thread alone, which owns the workers; the queue is shared under a lock.

    def _dispatch(self) -> None:
        error: PoolError | None = None
        try:
            while not self._closing:
                if self._start_requested and self._fork_server is None:
                    self._start_fork_server()
                self._start_requested = False
                self._hand_out()
                # Asked once more: the message that woke this thread for close() may have been read already, and the
                # wait in _collect would then have no end.
                if not self._closing:
                    self._collect()
        except BaseException as raised:
            error = raised if isinstance(raised, PoolError) else PoolError(f"the worker pool stopped: {raised!r}")
        self._stop("the pool was closed", error)
        # Under one lock, so that an item either is among those answered below or starts a new thread.
        with self._lock:
            left = list(self._tasks)
            self._tasks.clear()
            self._thread = None
        for task in left:
            _answer(task, Outcome("crash", error="the pool was closed"), error)

    def _hand_out(self) -> None:
        while self._tasks:
            worker = next((w for w in self._workers if w.task is None), None)
            if worker is None:
                if len(self._workers) >= self.workers:
                    return
                # May raise, so the item stays in the queue until then.
                worker = self._start()
                if worker is None:
                    return
            with self._lock:
                worker.task = self._tasks.popleft()
            worker.started = time.monotonic()
            worker.served += 1
            try:
                worker.connection.send_bytes(worker.task.payload)
            except OSError:
                # A worker that has served before died while it was idle, so the item is not at fault.
                if worker.served > 1:
                    with self._lock:
                        self._tasks.appendleft(worker.task)
                    worker.task = None
                else:
                    _finish(worker, Outcome("crash", error="the worker process died"))
                self._discard(worker)

    def _collect(self) -> None:
        busy = [w for w in self._workers if w.task is not None]
        deadline = min((w.started + w.task.limit for w in busy if w.task is not None), default=math.inf)
        # Waiting takes no time that is not finite, nor one of many years.
        patience = max(0.0, deadline - time.monotonic()) if deadline < _FOREVER else None
        ready = wait([self._wakeup_reader, *(w.connection for w in busy)], patience)
        while self._wakeup_reader.poll():
            self._wakeup_reader.recv_bytes()
        for worker in busy:
            seconds = time.monotonic() - worker.started
            # Answers come before limits: where this thread itself was kept from running, an answer that was in time
            # is waiting to be read.
            if worker.connection in ready or worker.connection.poll():
                self._receive(worker, seconds)
            elif worker.task is not None and seconds >= worker.task.limit:
                _finish(worker, Outcome("timeout", seconds=seconds))
                self._discard(worker)

    def _receive(self, worker: _Worker, seconds: float) -> None:
        try:
            message = json.loads(worker.connection.recv_bytes(_MAX_MESSAGE_BYTES))
            known = "value" in message
            outcome = Outcome("ok" if known else "error", message.get("value"), seconds, message.get("error", ""))
        except (EOFError, OSError, ValueError, TypeError, AttributeError):
            outcome = Outcome("crash", seconds=seconds, error="the worker process died")
        _finish(worker, outcome)
        # A worker that ran into its memory limit may still be near it, and would fail items that are not at fault.
        if (
            outcome.status == "crash"
            or outcome.error.startswith("MemoryError")
            or worker.served >= _MAX_ITEMS_PER_WORKER
        ):
            self._discard(worker)

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        with contextlib.suppress(OSError):
            assert self._messages is not None
            self._messages.send_bytes(f"kill {worker.pid}".encode())

    def _start(self) -> _Worker | None:
        """Have a new worker forked; return None if the pool is being closed."""
        for attempt in range(2):
            if self._fork_server is None:
                self._start_fork_server()
            if self._fork_server is None:
                return None
            assert self._control is not None
            assert self._messages is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._messages.send_bytes(b"start")
                    socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                    pid = int(self._messages.recv_bytes())
                except (OSError, EOFError) as error:
                    # The fork server was killed from outside, for instance when memory ran out: a second one is tried.
                    ours.close()
                    self._stop("the workers were killed")
                    if attempt:
                        raise PoolError(f"no worker can be started: {error!r}") from error
                    continue
            worker = _Worker(pid, Connection(ours.detach()))
            self._workers.append(worker)
            return worker
        raise AssertionError("unreachable")

    def _start_fork_server(self) -> None:
        script = Path(__file__).with_name("fork_server.py")
        ours, theirs = socket.socketpair()
        with theirs:
            self._fork_server = subprocess.Popen(
                # -P: the script's own folder must not come first among the places to import from.
                [sys.executable, "-P", str(script), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Both to standard error: standard output may be a file of results.
                stdout=2 if self._output else subprocess.DEVNULL,
                stderr=2 if self._output else subprocess.DEVNULL,
                # An interrupt from the keyboard goes to the whole session; the pool decides what ends.
                start_new_session=True,
                env={**self._variables(), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            )
        self._control, self._messages = ours, Connection(os.dup(ours.fileno()))
        path = [entry or str(Path.cwd()) for entry in sys.path]
        self._messages.send_bytes(json.dumps({**self._setup, "path": path}).encode())
        deadline = time.monotonic() + _START_SECONDS
        while not self._closing and (left := deadline - time.monotonic()) > 0:
            if self._messages in wait([self._messages, self._wakeup_reader], left):
                break
            # Woken by a new item, which waits in the queue, or by close().
            while self._wakeup_reader.poll():
                self._wakeup_reader.recv_bytes()
        if self._closing:
            # It is still importing and would not notice that its control socket is closed.
            self._fork_server.kill()
            self._stop("the pool was closed")
            return
        try:
            ready = self._messages.poll(0)
            problem = self._messages.recv_bytes().decode() if ready else f"not done after {_START_SECONDS} s"
        except (EOFError, OSError):
            problem = f"{sys.executable} ended at once"
        if problem:
            raise PoolError(f"{self._setup['module']}.{self._setup['function']} cannot be loaded:\n{problem}")

    def _variables(self) -> dict[str, str]:
        kept = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "TZ")
        return {key: value for key, value in os.environ.items() if self._environment or key in kept}

    def _stop(self, reason: str, error: PoolError | None = None) -> None:
        """Close the control socket: the fork server then kills its workers and ends."""
        for worker in self._workers:
            if worker.task is not None:
                _finish(worker, Outcome("crash", error=reason), error)
            worker.connection.close()
        self._workers = []
        if self._messages is not None and self._control is not None:
            self._messages.close()
            self._control.close()
        self._messages = self._control = None
        if self._fork_server is not None:
            self._fork_server.wait()
            self._fork_server = None

    def _forget(self) -> None:
        """Close the copies of the parent's sockets in a forked child, which starts workers of its own."""
        for channel in (
            self._wakeup_reader,
            self._wakeup_writer,
            self._control,
            self._messages,
            *(w.connection for w in self._workers),
        ):
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.close()
        self._reset()


def _finish(worker: _Worker, outcome: Outcome, error: PoolError | None = None) -> None:
    task, worker.task = worker.task, None
    assert task is not None
    _answer(task, outcome, error)


def _answer(task: _Task, outcome: Outcome, error: PoolError | None = None) -> None:
    # A future that its caller has cancelled takes no result.
    with contextlib.suppress(InvalidStateError):
        if error is None:
            task.future.set_result(outcome)
        else:
            task.future.set_exception(error)


# Weak references, so that the list of all pools keeps none of them alive.
_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool._forget()


# A forked child inherits the sockets but not the dispatcher's thread: nothing would answer it, and what it read would
# be missing in its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
