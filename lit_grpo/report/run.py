"""A run with all that a report shows, read from its folder; :mod:`lit_grpo.report.mlflow_run` reads one from MLflow."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_grpo.errors import UserError
from lit_grpo.report.recorded import read_rows
from lit_grpo.run import flight
from lit_grpo.run.folder import shown
from lit_grpo.run.stop import KEYBOARD
from lit_grpo.tracking.charts import History
from lit_grpo.tracking.spool import FILE_NAME, read_lines
from lit_grpo.utils.spelling import nearest

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
    parameters: dict[str, str] = field(default_factory=dict)
    """Parameters of the run by dotted names, as text."""
    objective: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    """Data sets and model that the run noted as its inputs."""
    command: str = ""
    """What was typed to start the run, the program first; empty if it is not known."""
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
    completions: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the recorded completions, one a completion."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    def settings(self) -> dict[str, Any]:
        """Return the configuration as plain values; empty if there is none or it cannot be read.

        A run of a program of one's own has no file of it; its settings are told from its parameters.
        """
        import yaml

        if not self.config:
            return _nested(self.parameters)

        try:
            value = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return value if isinstance(value, dict) else {}


def _nested(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the parameters of module and data module, nested as in a configuration file."""
    found: dict[str, Any] = {}
    for name, text in parameters.items():
        *above, last = name.split(".")
        if above[:1] not in (["model"], ["data"]):
            continue
        place = found
        for part in above:
            below = place.setdefault(part, {})
            # Of a name that has a value and others below it, those below are kept.
            place[part] = place = below if isinstance(below, dict) else {}
        try:
            place.setdefault(last, ast.literal_eval(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            place.setdefault(last, text)
    return found


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
    """Return steps and metrics by key from records with ``step``."""
    keys = sorted({key for row in rows for key in row} - {"step", "wall_time", "epoch"})
    steps = [int(row.get("step", 0)) for row in rows]
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


def is_run_folder(folder: Path) -> bool:
    """Tell whether a folder holds anything of a run: metrics, findings or a flight record."""
    return any((folder / name).exists() for name in (FILE_NAME, FINDINGS_FILE, flight.FOLDER))


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
    if not is_run_folder(folder):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{FILE_NAME}"))
        raise UserError(
            f"{shown(folder)} is no run folder: it holds no {FILE_NAME}",
            where="RUN",
            remedy=f"it holds runs: {', '.join(inside[:8])}" if inside else "give folders of runs",
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
    run.parameters = {str(k): str(v) for k, v in _json(folder / "params.json").items()}
    run.objective = _json(folder / "objective.json")
    note = _json(folder / "run.json")
    own = {str(k): str(v) for k, v in (note.get("tags") or {}).items() if not str(k).startswith("mlflow.")}
    run.tags = {**own, **run.tags}
    run.command = str((note.get("tags") or {}).get("mlflow.source.name") or "")
    inputs = note.get("inputs")
    run.inputs = inputs if isinstance(inputs, dict) else {}
    run.started = run.started or str(note.get("started") or "")
    run.run_id = run.run_id or str(note.get("run_id") or "")
    records = folder / flight.FOLDER
    if records.is_dir():
        _add_records(run, records)
    run.completions = read_rows(folder)


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


GRAVITY = {"critical": 2, "warning": 1}
"""Weight of a severity; any other has 0."""


@dataclass
class Episode:
    """A diagnosis from when it was made until it was over."""

    event: dict[str, Any]
    """Its gravest ``diagnosis`` event, or the one that was acted on."""
    over: int | None = None
    """Step at which it was over; None if it held at the end of the run, as far as the events say."""
    left_behind: bool = False
    """Whether a rollback ended it."""

    @property
    def gravity(self) -> int:
        return GRAVITY.get(str(self.event.get("severity")), 0)


def episodes(run: Run) -> list[Episode]:
    """Return all diagnoses of the run in order, each with when it was over."""
    return _replay(run)[0]


def held_at_the_end(run: Run) -> dict[str, int]:
    """Return the gravity of every diagnosis above ``info`` that held at the end of the run, by name, gravest first."""
    found, findings = _replay(run)
    held = [(str(e.event.get("diagnosis") or "unnamed"), e.gravity) for e in found if e.over is None]
    # A finding that joined a graver diagnosis never had an event under the name of its own.
    held += [(str(f["diagnosis"]), GRAVITY.get(str(f.get("severity")), 0)) for f in findings]
    ordered = sorted((pair for pair in held if pair[1]), key=lambda pair: -pair[1])
    return {name: next(g for n, g in ordered if n == name) for name, _ in ordered}


def _replay(run: Run) -> tuple[list[Episode], list[dict[str, Any]]]:
    """Return all diagnoses, and the ``finding`` events of what held at the end."""
    found: list[Episode] = []
    current: dict[str, Episode] = {}
    holding: dict[tuple[str, str], dict[str, Any]] = {}
    for event in run.events:
        name, step = str(event.get("diagnosis") or "unnamed"), event.get("step")
        finding = (str(event.get("monitor")), str(event.get("kind")))
        kind = event.get("event")
        if kind == "finding" and "diagnosis" in event:
            holding[finding] = event
        elif kind == "diagnosis" and isinstance(step, int):
            if name not in current:
                found.append(Episode(event))
                current[name] = found[-1]
            elif _weight(event) > _weight(current[name].event):
                current[name].event = event
        elif kind == "over":
            holding.pop(finding, None)
            if name in current and all(f["diagnosis"] != name for f in holding.values()):
                current.pop(name).over = step if isinstance(step, int) else None
        elif kind == "rollback":
            # What was seen before the point of return is still there after it.
            for gone in [name for name, episode in current.items() if _left_behind(episode.event, event)]:
                episode = current.pop(gone)
                episode.over, episode.left_behind = step if isinstance(step, int) else None, True
            holding = {key: value for key, value in holding.items() if not _left_behind(value, event)}
    return found, list(holding.values())


def _left_behind(event: Mapping[str, Any], rollback: Mapping[str, Any]) -> bool:
    step, target = event.get("step"), rollback.get("target")
    return not isinstance(target, int) or not isinstance(step, int) or step > target


def _weight(event: Mapping[str, Any]) -> tuple[bool, int]:
    return event.get("action") in ("stop", "rollback"), GRAVITY.get(str(event.get("severity")), 0)


def main_episode(run: Run) -> Episode | None:
    """Return the diagnosis that tells the story of the run; None without any.

    The one that stopped it, else the first that was rolled back, else the gravest above ``info`` that held at the end,
    else the gravest; of equals the first.
    """
    found = episodes(run)
    for action in ("stop", "rollback"):
        if acted := [e for e in found if e.event.get("action") == action]:
            return acted[-1] if action == "stop" else acted[0]
    held = [e for e in found if e.over is None and e.gravity]
    # max keeps the first of equals, which is the earliest.
    return max(held or found, key=lambda e: e.gravity, default=None)


def planned_rollouts(settings: Mapping[str, Any]) -> int | None:
    """Return the number of rollouts that the configuration asks for; None if it does not say."""
    rollouts = (settings.get("data") or {}).get("rollouts") if isinstance(settings.get("data"), dict) else None
    return rollouts if isinstance(rollouts, int) else None


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    state: Literal["finished", "stopped", "interrupted", "broken", "unknown"]
    """``stopped`` by a callback or a guard; ``interrupted`` by a person; ``broken`` by an error; ``unknown``: cut, or
    still running."""
    text: str
    """The same in one clause, with the reason."""


def how_it_ended(run: Run) -> Ending:
    """Say how the run ended: finished, stopped and why, broke off, or not finished."""
    done, planned = (run.steps[-1] if run.steps else 0), planned_rollouts(run.settings())
    after = f"after {done} rollouts" if planned in (None, done) else f"after {done} of {planned} rollouts"
    exception = next((d for d in reversed(run.dumps) if d.get("reason") == "exception"), None)
    # Most certain first: a stop on purpose is written down, while a run that was killed can write nothing.
    if reason := run.tags.get("stop.reason"):
        by = run.tags.get("stop.callback", "a monitor")
        return Ending("interrupted" if by == KEYBOARD else "stopped", f"stopped {after} by {by}: {reason}")
    # An exception before the last step is not the end: the run was resumed after it.
    if exception is not None and int(exception.get("step") or 0) >= done:
        return Ending("broken", f"broke off {after}: {exception.get('explanation')}")
    event = next((e for e in reversed(run.events) if e.get("event") == "exception" and e.get("reason")), None)
    if event is not None and int(event.get("step") or 0) >= done:
        return Ending("stopped", f"stopped {after}: {event['reason']}")
    if run.status in ("FAILED", "KILLED"):
        return Ending("broken" if run.status == "FAILED" else "stopped", f"{run.status.lower()} {after}")
    if run.status == "FINISHED" or (planned is not None and done >= planned):
        return Ending("finished", f"finished {after}")
    return Ending("unknown", f"ended, was cut or is still running {after}; nothing says why")


Gravity = Literal["good", "calm", "warning", "critical"]


@dataclass(frozen=True)
class Headline:
    """The state in which a run ended, in a few words."""

    gravity: Gravity
    text: str


def headline(run: Run, ending: Ending, *, watched: bool) -> Headline:
    """Say in what state the run ended. Warnings that were over by then are not part of it.

    Args:
        run: the run.
        ending: how it ended.
        watched: whether any monitor was on, as far as is known.
    """
    held = held_at_the_end(run)
    names = ", ".join(held)
    main = main_episode(run)
    if ending.state == "stopped":
        guard = next((e for e in reversed(run.events) if e.get("event") == "exception"), None)
        why = str((guard or {}).get("diagnosis") or names)
        if main is not None and main.event.get("action") == "stop":
            why = str(main.event.get("diagnosis") or "unnamed")
        return Headline("critical", f"✖ stopped: {why}" if why else "✖ stopped")
    if ending.state == "broken":
        return Headline("critical", "✖ ended by an error" + (f", while this held: {names}" if names else ""))
    start = ending.state if ending.state != "unknown" else "not finished, or still running"
    if held:
        gravity: Gravity = "critical" if max(held.values()) == GRAVITY["critical"] else "warning"
        return Headline(gravity, f"{'✖' if gravity == 'critical' else '▲'} {start}; held at the end: {names}")
    if ending.state != "finished":
        return Headline("calm", f"● {start}" + ("; nothing wrong at the last step" if watched else ""))
    return Headline("good", "✔ finished, healthy") if watched else Headline("calm", "● finished")
