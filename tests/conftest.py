"""What the tests of several folders share, made once a session."""

import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A time limit an example, or for drawing examples, says something of the machine and nothing of the code. Everything
# else stays as it is where the tests run.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# What a run sets for its own process, where nobody else has: how long MLflow is asked, and where W&B writes.
_SET_BY_RUNS = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "WANDB_MODE")
_AT_THE_START = {name: os.environ.get(name) for name in _SET_BY_RUNS}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Take away the seed and the settings of an earlier test: which one ran before in this process is chance.

    ``seed_everything`` leaves the seed in the environment, where every run reads it. Not a fixture: those of a module
    or a session come before those of a test, and train too.
    """
    for name, value in (dict.fromkeys(("PL_GLOBAL_SEED", "PL_SEED_WORKERS")) | _AT_THE_START).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # The command line shows errors in its own way where nobody else does; wandb does too.
    sys.excepthook = sys.__excepthook__


@pytest.fixture(autouse=True)
def messages_reach_the_test() -> None:
    """Undo what an earlier test of the same process may have left: another rank, or a logger that keeps to itself."""
    # MLflow puts the store that it was last given into the environment, where the next run would write too.
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    # Scripts that run many trainings silence all loggers of their process.
    logging.disable(logging.NOTSET)
    # Lightning says nothing on ranks above 0, and remembers the rank of the last strategy; its loggers do not
    # propagate where they were made before there was a handler. Looked up, for not every test imports it.
    module = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = 0
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).propagate = True
            logging.getLogger(name).setLevel(logging.INFO)
    if "transformers" in sys.modules:
        logging.getLogger("transformers").setLevel(logging.WARNING)
    # Alembic, with which MLflow and Optuna make their tables, switches off every logger that it does not know.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] in ("lightning", "lit_grpo") and isinstance(logger, logging.Logger):
            logger.disabled = False


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
