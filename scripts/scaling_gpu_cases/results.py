"""The file of results: every point is in it as soon as it was measured, so that a call can be cut and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.files import write_atomically
from scripts.scaling_gpu_cases.measure import Record
from scripts.scaling_gpu_cases.points import Point

ATTEMPTS = 2
"""Calls in which a point may be cut before it counts as one that takes too long."""
_FIRST_SECONDS = 150.0
"""Expected of a point where none of its shape was measured: imports, compilation and engines are most of it."""
_SPARE = 1.1
SETTINGS = {
    "card": "the card",
    "engine": "the engine",
    "launcher": "the launcher",
    "software": "the software",
    "peak_tflops": "the peak",
    "more": "further configurations (hash)",
}
"""What must be the same for all figures of a file, in words."""


class Results:
    """Records by the names of their points.

    Args:
        path: of the file; one that is there is gone on with.
        machine: what is measured, and with what; all of it must be that of the file.
        goes_on: whether points may be added; the page of what there is can be written anywhere.

    Raises:
        UserError: the file is of another machine or other settings, or cannot be read.
    """

    def __init__(self, path: Path, machine: dict[str, Any], *, goes_on: bool = True) -> None:
        self.path = path
        try:
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            self.machine: dict[str, Any] = known.get("machine", machine)
            self.records: dict[str, Record] = known.get("points", {})
            # As the rest of the script takes it: whatever else is there was not written by it.
            if "on_cards" not in self.machine or any("shape" not in record for record in self.records.values()):
                raise ValueError("it is no file of results")
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f"{path} cannot be read: {error}", where="--out", remedy="name another folder, or remove the file"
            ) from error
        other = [name for name in SETTINGS if name in self.machine and self.machine[name] != machine.get(name)]
        if goes_on and other:
            raise UserError(
                f"{path} has figures of "
                + "; ".join(
                    f"{SETTINGS[name]} {_shown(self.machine[name])}, not {_shown(machine.get(name))}" for name in other
                ),
                where="--out",
                remedy="name another folder",
            )

    def has(self, point: Point) -> bool:
        """Tell whether a point is done with: measured, or tried in vain."""
        record = self.records.get(point.name)
        return record is not None and not record.get("cut")

    def good(self, point: Point) -> Record | None:
        """Return the record of a point that has figures."""
        record = self.records.get(point.name)
        return record if record is not None and "failure" not in record else None

    def add(self, point: Point, record: Record) -> None:
        """Keep a record; one that was cut counts its attempts, and is done with after the last."""
        if record.get("cut"):
            attempts = self.records.get(point.name, {}).get("attempts", 0) + 1
            record = {**record, "attempts": attempts, "cut": attempts < ATTEMPTS}
        self.records[point.name] = record
        self.write()

    def drop_failures(self) -> None:
        """Forget what was tried in vain, so that it is tried again."""
        self.records = {name: record for name, record in self.records.items() if "failure" not in record}

    def expected_seconds(self, point: Point) -> float:
        """Estimate how long a point takes: as the longest of its shape, with as many steps as it has."""
        of_shape = [r for r in self.records.values() if r["shape"] == point.shape and "failure" not in r]
        if not of_shape:
            return _FIRST_SECONDS
        total = point.steps + point.warmup
        return _SPARE * max(r["seconds"] + (total - r["steps"] - r["warmup"]) * r["step"] for r in of_shape)

    def write(self) -> None:
        """Write the file."""
        content = {"machine": self.machine, "points": self.records}
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")


def _shown(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
