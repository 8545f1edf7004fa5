"""Tracking of a run: metrics in its folder and in MLflow, charts, and the summary at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.utils.imports import lazy_attributes

if TYPE_CHECKING:
    from lit_grpo.tracking.completions import CompletionTable as CompletionTable
    from lit_grpo.tracking.mlflow_logger import RunLogger as RunLogger
    from lit_grpo.tracking.spool import read_metrics as read_metrics
    from lit_grpo.tracking.summary import RunSummary as RunSummary

_MODULES = {
    "CompletionTable": "completions",
    "RunLogger": "mlflow_logger",
    "RunSummary": "summary",
    "read_metrics": "spool",
}

# Importing Lightning takes seconds; readers of a run folder do not need it.
__getattr__ = lazy_attributes(__name__, _MODULES)
__all__ = sorted(_MODULES)
