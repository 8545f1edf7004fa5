"""Where ``--ckpt_path last`` and ``best`` look, from a configuration of which nothing is built yet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_grpo.run.folder import RUNS
from lit_grpo.trainer.checkpoint_words import CheckpointPlaces, runs_named

_NUMBERED = ("TensorBoardLogger", "CSVLogger")
"""Loggers of Lightning that give every run a numbered folder, in which its checkpoints are."""


def places_in(trainer: Any, checkpoint: Any) -> CheckpointPlaces:
    """Return the places of checkpoints that a configuration names.

    Args:
        trainer: its section ``trainer``.
        checkpoint: its section ``checkpoint``; None: it has none.
    """
    named = checkpoint.get("dirpath") if checkpoint else None
    folders = [Path(named).absolute()] if named else []
    base = Path(str(trainer.get("default_root_dir") or "."))
    loggers = list(_loggers(trainer.get("logger")))
    for name, settings in loggers:
        if name == "RunLogger":
            root = Path(settings.get("root") or base / RUNS)
            if settings.get("run_dir"):
                return CheckpointPlaces(folders=folders, runs=[Path(settings["run_dir"])])
            runs = runs_named(root, settings["run_name"]) if settings.get("run_name") else []
            return CheckpointPlaces(folders=folders, runs=runs, roots=[root])
    roots = [
        Path(str(settings.get("save_dir") or base)) / str(settings.get("name") or "lightning_logs")
        for name, settings in loggers
        if name in _NUMBERED
    ]
    return CheckpointPlaces(folders=folders, roots=roots or [base / RUNS])


def _loggers(configured: Any) -> Iterable[tuple[str, Any]]:
    """Yield (name of the class, its arguments) of each logger in a configuration."""
    if configured is True:
        yield "CSVLogger", {}
    for one in configured if isinstance(configured, list) else [configured]:
        if hasattr(one, "get") and one.get("class_path"):
            yield str(one.get("class_path")).rpartition(".")[2], one.get("init_args") or {}
