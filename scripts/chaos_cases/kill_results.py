"""Comparison of a run that was killed and resumed with one that was not: everything it leaves, to the bit."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lit_grpo.callbacks.diagnosis.actions import FINDINGS_FILE, read_journal
from lit_grpo.tracking.spool import read_metrics
from scripts.chaos_cases.kill_runs import PROBE_FILE

TRACKED = ("mlflow", "twice")
"""What depends on the server, and on what had reached it when the run was killed."""
TIMED = re.compile(r"(^|/|\.)(time|memory|system|wall_time|throughput)(/|$)")


def run_folder(case: Path) -> Path | None:
    """Return the run's own folder of a case; None if it made none."""
    return next((path for path in sorted((case / "runs").iterdir()) if (path / "run.json").exists()), None)


def differences(whole: Path, case: Path) -> dict[str, list[str]]:
    """Compare two cases; an empty list under each name where they are equal.

    ``state``: weights, optimizers, schedules, random state, loader, callbacks of the last checkpoint. ``samples``:
    digests of all that was sampled. ``metrics``: rows of metrics.jsonl, a missing key counted as well as another value.
    ``journal``: findings.jsonl. ``files``: names of checkpoints, and what was left half-written. ``mlflow``: points of
    each series by step, gaps and other values; ``twice``: points that are there more often than in the unbroken run.
    """
    a, b = run_folder(whole), run_folder(case)
    assert a is not None
    if b is None:
        return {"state": ["no run"], **{part: [] for part in ("samples", "metrics", "journal", "files", *TRACKED)}}
    return {
        "state": list(_unequal(_checkpoint(a), _checkpoint(b), ""))[:5],
        "samples": _samples(whole, case),
        "metrics": _metrics(a, b),
        "journal": _journal(a, b),
        "files": _files(a, b),
        **_mlflow(whole, case),
    }


def _checkpoint(folder: Path) -> Any:
    path = folder / "checkpoints" / "last.ckpt"
    if not path.exists():
        return {}
    if path.is_dir():
        from lit_grpo.distributed.checkpoint import read_sharded

        return read_sharded(path.resolve(), optimizers=True)
    return torch.load(path, weights_only=True, map_location="cpu")


def _unequal(a: Any, b: Any, where: str) -> Iterator[str]:
    if TIMED.search(where):
        return
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({str(k) for k in a} ^ {str(k) for k in b}):
            if not TIMED.search(key):
                yield f"{where}.{key} is only in one"
        for key in a:
            if key in b and not TIMED.search(str(key)):
                yield from _unequal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            yield f"{where} has {len(a)} and {len(b)} entries"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _unequal(x, y, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        if not same or not torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        ):
            yield f"{where} differs"
    elif not (a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))):
        yield f"{where}: {a!r} and {b!r}"


def _samples(whole: Path, case: Path) -> list[str]:
    found = []
    for file in sorted(whole.glob(f"{PROBE_FILE}.*")):
        a, b = _digests(file), _digests(case / file.name)
        found += [f"rollout {step}" for step in sorted(a.keys() | b.keys()) if a.get(step) != b.get(step)]
    return found[:5]


def _digests(path: Path) -> dict[int, str]:
    out: dict[int, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        # What is trained on again counts as it was the last time.
        out[entry["rollout"]] = entry["digest"]
    return out


def _metrics(a: Path, b: Path) -> list[str]:
    one = {row["step"]: row for row in read_metrics(a)}
    other = {row["step"]: row for row in read_metrics(b)}
    found = [f"step {step} is only in one" for step in sorted(one.keys() ^ other.keys())]
    for step in sorted(one.keys() & other.keys()):
        keys = [k for k in {*one[step], *other[step]} if not TIMED.search(k)]
        wrong = sorted(k for k in keys if not _same_number(one[step].get(k), other[step].get(k)))
        if wrong:
            found.append(f"step {step}: {', '.join(wrong[:4])}")
    return found[:5]


def _same_number(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _mlflow(whole: Path, case: Path) -> dict[str, list[str]]:
    a, b = _points(whole), _points(case)
    found: dict[str, list[str]] = {part: [] for part in TRACKED}
    for key in sorted(a.keys() | b.keys()):
        one, other = a.get(key, {}), b.get(key, {})
        if missing := sorted(one.keys() - other.keys()):
            found["mlflow"].append(f"{key} lacks {missing[:5]}")
        if wrong := sorted(s for s in one.keys() & other.keys() if one[s][-1:] != other[s][-1:]):
            found["mlflow"].append(f"{key} differs at {wrong[:5]}")
        if twice := sorted(s for s in other if len(other[s]) > len(one.get(s, [0]))):
            found["twice"].append(f"{key} at {twice[:5]}")
    return {part: entries[:3] for part, entries in found.items()}


def _points(case: Path) -> dict[str, dict[int, list[tuple[float, int]]]]:
    """Return the values of all MLflow runs of a case, by series and step, in the order of time."""
    out: dict[str, dict[int, list[tuple[float, int]]]] = {}
    # Not read-only: a store whose process was killed must first take back what was half-written.
    with sqlite3.connect(case / "runs" / "mlflow.db") as store:
        for key, step, value, is_nan in store.execute(
            "select key, step, value, is_nan from metrics order by timestamp"
        ):
            if not TIMED.search(key):
                out.setdefault(key, {}).setdefault(step, []).append((value, is_nan))
    return out


def _journal(a: Path, b: Path) -> list[str]:
    one, other = (_events(folder / FINDINGS_FILE) for folder in (a, b))
    if one == other:
        return []
    return [
        f"{len(one)} and {len(other)} events",
        *(f"{x} and {y}" for x, y in zip(one, other, strict=False) if x != y),
    ][:3]


def _events(path: Path) -> list[Any]:
    events = read_journal(path) if path.exists() else []
    return [event for event in events if event["event"] != "exception"]


def _files(a: Path, b: Path) -> list[str]:
    found = []
    for folder in ("checkpoints", "rollback"):
        one, other = (
            sorted(p.name for p in (run / folder).glob("*")) if (run / folder).exists() else None for run in (a, b)
        )
        if one != other:
            found.append(f"{folder}: {one} and {other}")
        found += [f"{folder}/{path.name} is left" for path in (b / folder).glob(".*")]
    return found
