"""Runs that are killed at random and at chosen moments and resumed: is every step once in the file and in MLflow?"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.chaos_cases.forked_runs import CONFIG, kill_self_at, start

ROLLOUTS = 12


@dataclass
class Count:
    """What was found of the runs of one point of the kill."""

    runs: int = 0
    kills: int = 0
    resumed: int = 0
    gaps: int = 0
    duplicates: int = 0
    file_faults: int = 0
    left_running: int = 0
    not_ended: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return self.gaps + self.duplicates + self.file_faults + self.left_running + self.not_ended


def half_a_line(spool: Any, record: Any) -> None:
    """Write the first half of a line, as a kill in mid-write leaves it."""
    if spool._file is None:
        spool._file = spool._open()
    line = json.dumps(record).encode()
    spool._file.write(line[: len(line) // 2])
    spool._file.flush()


def points() -> dict[str, Callable[[int], Callable[[], None]]]:
    """Return by name what plants a kill at the n-th occurrence of a moment."""

    def at(module: str, cls: str | None, name: str, before: Any = None) -> Callable[[int], Callable[[], None]]:
        def plant(count: int) -> None:
            import importlib

            owner: Any = importlib.import_module(module)
            kill_self_at(owner if cls is None else getattr(owner, cls), name, count, before=before)

        return lambda count: partial(plant, count)

    tracking = "lit_grpo.tracking"
    nothing = lambda *args, **kwargs: None  # noqa: E731
    return {
        "half a line": at(f"{tracking}.spool", "Spool", "append", half_a_line),
        "a line written": at(f"{tracking}.spool", "Spool", "append"),
        "MLflow has it, not noted": at(f"{tracking}.mlflow_target", "MlflowTarget", "metrics"),
        "noted": at(f"{tracking}.mlflow_logger", "RunLogger", "_note"),
        "before a note": at(f"{tracking}.mlflow_logger", "RunLogger", "_note", nothing),
        "checkpoint saved, not logged": at("lit_grpo.callbacks.rollout_checkpoint", None, "link_atomically"),
        "MLflow run made, id not noted": at(f"{tracking}.mlflow_logger", "RunLogger", "_on_start", nothing),
    }


def make_folder(root: Path, store: Path) -> Path:
    """Make a folder with the configuration and an MLflow store that has its tables."""
    (root / "runs").mkdir(parents=True)
    shutil.copy(store, root / "runs" / "mlflow.db")
    (root / "a.yaml").write_text(CONFIG)
    return root


def make_store(root: Path) -> Path:
    """Make an empty MLflow store, which takes seconds."""
    path = root / "store.db"
    # In another process: what MLflow keeps open must not be inherited by the runs.
    code = f"from mlflow.tracking import MlflowClient; MlflowClient('sqlite:///{path}').search_experiments()"
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    return path


def rows_by_step(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the rows of training of a run's metrics.jsonl; a line that is no JSON raises."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        rows.setdefault(record["step"], []).append(record)
    return rows


def history(database: Path, run_id: str | None = None) -> list[tuple[str, str, dict[int, int], dict[str, int]]]:
    """Return (id, status, number of values of ``reward`` by step, values a key) of each run in an SQLite store."""
    import sqlite3

    with sqlite3.connect(database) as db:
        runs = db.execute("select run_uuid, status from runs").fetchall()
        out = []
        for found, status in runs:
            steps = Counter(
                s for (s,) in db.execute("select step from metrics where run_uuid=? and key='reward'", (found,))
            )
            several = db.execute(
                "select key, count(*) from metrics where run_uuid=? group by key, step having count(*) > 1", (found,)
            ).fetchall()
            out.append((found, status, dict(steps), dict(several)))
        return out


def go_on(folder: Path, started: list[str]) -> list[str]:
    """Return the command that goes on with the newest run that has a checkpoint, else the one that began it."""
    found = sorted((folder / "runs").glob("*/checkpoints/last.ckpt"))
    if not found:
        return started
    run = found[-1].parent.parent
    return shlex.split(
        f"fit --config {run.relative_to(folder)}/config.yaml --ckpt_path {found[-1].relative_to(folder)}"
    )


def attack(folder: Path, rng: random.Random, kind: str, count: Count, expected: dict[int, dict[str, Any]]) -> None:
    """Kill one run once or several times, let it end, and look at what is left."""
    first = ["fit", "--config", "a.yaml"]
    named = rng.random() < 0.5
    first += ["--trainer.logger.run_name", "mine"] if named else []
    command, kills = first, rng.choice((1, 1, 2, 3))
    planted = points().get(kind)
    while True:
        killing = kills > 0
        kills -= 1
        prepare: Callable[[], None] = planted(rng.randint(1, 14)) if killing and planted is not None else (lambda: None)
        run = start(command, folder, partial(without_pictures, prepare))
        if killing and planted is None:
            _kill_at_random(run, folder, rng)
        code = run.wait(120)
        count.kills += code == -9
        if code is None:
            count.not_ended += 1
            count.notes.append(f"{folder}: did not end")
            return
        if code == 0:
            break
        if code != -9:
            count.not_ended += 1
            count.notes.append(f"{folder}: exit code {code}")
            return
        command = go_on(folder, first)
        count.resumed += command is not first
    count.runs += 1
    judge(folder, count, expected)


def without_pictures(then: Callable[[], None]) -> None:
    """Leave out report and curves, which take most of the time of so short a run and are none of the record."""
    import lit_grpo.report.writer
    import lit_grpo.tracking.summary

    lit_grpo.report.writer.ReportWriter._write = lambda *args, **kwargs: None  # type: ignore[method-assign]
    lit_grpo.tracking.summary.RunSummary._draw = lambda self: None  # type: ignore[method-assign]
    then()


def _kill_at_random(run: Any, folder: Path, rng: random.Random) -> None:
    """Kill a run at a random moment from its first line on."""
    before = sum(path.stat().st_size for path in folder.glob("runs/*/metrics.jsonl"))
    end = time.monotonic() + 60
    while run.poll() is None and time.monotonic() < end:
        if sum(path.stat().st_size for path in folder.glob("runs/*/metrics.jsonl")) > before:
            break
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 2.5))
    run.kill()


def judge(folder: Path, count: Count, expected: dict[int, dict[str, Any]]) -> None:
    """Compare file and store with those of an unbroken run."""
    runs = history(folder / "runs" / "mlflow.db")
    count.left_running += sum(status in ("RUNNING", "SCHEDULED") for _, status, _, _ in runs)
    if any(status == "RUNNING" for _, status, _, _ in runs):
        count.notes.append(f"{folder}: {[(status, len(steps)) for _, status, steps, _ in runs]}")
    finished = [run for run in runs if run[1] == "FINISHED"]
    if len(finished) != 1:
        count.not_ended += 1
        count.notes.append(f"{folder}: {len(finished)} finished runs")
        return
    _, _, steps, several = finished[0]
    missing = [step for step in range(1, ROLLOUTS + 1) if step not in steps]
    if missing:
        count.gaps += 1
        count.notes.append(f"{folder}: MLflow lacks {missing}")
    if several:
        count.duplicates += 1
        count.notes.append(f"{folder}: MLflow twice {list(several.items())[:3]}")
    for path in (folder / "runs").glob("*/run.json"):
        if json.loads(path.read_text())["run_id"] != finished[0][0]:
            continue
        try:
            rows = rows_by_step(path.parent)
        except ValueError as error:
            count.file_faults += 1
            count.notes.append(f"{path.parent}: a line is torn: {error}")
            return
        wrong = [s for s in range(1, ROLLOUTS + 1) if len(rows.get(s, ())) != 1]
        from lit_grpo.tracking.spool import same_values

        wrong += [s for s, found in rows.items() if not same_values(found[0], expected.get(s, {}))]
        if wrong:
            count.file_faults += 1
            count.notes.append(f"{path.parent}: steps {sorted(set(wrong))} of metrics.jsonl")


def unbroken(root: Path, store: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a run that nobody kills, by step."""
    folder = make_folder(root / "unbroken", store)
    run = start(["fit", "--config", "a.yaml"], folder)
    if run.wait(180) != 0:
        raise SystemExit(f"the unbroken run failed:\n{run.text}")
    (path,) = (folder / "runs").glob("*/metrics.jsonl")
    return {step: rows[0] for step, rows in rows_by_step(path.parent).items()}


def measure(root: Path, kills: int, seed: int = 0, kinds: tuple[str, ...] = ()) -> dict[str, Count]:
    """Attack runs until so many were killed, turn by turn at each point, and count; progress goes to standard error."""
    store = make_store(root)
    expected = unbroken(root, store)
    names = kinds or ("random", *points())
    counts = {name: Count() for name in names}
    number = 0
    while sum(count.kills for count in counts.values()) < kills:
        # Half of the kills come at a random moment.
        name = names[0] if number % 2 == 0 else names[1 + (number // 2) % (len(names) - 1)] if names[1:] else names[0]
        folder = make_folder(root / f"run-{number:03d}", store)
        before = counts[name].bad
        attack(folder, random.Random(f"{seed} {number}"), name, counts[name], expected)
        if counts[name].bad == before:
            shutil.rmtree(folder)
        number += 1
        total = {
            key: sum(getattr(count, key) for count in counts.values()) for key in ("runs", "kills", "resumed", "bad")
        }
        print(f"  {name}: {total}", file=sys.stderr, flush=True)
    return counts
