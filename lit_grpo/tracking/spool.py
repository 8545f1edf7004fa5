"""The record of a run on disk: one JSON object a line, written before anything is sent anywhere.

A line is ``{"step": 12, "wall_time": 1764286512.3, "reward": 0.41, ...}``; ``step`` is the rollout's index and
``wall_time`` seconds since the epoch. Non-finite values are written as Python writes them (``NaN``, ``Infinity``), so
``json`` and ``pandas.read_json(path, lines=True)`` read the file. A run that is resumed replaces the lines of the steps
that it trains again, so that each stands there once; a step may have several lines with different keys, as one of
training and one of an evaluation. Within one process, a rollback leaves the lines of what it gave up: the later holds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lit_grpo.utils.files import write_atomically

FILE_NAME = "metrics.jsonl"
STAMPS = frozenset({"step", "wall_time"})
"""Keys of a line that are no metrics."""
_IN_EVERY_LINE = STAMPS | {"epoch"}
"""Keys that lines of a step have in common whatever they tell of it; Lightning adds the epoch."""
_MEASURED = ("time/", "memory/", "system/")
"""Beginnings of the keys whose values differ when a step is made again to the same bits."""


class Spool:
    """Writer of a JSON-lines file whose lines are in the operating system's hands when ``append`` returns.

    Args:
        path: the file, which is created with its folder at the first line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one line and return the file's new length in bytes.

        Raises:
            OSError: the file cannot be written; what it got of the line is taken back.
        """
        if self._file is None:
            self._file = self._open()
        line = json.dumps(record).encode() + b"\n"
        before = self._file.tell()
        try:
            # Unbuffered, and so in the operating system's hands: a process that is killed loses nothing, only a power
            # failure can.
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            # A full disk takes a part of the line: the next one must not be glued to it.
            self._file.truncate(before)
            self._file.seek(before)
            raise
        return before + len(line)

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mend(self.path)
        file: BinaryIO = self.path.open("ab", buffering=0)
        file.seek(0, os.SEEK_END)
        return file

    def close(self) -> None:
        """Close the file; a later ``append`` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def drop(self, is_dropped: Callable[[dict[str, Any], int], bool]) -> None:
        """Remove lines from the file, which is the old or the new one as a whole, whatever interrupts this.

        Args:
            is_dropped: decides by the record and the byte offset that its line begins at.

        Raises:
            OSError: the file cannot be written.
        """
        self.close()
        kept: list[bytes] = []
        with self.path.open("rb") as file:
            offset = 0
            for line in file:
                record = _parsed(line)
                if record is not None and not is_dropped(record, offset):
                    kept.append(line)
                offset += len(line)
        write_atomically(self.path, b"".join(kept))


def mend(path: Path) -> None:
    """Give a file whose last line was cut off by a kill whole lines again: the torn one is completed or removed."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        end = _end_of_last_line(file)
        file.seek(end)
        # All of the line but its end may be there.
        if _parsed(file.read()) is not None:
            file.write(b"\n")
        else:
            file.truncate(end)


def _end_of_last_line(file: BinaryIO) -> int:
    """Return the offset behind the last newline of a file; 0 if there is none."""
    position = file.seek(0, os.SEEK_END)
    while position:
        start = max(0, position - 65536)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: str | os.PathLike[str], offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, byte offset behind it) of every whole line from ``offset`` on; torn lines are left out."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            # The last line may be one that is being written just now.
            if not line.endswith(b"\n"):
                return
            record = _parsed(line)
            if record is not None:
                yield record, offset


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the metrics of a run as one dict a step; of several lines of a step the later value of a key holds.

    Args:
        run_dir: folder of the run, or the file itself.
    """
    path = Path(run_dir)
    path = path / FILE_NAME if path.is_dir() else path
    steps: dict[int, dict[str, Any]] = {}
    for record, _ in read_lines(path):
        steps.setdefault(record.get("step", 0), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def step_of(record: Mapping[str, Any]) -> int:
    """Return the step of a record; 0 where it names none that can be read."""
    step = record.get("step")
    return int(step) if isinstance(step, int | float) and math.isfinite(step) else 0


def same_kind(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Tell whether two records of a step say the same things of it: whether they share a metric."""
    return not (first.keys() & second.keys()) <= _IN_EVERY_LINE


def same_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Tell whether two records of a step are of one computation: equal but for times, with NaN equal to absent."""
    for key in first.keys() | second.keys():
        if key in STAMPS or key.startswith(_MEASURED):
            continue
        one, other = first.get(key, math.nan), second.get(key, math.nan)
        if one != other and not (_is_nan(one) and _is_nan(other)):
            return False
    return True


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


class LastLine:
    """What a process has written of the last step, so that nothing of it is written again."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def new_part(self, record: dict[str, Any]) -> dict[str, Any]:
        """Leave out what was written under the same step already, and note the rest as written."""
        if self._values.get("step") != record["step"]:
            self._values = dict(record)
            return record
        last = self._values
        # Values compare by repr, for NaN is not equal to itself.
        new = {k: v for k, v in record.items() if k in STAMPS or k not in last or repr(last[k]) != repr(v)}
        self._values = {**last, **record}
        # What tells the epoch alone tells nothing.
        return new if new.keys() - STAMPS - {"epoch"} else {}
