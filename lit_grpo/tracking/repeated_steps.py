"""Steps that a resumed run trains again: each line appears once, in the file of the run and in MLflow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lit_grpo.tracking.earlier_lines import EarlierLines
from lit_grpo.tracking.run_note import RunNote
from lit_grpo.tracking.sender import Sender, Target
from lit_grpo.tracking.spool import Spool, step_of


class RepeatedSteps:
    """Holds the lines that are made now against those that an earlier process of the run has left.

    Args:
        step: first step that is made again.
        spool: the file of the run.
        sender: sends the file to MLflow.
        note: notes what is still to be taken back from MLflow, should this process die.
    """

    def __init__(self, step: int, spool: Spool, sender: Sender, note: RunNote) -> None:
        self._spool, self._sender, self._note = spool, sender, note
        self._earlier = EarlierLines(spool.path, step)
        self.over = not self._earlier
        """Whether no earlier line is left that could be made again."""
        sender.wrote(self._earlier.confirmed)

    def is_new(self, record: dict[str, Any]) -> bool:
        """Tell whether a record is to be written; the earlier lines that it makes void are removed.

        Raises:
            OSError: the file cannot be written.
        """
        if self.over:
            return True
        if self._earlier.holds(record):
            self._sender.wrote(self._earlier.confirmed)
            self.over = not self._earlier
            return False
        if void := self._earlier.replaced_by(record):
            self._take_back(void[0].start, min(step_of(line.record) for line in void))
            starts = {line.start for line in void}
            self._spool.drop(lambda _, start: start in starts)
            self.over = True
        return True

    def _take_back(self, offset: int, step: int) -> None:
        """Remove from MLflow what it has of the file from ``offset`` on: the metrics of the steps from ``step`` on."""
        pending = self._note.read().get("forget")
        step = step if pending is None else min(step, pending)
        noted, forget = threading.Event(), forget_job(step, self._note)

        def job(target: Target) -> None:
            # Done before it is noted, it would stay on the note, and the next process would take back what is right.
            noted.wait()
            forget(target)

        # Before the note, which also holds how much of the file MLflow has: from here on no more than `offset`.
        self._sender.replace_from(offset, job)
        try:
            # Before the file is changed: whatever interrupts this, the next process knows what is to be taken back.
            self._note.update(forget=step)
        finally:
            noted.set()


def forget_job(step: int, note: RunNote) -> Callable[[Target], None]:
    """Return a job of the sender that removes the metrics of the steps from ``step`` on, and notes that it has."""

    def job(target: Target) -> None:
        target.forget(step)
        pending = note.read().get("forget")
        # A later job may have to take back more than this one has.
        if pending is None or pending >= step:
            note.update(forget=None)

    return job
