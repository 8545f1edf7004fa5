"""A model in MLflow's registry, as the next version of its name, below the run that trained it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.run.folder import shown
from lit_grpo.tracking.no_store import NO_STORE

MODEL_FOLDER = "model"
"""Folder of the model among the artifacts of the run."""


def check_run(run_folder: Path) -> tuple[str, str]:
    """Return the address of the MLflow store that a run is in and the run's id there.

    Args:
        run_folder: folder of the run, with its ``run.json``.

    Raises:
        UserError: it is no folder of a run, or the run is not in MLflow, or its store cannot be told.
    """
    try:
        note: dict[str, Any] = json.loads((run_folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{shown(run_folder)} is no folder of a run: it has no run.json",
            where="--register",
            remedy="export a checkpoint in the folder of its run, runs/NAME/checkpoints/last.ckpt",
        ) from error
    address, run_id = str(note.get("tracking_uri") or ""), note.get("run_id")
    if not run_id or address == NO_STORE:
        raise UserError(
            f"the run in {shown(run_folder)} is not in MLflow", where="--register", remedy="leave --register out"
        )
    # An address with a password stands there without it.
    return os.environ.get("MLFLOW_TRACKING_URI") or address, str(run_id)


def register(model: Path, name: str, address: str, run_id: str) -> int:
    """Upload a model folder to a run and make it the next version of a registered model.

    Args:
        model: a Hugging Face model folder.
        name: name of the registered model, which is made if there is none.
        address: the MLflow store.
        run_id: the run that trained it.

    Returns:
        The number of the version.

    Raises:
        UserError: MLflow refuses, or does not answer.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository

    client = MlflowClient(address, address)
    try:
        client.log_artifacts(run_id, str(model), MODEL_FOLDER)
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        source = RunsArtifactRepository.get_underlying_uri(f"runs:/{run_id}/{MODEL_FOLDER}", address)
        version = client.create_model_version(name, source, run_id, tags={"format": "huggingface"})
    except MlflowException as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"MLflow does not register {name!r}: {first}", where="--register") from error
    return int(version.version)
