"""The record of a run on disk: one JSON object a line, written before anything is sent anywhere.

A line is ``{"step": 12, "wall_time": 1764286512.3, "reward": 0.41, ...}``; ``step`` is the rollout's index and
``wall_time`` seconds since the epoch. Non-finite values are written as Python writes them (``NaN``, ``Infinity``), so
``json`` and ``pandas.read_json(path, lines=True)`` read the file. After a resume, steps trained again appear again: the
later line holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

FILE_NAME = "metrics.jsonl"


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
            OSError: the file cannot be written.
        """
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(record).encode() + b"\n")
        # Flushed but not synced: a process that is killed loses nothing, only a power failure can.
        self._file.flush()
        return self._file.tell()

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        # A process that was killed may have left half a line: the next record must not be glued to it.
        if file.tell() and not _ends_with_newline(self.path):
            file.write(b"\n")
        return file

    def close(self) -> None:
        """Close the file; a later ``append`` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_lines(path: str | os.PathLike[str], offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, byte offset behind it) of every whole line from ``offset`` on; torn lines are left out."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            # The last line may be one that is being written just now.
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
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
