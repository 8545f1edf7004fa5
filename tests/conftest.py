"""What the tests of several folders share, made once a session."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store of MLflow with its tables, which take seconds to make. Copy it, never write to it."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_runs(tmp_path: Path, empty_mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``tmp_path/runs`` with an MLflow store of this test alone in it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(empty_mlflow_store, runs / "mlflow.db")
    return runs
