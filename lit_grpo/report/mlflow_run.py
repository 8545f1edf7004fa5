"""A run read from MLflow: its metrics by step and its artifacts, from a store, a server or an ``mlruns`` folder."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.report.run import RUN_ID, Run, add_files, fill, read_folder
from lit_grpo.tracking.mlflow_target import MAIN_CURVES

log = logging.getLogger(__name__)

ARTIFACTS = ("findings.jsonl", "config.yaml", "objective.json", "completions.json", "flight")


@contextmanager
def open_run(where: str, tracking_uri: str | None = None) -> Iterator[Run]:
    """Open the run that ``where`` names; its flight records exist as long as the context lasts.

    Args:
        where: a run folder; the id of an MLflow run (32 hex digits, or ``runs:/ID``); or the folder of an MLflow run:
            ``mlruns/EXPERIMENT/ID``, ``artifacts/ID`` or a folder inside.
        tracking_uri: MLflow store or server, for an id; else ``MLFLOW_TRACKING_URI``, else the ``mlflow.db`` in
            ``runs/`` or here.

    Raises:
        UserError: no such run exists, or its store cannot be reached.
    """
    text = where.removeprefix("runs:/").strip("/")
    path = Path(where)
    if RUN_ID.fullmatch(text) and not path.is_dir():
        with _downloaded(text, tracking_uri or _default_uri()) as run:
            yield run
        return
    # The id is the name of the run's folder, which may be any of those above the one that is named.
    folder = next((p for p in (path, *path.parents) if RUN_ID.fullmatch(p.name) and p.is_dir()), None)
    if folder is None or (path / "metrics.jsonl").exists():
        yield read_folder(path)
    elif (folder / "metrics").is_dir():
        yield read_file_store(folder)
    else:
        store = next((p / "mlflow.db" for p in folder.absolute().parents if (p / "mlflow.db").is_file()), None)
        if store is None and tracking_uri is None:
            raise UserError(
                f"there is no mlflow.db above {folder}",
                where="RUN",
                remedy=f"lit-grpo report {folder.name} --tracking-uri URI",
            )
        with _downloaded(folder.name, tracking_uri or f"sqlite:///{store}") as run:
            yield run


def _default_uri() -> str:
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    for path in (Path("runs/mlflow.db"), Path("mlflow.db")):
        if path.is_file():
            return f"sqlite:///{path.absolute()}"
    raise UserError(
        "an MLflow run is named, but not the store that holds it",
        where="RUN",
        remedy="add --tracking-uri sqlite:///path/mlflow.db (or http://...), or give the folder of the run",
    )


@contextmanager
def _downloaded(run_id: str, uri: str) -> Iterator[Run]:
    # Where no server answers, MLflow retries for minutes by default.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        # MLflow would create an empty store under that name.
        raise UserError(f"there is no MLflow store {uri}", where="--tracking-uri")
    client = MlflowClient(tracking_uri=uri)
    try:
        found = client.get_run(run_id)
        rows = _rows(client, run_id, found.data.metrics)
    except MlflowException as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"MLflow at {uri} gives no run {run_id}: {first}", where="RUN") from error
    start_time = found.info.start_time
    run = Run(
        name=found.info.run_name or run_id,
        source=f"MLflow run {run_id} in {uri}",
        steps=[],
        metrics={},
        tags={k: str(v) for k, v in found.data.tags.items() if not k.startswith("mlflow.")},
        started=datetime.fromtimestamp(start_time / 1000, UTC).isoformat(timespec="seconds") if start_time else "",
        run_id=run_id,
        status=found.info.status,
    )
    fill(run, rows)
    with tempfile.TemporaryDirectory(prefix="lit-grpo-report-") as folder:
        try:
            listed = {item.path for item in client.list_artifacts(run_id)}
            for name in ARTIFACTS:
                if name in listed:
                    log.debug("downloading %s of MLflow run %s", name, run_id)
                    client.download_artifacts(run_id, name, folder)
        # Clients of artifact stores raise exceptions of their own kinds, and the metrics alone make a report.
        except Exception as error:
            run.notes.append(f"Its artifacts could not be read: {str(error).partition(chr(10))[0][:200]}")
        add_files(run, Path(folder))
        yield run


def _rows(client: Any, run_id: str, keys: Any) -> list[dict[str, Any]]:
    # The main curves are there under a second name.
    own = (key for key in keys if key not in MAIN_CURVES.values())
    histories = ((key, client.get_metric_history(run_id, key)) for key in own)
    return _in_order([(m.timestamp, m.step, key, m.value) for key, history in histories for m in history])


def _in_order(points: list[tuple[int, int, str, float]]) -> list[dict[str, Any]]:
    """Turn (time in ms, step, key, value) into records in the order of logging; values of one time form one record."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for when, step, key, value in sorted(points, key=lambda point: point[:2]):
        rows.setdefault((when, step), {"step": step})[key] = value
    return list(rows.values())


def read_file_store(folder: Path) -> Run:
    """Read a run in an ``mlruns`` folder of MLflow's file store, which MLflow itself no longer opens."""
    import yaml

    points: list[tuple[int, int, str, float]] = []
    for path in sorted(p for p in (folder / "metrics").rglob("*") if p.is_file()):
        key = path.relative_to(folder / "metrics").as_posix()
        for line in path.read_text().splitlines():
            # A line is "time in ms, value, step"; a torn one is left out.
            words = line.split()
            if len(words) == 3:
                points.append((int(words[0]), int(words[2]), key, float(words[1])))
    meta = yaml.safe_load((folder / "meta.yaml").read_text()) if (folder / "meta.yaml").is_file() else {}
    tags = folder / "tags"
    status = {3: "FINISHED", 4: "FAILED", 5: "KILLED"}.get(meta.get("status") or 0, "")
    run = Run(
        name=str(meta.get("run_name") or folder.name),
        source=str(folder),
        steps=[],
        metrics={},
        tags={p.name: p.read_text().strip() for p in tags.iterdir() if not p.name.startswith("mlflow.")}
        if tags.is_dir()
        else {},
        run_id=folder.name,
        status=status,
    )
    fill(run, _in_order(points))
    add_files(run, folder / "artifacts")
    return run
