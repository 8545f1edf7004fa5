"""The lines that a run left behind in the steps that it trains once more after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.tracking.spool import read_lines, same_kind, same_values, step_of


@dataclass(frozen=True)
class EarlierLine:
    """A line of the file.

    Attributes:
        record: what it says.
        start: byte offset that it begins at.
        end: byte offset behind it.
    """

    record: Mapping[str, Any]
    start: int
    end: int


class EarlierLines:
    """The lines of a file from some step on, against which the lines of the steps made again are held.

    A resumed run makes the same steps to the same bits. Such a line stands in the file already, perhaps in MLflow too,
    and is not written again. A line that says something else replaces the one that is there and all later ones.

    Args:
        path: the JSON-lines file.
        step: first step that is made again.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._lines: list[EarlierLine] = []
        self.length = start = 0
        for record, end in read_lines(path):
            if step_of(record) >= step:
                self._lines.append(EarlierLine(record, start, end))
            self.length = start = end

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def confirmed(self) -> int:
        """Length of the beginning of the file in bytes, of which nothing is to be replaced any more."""
        return self._lines[0].start if self._lines else self.length

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Tell whether the record stands in the file already; its line is then no longer one to be replaced."""
        step = record["step"]
        found = self._of_same_kind(record)
        if found is None or not same_values(found.record, record):
            return False
        # What lies before it, at smaller steps, was not made again, and stays.
        self._lines = [line for line in self._lines if step_of(line.record) >= step and line is not found]
        return True

    def replaced_by(self, record: Mapping[str, Any]) -> list[EarlierLine]:
        """Take out the lines that a record makes void: the one of its kind, and all that were written after it."""
        found = self._of_same_kind(record)
        void = [] if found is None else [line for line in self._lines if line.start >= found.start]
        self._lines = [line for line in self._lines if line not in void]
        return void

    def _of_same_kind(self, record: Mapping[str, Any]) -> EarlierLine | None:
        for line in self._lines:
            if step_of(line.record) == record["step"] and same_kind(line.record, record):
                return line
        return None
