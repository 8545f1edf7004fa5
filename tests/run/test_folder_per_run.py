"""Whatever the logger, a second run neither replaces nor mixes what the first one left."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.errors import UserError
from lit_grpo.run.folder import goes_on_from
from lit_grpo.tracking import RunSummary
from tests.tiny import data, module

pytestmark = pytest.mark.slow


class SharedFolder(Logger):
    """A logger as Weights & Biases' is: its ``save_dir`` is one folder for all runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    @property
    def name(self) -> str:
        return "shared"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


LOGGERS = {
    "none": lambda folder: False,
    "shared": SharedFolder,
    "mlflow": lambda folder: MLFlowLogger("test", tracking_uri=f"sqlite:///{folder}/mlflow.db"),
    **({"tensorboard": lambda folder: TensorBoardLogger(folder)} if find_spec("tensorboard") else {}),
    "csv": lambda folder: CSVLogger(folder),
}


def fit(folder: Path, logger: Any, rollouts: int, ckpt_path: Path | None = None, **settings: Any) -> Path:
    checkpoint = RolloutCheckpoint(every_n_rollouts=1, **settings)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[checkpoint, RunSummary()],
    )  # fmt: skip
    if ckpt_path is not None:
        goes_on_from(trainer, ckpt_path)
    trainer.fit(module(), data(rollouts=rollouts), ckpt_path=None if ckpt_path is None else str(ckpt_path))
    assert checkpoint.dirpath is not None
    return checkpoint.dirpath


def contents(folder: Path) -> dict[Path, str]:
    names = ("*.ckpt", "curves.png", "objective.json")
    files = [path for name in names for path in folder.rglob(name) if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("logger", sorted(LOGGERS))
def test_a_second_run_leaves_the_first_ones_files_alone(tmp_path, logger):
    first = fit(tmp_path, LOGGERS[logger](tmp_path), 2)
    before = contents(tmp_path)
    assert before
    second = fit(tmp_path, LOGGERS[logger](tmp_path), 1)
    assert first != second
    after = contents(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert [path.name for path in second.glob("rollout-*")] == ["rollout-000001.ckpt"]


@pytest.mark.parametrize("logger", ["none", "shared"])
def test_a_run_that_goes_on_stays_in_its_folder(tmp_path, logger):
    fit(tmp_path, LOGGERS[logger](tmp_path), 1)
    second = fit(tmp_path, LOGGERS[logger](tmp_path), 1)
    resumed = fit(tmp_path, LOGGERS[logger](tmp_path), 2, second / "rollout-000001.ckpt")
    assert resumed == second
    assert (second / "rollout-000002.ckpt").exists()


def test_a_named_folder_with_another_runs_checkpoints_is_refused(tmp_path):
    place = tmp_path / "kept"
    fit(tmp_path, False, 1, dirpath=place)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="checkpoints of another run"):
        fit(tmp_path, False, 1, dirpath=place)
    assert {path: contents(tmp_path).get(path) for path in before} == before
    fit(tmp_path, False, 2, place / "rollout-000001.ckpt", dirpath=place)
