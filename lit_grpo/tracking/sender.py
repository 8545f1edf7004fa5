"""Sending of what a run has recorded, in a thread of its own, so that no step waits for a network."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lit_grpo.tracking.spool import read_lines

log = logging.getLogger(__name__)

LINES_PER_CALL = 100
RETRY_SECONDS = 1.0
"""Seconds between two tries while a flush waits."""
LONGEST_PAUSE = 30.0
"""Seconds between two tries at most while the server does not answer; the pauses double up to it."""


# Not named an error: the server decided, nothing failed here.
class Refused(Exception):  # noqa: N818
    """Answer of a server that will never take a record, so that trying again is no use."""


class Target(Protocol):
    """Receiver of records; every method may raise :class:`Refused`, and any other exception means "try again later"."""

    def start(self) -> bool | None:
        """Make sure that the run exists; called before each round of sending, and cheap once it does.

        Returns:
            True if the run was made just now and so has nothing of what was recorded.
        """
        ...

    def metrics(self, records: list[dict[str, Any]]) -> None: ...

    def params(self, params: Mapping[str, str]) -> None: ...

    def tags(self, tags: Mapping[str, str]) -> None: ...

    def remove_tags(self, names: Sequence[str]) -> None: ...

    def artifact(self, path: Path, folder: str | None) -> None: ...

    def inputs(self, datasets: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]) -> None:
        """Note which data sets and which model the run begins with."""
        ...

    def end(self, status: str) -> None: ...

    def forget(self, step: int) -> None:
        """Remove the metrics of all steps from ``step`` on."""
        ...

    def find(self, identity: str) -> str | None:
        """Return the id of the run that was made for ``identity``; None if there is none."""
        ...

    def close_dead(self, run_id: str, status: str, reason: str | None) -> None:
        """End the run of a process that died without ending it."""
        ...


Job = Callable[[Target], None]


class Sender:
    """Queue in front of a :class:`Target`: jobs in memory, metrics read back from the spool file.

    No method raises, and only ``flush`` waits. Since metrics are read from the file, a server that is away for hours
    costs no memory and gets everything when it is back.

    Args:
        target: the receiver.
        spool: the JSON-lines file that the metrics are appended to.
        offset: bytes of the file that the server already has, which a resumed run does not send again.
        on_progress: called in the thread whenever the server has taken more of the file.
        quiet: seconds in which nothing is sent before the first metrics come, or a flush asks for it. A run is starting
            then, and what a client imports would hold its imports up.
    """

    def __init__(
        self,
        target: Target,
        spool: Path,
        offset: int = 0,
        on_progress: Callable[[], None] = lambda: None,
        quiet: float = 0.0,
    ) -> None:
        self._target = target
        self._spool = spool
        self._sent = self._written = offset
        self._on_progress = on_progress
        self._replacements = 0
        """How often a part of the file was replaced: what was read before is then not what the offsets count."""
        self._out_of_patience: int | None = None
        """Progress at which a flush gave up waiting; until there is some, the next one does not wait again."""
        self._jobs: deque[Job] = deque()
        self._end: str | None = None
        self._refused = 0
        self._last_error = ""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._requested = self._finished = 0
        self._progress = 0
        self._opened = False
        self._failures = 0
        self._not_before = time.monotonic() + quiet if quiet else 0.0

    def wrote(self, length: int) -> None:
        """Note that the spool has grown to ``length`` bytes."""
        with self._changed:
            if length > self._written and not self._opened and not self._failures:
                self._not_before = 0.0
            self._written = length
            self._wake()

    def replace_from(self, offset: int, job: Job) -> None:
        """Queue a job that takes back what was sent from ``offset`` on; the file may be changed there afterwards.

        Nothing behind ``offset`` is sent until :meth:`wrote` says how long the new file is.
        """
        with self._changed:
            self._sent = self._written = min(self._sent, offset)
            self._replacements += 1
            self._jobs.append(job)
            self._wake()

    def put(self, job: Job) -> None:
        """Queue a job; jobs are sent before metrics, in order."""
        with self._changed:
            self._jobs.append(job)
            self._wake()

    def end(self, status: str) -> None:
        """Queue the final status of the run, which is sent after everything else."""
        with self._changed:
            self._end = status
            self._wake()

    def flush(self, timeout: float) -> bool:
        """Try to send everything, again and again, and return whether nothing is left.

        Args:
            timeout: seconds without any progress after which waiting ends (the thread goes on trying). Where an earlier
                call has waited for so long in vain, and nothing has arrived since, there is one try.
        """
        with self._changed:
            if not self._has_work():
                return True
            log.debug("flush: waiting for %d jobs and %d bytes", len(self._jobs), self._written - self._sent)
            self._requested += 1
            progress, deadline = self._progress, time.monotonic() + timeout
            self._wake()
            while self._has_work():
                if self._progress != progress:
                    progress, deadline = self._progress, time.monotonic() + timeout
                tried = self._finished >= self._requested
                # A server that refuses the connection says so in a millisecond, and may be back in a second.
                if time.monotonic() > deadline or (tried and self._out_of_patience == progress):
                    self._out_of_patience = progress
                    break
                if tried:
                    self._changed.wait(min(RETRY_SECONDS, timeout))
                    self._requested += 1
                    self._changed.notify_all()
                else:
                    self._changed.wait(0.2)
            log.debug("flush: %s", "something is left" if self._has_work() else "everything is sent")
            return not self._has_work()

    @property
    def unsent(self) -> int:
        """Number of records not on the server: metric lines, sets of parameters or tags, files, the final status."""
        with self._changed:
            sent, written = self._sent, self._written
            count = len(self._jobs) + self._refused + (self._end is not None)
        # Counted in the file, outside the lock: a long backlog takes time to read, and must not hold up a step.
        if sent < written:
            count += sum(1 for _, after in read_lines(self._spool, sent) if after <= written)
        return count

    @property
    def sent_bytes(self) -> int:
        """Length of the part of the spool that is on the server."""
        return self._sent

    @property
    def last_error(self) -> str:
        """Reason why the last record could not be sent; empty if there was no trouble."""
        return self._last_error

    # The thread.

    def _has_work(self) -> bool:
        return bool(self._jobs) or self._sent < self._written or self._end is not None

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a server that hangs must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="lit-grpo-sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._requested > self._finished or (self._has_work() and self._pause() <= 0)):
                    self._changed.wait(self._pause() if self._has_work() else None)
                ticket = self._requested
            try:
                log.debug("sending %d jobs and %d bytes of metrics", len(self._jobs), self._written - self._sent)
                self._send_all()
                log.debug("sent")
                self._failures, self._not_before = 0, 0.0
            except Exception as error:
                self._failures += 1
                self._not_before = time.monotonic() + min(2.0**self._failures, LONGEST_PAUSE)
                self._note_error(error)
            with self._changed:
                self._finished = ticket
                self._changed.notify_all()

    def _pause(self) -> float:
        return self._not_before - time.monotonic()

    def _send_all(self) -> None:
        # `start` would open a run again that has ended.
        if not self._has_work():
            return
        if self._target.start():
            with self._changed:
                self._sent = 0
            self._on_progress()
        # Opening the run is progress; finding it open is none, and tells nothing of the server.
        self._progress += not self._opened
        self._opened = True
        while self._jobs or self._sent < self._written:
            # Before each batch of metrics: a job may be to take back what was sent.
            while self._jobs:
                # Taken off the queue only once it is sent: an exception leaves it there for the next round.
                self._try(self._jobs[0])
                with self._changed:
                    self._jobs.popleft()
            if self._sent < self._written:
                self._send_lines()
        with self._changed:
            status = self._end if not self._jobs and self._sent >= self._written else None
        if status is not None:
            self._try(lambda target: target.end(status))
            with self._changed:
                self._end = None

    def _send_lines(self) -> None:
        with self._changed:
            replacements = self._replacements
        records, after = self._next_lines()
        try:
            self._target.metrics(records)
        except (Refused, TypeError, ValueError, KeyError, AttributeError):
            # One bad line must not take its neighbours with it.
            for record in records:
                self._try(lambda target, record=record: target.metrics([record]))  # type: ignore[misc]
        with self._changed:
            self._progress += 1
            if self._replacements != replacements:
                return
            self._sent = after
        self._on_progress()

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
            # A record that cannot even be put into a request will be no better next time, and must not block others.
            self._refused += 1
            self._note_error(error)
        self._progress += 1

    def _note_error(self, error: Exception) -> None:
        first = not self._last_error
        self._last_error = _in_short(error)
        # One warning, on the main process; the end of the run tells how many records are missing.
        if first and os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("Tracking: a record could not be sent (%s). Training goes on.", self._last_error)


def _in_short(error: Exception) -> str:
    """Put the error in a clause: what happened, without the layers of HTTP machinery around it."""
    text = " ".join(str(error).split())
    if "refused" in text and "Errno 111" in text:
        return "connection refused"
    if "timed out" in text or "timeout" in text:
        return "no answer in time"
    return text[:160] or type(error).__name__
