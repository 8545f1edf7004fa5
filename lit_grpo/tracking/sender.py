"""Sends what a run has recorded to a tracking server, in a thread of its own, so that no step waits for a network."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lit_grpo.tracking.spool import read_lines

log = logging.getLogger(__name__)

LINES_PER_CALL = 100
LONGEST_PAUSE = 30.0
"""Seconds between two tries while the server does not answer."""


class Refused(Exception):  # noqa: N818 - the server's decision, not a failure of ours
    """The server answered and will never take this record; trying again is no use."""


class Target(Protocol):
    """Where records go. Every method may raise :class:`Refused`; any other exception means "try again later"."""

    def start(self) -> None:
        """Make sure that the run exists. Called before each round of sending; cheap once it does."""
        ...

    def metrics(self, records: list[dict[str, Any]]) -> None: ...

    def params(self, params: Mapping[str, str]) -> None: ...

    def tags(self, tags: Mapping[str, str]) -> None: ...

    def artifact(self, path: Path, folder: str | None) -> None: ...

    def end(self, status: str) -> None: ...


Job = Callable[[Target], None]


class Sender:
    """A queue in front of a :class:`Target`: jobs in memory, metrics read back from the spool file.

    Nothing here raises and nothing but ``flush`` waits. Metrics are read from the file, so a server that is away for
    hours costs no memory and gets everything when it is back.

    Args:
        target: where to send.
        spool: the JSON-lines file that the metrics are appended to.
        offset: bytes of the file that were there before this run (a resumed run does not send them again).
    """

    def __init__(self, target: Target, spool: Path, offset: int = 0) -> None:
        self._target = target
        self._spool = spool
        self._sent = self._written = offset
        self._jobs: deque[Job] = deque()
        self._end: str | None = None
        self._refused = 0
        self._last_error = ""
        self._cv = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked = self._answered = 0
        self._progress = 0
        self._failures = 0
        self._not_before = 0.0

    def wrote(self, length: int) -> None:
        """The spool has grown to ``length`` bytes."""
        with self._cv:
            self._written = length
            self._wake()

    def put(self, job: Job) -> None:
        """Queue a job; jobs go before metrics, in order."""
        with self._cv:
            self._jobs.append(job)
            self._wake()

    def end(self, status: str) -> None:
        """Say how the run ended, once everything else is sent."""
        with self._cv:
            self._end = status
            self._wake()

    def flush(self, timeout: float) -> bool:
        """Try now to send everything; True if nothing is left.

        Args:
            timeout: seconds without any progress after which to give up waiting (the thread goes on trying).
        """
        with self._cv:
            if not self._has_work():
                return True
            self._asked += 1
            ticket, seen, deadline = self._asked, self._progress, time.monotonic() + timeout
            self._wake()
            while self._answered < ticket:
                self._cv.wait(0.2)
                if self._progress != seen:
                    seen, deadline = self._progress, time.monotonic() + timeout
                if time.monotonic() > deadline:
                    break
            return not self._has_work()

    @property
    def unsent(self) -> int:
        """Records (metric lines, sets of params or tags, files, the final status) that are not on the server."""
        with self._cv:
            sent, written = self._sent, self._written
            count = len(self._jobs) + self._refused + (self._end is not None)
        if sent < written:
            count += sum(1 for _, after in read_lines(self._spool, sent) if after <= written)
        return count

    @property
    def sent_bytes(self) -> int:
        """Length of the part of the spool that is on the server."""
        return self._sent

    @property
    def last_error(self) -> str:
        """Why the last record could not be sent; empty if there was no trouble."""
        return self._last_error

    # Below: the thread.

    def _has_work(self) -> bool:
        return bool(self._jobs) or self._sent < self._written or self._end is not None

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a server that hangs must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="lit-grpo-sender", daemon=True)
            self._thread.start()
        self._cv.notify_all()

    def _run(self) -> None:
        while True:
            with self._cv:
                while not (self._asked > self._answered or (self._has_work() and self._pause() <= 0)):
                    self._cv.wait(self._pause() if self._has_work() else None)
                ticket = self._asked
            try:
                self._send_all()
                self._failures, self._not_before = 0, 0.0
            except Exception as error:
                self._failures += 1
                self._not_before = time.monotonic() + min(2.0**self._failures, LONGEST_PAUSE)
                self._trouble(error)
            with self._cv:
                self._answered = ticket
                self._cv.notify_all()

    def _pause(self) -> float:
        return self._not_before - time.monotonic()

    def _send_all(self) -> None:
        if not self._has_work():  # a run that has ended must not be opened again for nothing
            return
        self._target.start()
        self._progress += 1
        while self._jobs:
            self._try(self._jobs[0])
            with self._cv:
                self._jobs.popleft()
        while self._sent < self._written:
            records, after = self._next_lines()
            try:
                self._target.metrics(records)
            except (Refused, TypeError, ValueError, KeyError, AttributeError):
                # One bad line must not take its neighbours with it.
                for record in records:
                    self._try(lambda target, record=record: target.metrics([record]))  # type: ignore[misc]
            with self._cv:
                self._sent = after
                self._progress += 1
        with self._cv:
            status = self._end if not self._jobs and self._sent >= self._written else None
        if status is not None:
            self._try(lambda target: target.end(status))
            with self._cv:
                self._end = None

    def _next_lines(self) -> tuple[list[dict[str, Any]], int]:
        records: list[dict[str, Any]] = []
        after = self._written
        for record, offset in read_lines(self._spool, self._sent):
            records.append(record)
            if len(records) == LINES_PER_CALL or offset >= self._written:
                after = offset
                break
        return records, after

    def _try(self, job: Job) -> None:
        try:
            job(self._target)
        except (Refused, TypeError, ValueError, KeyError, AttributeError) as error:
            # A record that cannot even be put into a request will not be better next time, and must not block the rest.
            self._refused += 1
            self._trouble(error)
        self._progress += 1

    def _trouble(self, error: Exception) -> None:
        first = not self._last_error
        self._last_error = _in_short(error)
        # Said once, on the main process; the total is said at the end of the run.
        if first and os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("Tracking: a record could not be sent (%s). Training goes on.", self._last_error)


def _in_short(error: Exception) -> str:
    """The error as a clause: what happened, without the layers of HTTP machinery around it."""
    text = " ".join(str(error).split())
    if "refused" in text and "Errno 111" in text:
        return "connection refused"
    if "timed out" in text or "timeout" in text:
        return "no answer in time"
    return text[:160] or type(error).__name__
