"""A run with all that a report shows, read from its folder; :mod:`lit_grpo.report.mlflow_run` reads one from MLflow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError, nearest
from lit_grpo.run import flight
from lit_grpo.run.folder import shown
from lit_grpo.tracking.charts import History
from lit_grpo.tracking.spool import FILE_NAME, read_lines

FINDINGS_FILE = "findings.jsonl"
RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(kw_only=True)
class Run(History):
    """A run with everything that a report shows of it; the steps of findings count from 1, like those of metrics."""

    name: str
    source: str
    """Folder or address that the run was read from, as a person would type it."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events that ``findings.jsonl`` holds, in the order of its lines."""
    config: str = ""
    """Text of ``config.yaml``; empty if there is none."""
    objective: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    started: str = ""
    run_id: str = ""
    status: str = ""
    """Status of the run in MLflow; empty if it was not read from there."""
    records: dict[int, Path] = field(default_factory=dict)
    """File of each step's flight record."""
    token_texts: dict[int, str] = field(default_factory=dict)
    """Text of each token id that a record holds."""
    dumps: list[dict[str, Any]] = field(default_factory=list)
    """Events that made the flight recorder keep its records: ``reason``, ``step`` and ``explanation`` of each."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    def settings(self) -> dict[str, Any]:
        """Return the configuration as plain values; empty if there is none or it cannot be read."""
        import yaml

        try:
            value = yaml.safe_load(self.config) if self.config else {}
        except yaml.YAMLError:
            return {}
        return value if isinstance(value, dict) else {}


def fill(run: Run, lines: Iterable[Mapping[str, Any]]) -> None:
    """Fill in the metrics of ``run`` from records in the order in which they were logged.

    A record of a step that was logged before, with later steps behind it, means that the run went back there by a
    rollback or a resume: what it had from that step on becomes abandoned.
    """
    current: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = int(line.get("step", 0))
        # One step may be logged in several lines, training and evaluation; only a value that comes again is a return.
        again = (line.keys() & current.get(step, {}).keys()) - {"step", "wall_time", "epoch"}
        if again and step < max(current):
            abandoned = {s: row for s, row in current.items() if s >= step}
            # With the step before, so that the abandoned line begins where it branched off.
            lead = [current[step - 1]] if step - 1 in current else []
            run.abandoned.append(table([*lead, *abandoned.values()]))
            current = {s: row for s, row in current.items() if s < step}
        current.setdefault(step, {}).update(line)
    run.steps, run.metrics = table([current[step] for step in sorted(current)])


def table(rows: list[dict[str, Any]]) -> tuple[list[int], dict[str, list[float]]]:
    """Return steps (from 1) and metrics by key from records with ``step`` (from 0)."""
    keys = sorted({key for row in rows for key in row} - {"step", "wall_time", "epoch"})
    steps = [int(row.get("step", 0)) + 1 for row in rows]
    return steps, {key: [_number(row.get(key)) for row in rows] for key in keys}


def _number(value: Any) -> float:
    # True is an int in Python, and no value of a metric.
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a findings file, and the number of lines that could not be read."""
    events, unreadable = [], 0
    # A torn character is replaced and a torn line counted, since neither must hide the other events.
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                unreadable += 1
                continue
            if isinstance(event, dict):
                events.append(event)
    return events, unreadable


def read_folder(folder: Path) -> Run:
    """Read the run in a folder that ``RunLogger`` and the callbacks wrote; missing or torn files leave gaps.

    Raises:
        UserError: the folder does not exist, or holds nothing of a run.
    """
    if not folder.is_dir():
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        near = nearest(folder.name, siblings)
        raise UserError(
            f"there is no run folder {shown(folder)}",
            where="RUN",
            remedy=f"did you mean {shown(folder.parent / near)}?"
            if near
            else "give a folder of runs/, or the id of an MLflow run",
        )
    records = folder / flight.FOLDER
    if not any(path.exists() for path in (folder / FILE_NAME, folder / FINDINGS_FILE, records)):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{FILE_NAME}"))
        raise UserError(
            f"{shown(folder)} is no run folder: it holds no {FILE_NAME}",
            where="RUN",
            remedy=f"it holds runs: {', '.join(inside[:8])}" if inside else "give the folder of one run",
        )
    run = Run(name=folder.resolve().name, source=shown(folder.absolute()), steps=[], metrics={})
    if (folder / FILE_NAME).exists():
        fill(run, (record for record, _ in read_lines(folder / FILE_NAME)))
    else:
        run.notes.append(f"{FILE_NAME} is missing: there are no curves.")
    add_files(run, folder)
    return run


