"""The record of a run whose trackers are not ours: the same folder, without MLflow."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_grpo.run.folder import ROOT_DIR, check_can_be_made
from lit_grpo.tracking.mlflow_logger import RunLogger
from lit_grpo.tracking.no_store import NO_STORE


class FolderRecord(RunLogger):
    """Logger beside other loggers, or none, that gives the run what :class:`RunLogger` gives it, MLflow aside.

    It is attached to the Trainer where no ``RunLogger`` is: the run then has a folder of its own with its metrics,
    configuration, findings, completions, curves, checkpoints and report, whatever tracker it has.

    Args:
        root: folder of all runs.
        run_dir: folder of this run; None: a new one in ``root``.
        always: False keeps nothing as long as nothing has asked for the folder of the run: a Trainer without a logger
            and without callbacks that write leaves no trace.
    """

    def __init__(self, root: Path, run_dir: Path | None = None, *, always: bool = True) -> None:
        # Not by its root, which is looked at here only where something will be written.
        super().__init__(run_dir=None if run_dir is None else str(run_dir), tracking_uri=NO_STORE)
        self._set_root(root)
        self._has_root, self._wanted = True, always
        if always and run_dir is None and getattr(rank_zero_only, "rank", 0) == 0:
            check_can_be_made(root, ROOT_DIR)

    @property
    def wanted(self) -> bool:
        """Whether anything has asked for a record."""
        return self._wanted

    @property
    def run_dir(self) -> Path | None:
        self._wanted = True
        return super().run_dir

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._wanted:
            super().log_metrics(metrics, step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        if self._wanted:
            super().log_hyperparams(params, *args, **kwargs)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        if self._wanted:
            super().set_tags(tags)

    def continue_from(self, step: int) -> None:
        if self._wanted:
            super().continue_from(step)
