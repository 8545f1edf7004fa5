"""Threads for work that may never end: none of them holds up the end of the process.

``concurrent.futures`` waits at exit for every thread it has started, daemon or not, so a call that hangs would keep the
process alive after everything else is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """Executor of daemon threads, started as they are needed.

    Args:
        count: threads at most.
        name: beginning of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._closed = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call the function in one of the threads.

        Raises:
            RuntimeError: the executor is shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot submit work after the shutdown")
            self._jobs.put((future, function, args))
            if self._started < self._count:
                threading.Thread(target=self._work, name=f"{self._name}_{self._started}", daemon=True).start()
                self._started += 1
        return future

    def shutdown(self) -> None:
        """Cancel what has not begun, and let each thread end after what it is doing. Does not wait."""
        with self._lock:
            self._closed = True
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job[0].cancel()
            for _ in range(self._started):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            if future.set_running_or_notify_cancel():
                _answer(future, function, args)
            # Nothing is kept while the thread waits: the arguments may be large.
            del job, future, function, args


def call_within(seconds: float | None, function: Callable[..., T], *args: Any, name: str = "call") -> T:
    """Call a function in a daemon thread, and give it up when its time is over; None: call it here, without a limit.

    A call that is given up goes on in its thread, since nothing can end it there.

    Raises:
        TimeoutError: it has not returned in time. One that the function raises itself comes as a RuntimeError.
    """
    if seconds is None:
        return function(*args)
    future: Future[T] = Future()
    threading.Thread(target=_answer, args=(future, function, args), name=name, daemon=True).start()
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(seconds):
        raise TimeoutError(f"it has not returned in {seconds:g} s")
    try:
        return future.result()
    except TimeoutError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def beside(items: Iterator[T], work: Callable[[], object]) -> Iterator[T]:
    """Do some work here while a thread asks for items, and yield them all when it is done.

    The thread never waits for whoever takes the items. Where the work fails, or the caller leaves, it stops asking
    behind the item that comes next, and closes the iterator if that can be closed.

    Raises:
        BaseException: what the work raises, or the iterator, the latter behind the items before it.
    """
    came: queue.SimpleQueue[tuple[list[T], BaseException | None]] = queue.SimpleQueue()
    left = threading.Event()

    def ask() -> None:
        fault: BaseException | None = None
        try:
            for item in items:
                came.put(([item], None))
                if left.is_set():
                    break
            close = getattr(items, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            fault = error
        came.put(([], fault))

    threading.Thread(target=ask, name="beside", daemon=True).start()
    try:
        work()
        while True:
            item, fault = came.get()
            if fault is not None:
                raise fault
            if not item:
                return
            yield item[0]
    finally:
        left.set()


def _answer(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(*args)
    # SystemExit too, which would end the thread alone and leave whoever waits without an answer.
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
