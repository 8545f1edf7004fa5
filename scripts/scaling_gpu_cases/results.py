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
    "code": "lit-grpo of commit",
    "more": "further configurations (hash)",
}
"""What must be the same for all figures of a file, in words; the code only where both are known."""
_MACHINE = {"on_cards": bool, "cards": int, "card": str, "engine": str, "software": str}
_FIGURES = (
    *("cards", "ranks", "prompts", "steps", "warmup", "seconds", "step", "tokens_per_second"),
    *("sync_share", "rewards", "elapsed"),
)
"""What a page is made of: figures that it can do without are left out."""


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
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machine": machine}
            self.machine, self.records = _checked(known)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read: {error}", where="--out", remedy="name another folder, or remove the file"
            ) from error
        other = [name for name in SETTINGS if self._differs(name, machine)]
        if goes_on and other:
            raise UserError(
                f"{path} has figures of "
                + "; ".join(
                    f"{SETTINGS[name]} {_shown(self.machine[name])}, not {_shown(machine.get(name))}" for name in other
                ),
                where="--out",
                remedy="name another folder",
            )
        if goes_on:
            # A host may be another, with more of the same cards.
            self.machine["cards"] = max(self.machine["cards"], machine["cards"])

    def _differs(self, name: str, machine: dict[str, Any]) -> bool:
        known, now = self.machine.get(name), machine.get(name)
        return name in self.machine and known != now and not (name == "code" and "" in (known or "", now or ""))

    def take_peak(self, tflops: float) -> None:
        """Compute every MFU anew by another peak of a card; nothing else depends on it."""
        self.machine["peak_tflops"] = tflops
        for record in self.records.values():
            if "tflops" in record:
                record["mfu"] = record["tflops"] / tflops

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


def _checked(known: Any) -> tuple[dict[str, Any], dict[str, Record]]:
    """Return machine and records of what a file holds.

    Raises:
        ValueError: the script has not written it.
    """
    machine, records = (known.get("machine"), known.get("points", {})) if isinstance(known, dict) else (None, None)
    if not isinstance(machine, dict) or not isinstance(records, dict):
        raise ValueError("it is no file of results")
    for name, kind in _MACHINE.items():
        if not isinstance(machine.get(name), kind):
            raise ValueError(f"it does not say {name} of the machine")
    for point, record in records.items():
        needed = ("shape",) if isinstance(record, dict) and "failure" in record else ("shape", *_FIGURES)
        if not isinstance(record, dict) or (missing := [name for name in needed if name not in record]):
            raise ValueError(f"{point} has no {', '.join(missing) if isinstance(record, dict) else 'record'}")
    return dict(machine), records


def _shown(value: Any) -> str:
    return "none" if value in (None, "") else str(value)