def add_files(run: Run, folder: Path) -> None:
    """Fill in everything but the metrics of ``run`` from the files in ``folder``."""
    run.events, unreadable = read_events(folder / FINDINGS_FILE)
    if unreadable:
        run.notes.append(f"{unreadable} lines of {FINDINGS_FILE} could not be read.")
    run.config = _text(folder / "config.yaml")
    run.objective = _json(folder / "objective.json")
    note = _json(folder / "run.json")
    run.tags = {**{str(k): str(v) for k, v in (note.get("tags") or {}).items()}, **run.tags}
    run.started = run.started or str(note.get("started") or "")
    run.run_id = run.run_id or str(note.get("run_id") or "")
    records = folder / flight.FOLDER
    if records.is_dir():
        _add_records(run, records)


def _add_records(run: Run, records: Path) -> None:
    # What an alarm kept wins, the first alarm before later ones: after a rollback the ring holds the same steps anew.
    kept = (path for path in records.iterdir() if path.is_dir())
    for folder in [records, *sorted(kept, key=lambda path: path.name.rpartition("-")[2], reverse=True)]:
        run.records.update(flight.recorded_steps(folder))
        run.token_texts.update(flight.read_token_texts(folder))
        if reason := _json(folder / flight.REASON_FILE):
            run.dumps.append(reason)
    run.records = dict(sorted(run.records.items()))
    run.dumps.sort(key=lambda dump: int(dump.get("step") or 0))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def diagnoses(run: Run) -> list[dict[str, Any]]:
    """List the diagnosis events that have a step, in order."""
    return [e for e in run.events if e.get("event") == "diagnosis" and isinstance(e.get("step"), int)]


def main_diagnosis(run: Run) -> dict[str, Any] | None:
    """Return the diagnosis that stopped or rolled back the run, else the first of the gravest; None without any."""
    events = diagnoses(run)
    if not events:
        return None
    acted = [e for e in events if e.get("action") in ("stop", "rollback")]
    # max keeps the first of equals, which is the earliest.
    gravity = {"critical": 2, "warning": 1}
    return acted[0] if acted else max(events, key=lambda e: gravity.get(str(e.get("severity")), 0))


def planned_rollouts(settings: Mapping[str, Any]) -> int | None:
    """Return the number of rollouts that the configuration asks for; None if it does not say."""
    rollouts = (settings.get("data") or {}).get("rollouts") if isinstance(settings.get("data"), dict) else None
    return rollouts if isinstance(rollouts, int) else None


def how_it_ended(run: Run) -> str:
    """Say in one clause how the run ended: finished, stopped and why, broke off, or not finished."""
    done, planned = (run.steps[-1] if run.steps else 0), planned_rollouts(run.settings())
    after = f"after {done} rollouts" if planned in (None, done) else f"after {done} of {planned} rollouts"
    exception = next((d for d in reversed(run.dumps) if d.get("reason") == "exception"), None)
    # Most certain first: a stop on purpose is written down, while a run that was killed can write nothing.
    if reason := run.tags.get("stop.reason"):
        return f"stopped {after} by {run.tags.get('stop.callback', 'a monitor')}: {reason}"
    # An exception before the last step is not the end: the run was resumed after it.
    if exception is not None and int(exception.get("step") or 0) >= done:
        return f"broke off {after}: {exception.get('explanation')}"
    event = next((e for e in reversed(run.events) if e.get("event") == "exception" and e.get("reason")), None)
    if event is not None and int(event.get("step") or 0) >= done:
        return f"stopped {after}: {event['reason']}"
    if run.status in ("FAILED", "KILLED"):
        return f"{run.status.lower()} {after}"
    if run.status == "FINISHED" or (planned is not None and done >= planned):
        return f"finished {after}"
    return f"ended, was cut or is still running {after}; nothing says why"
