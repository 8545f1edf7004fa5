"""What a run leaves behind: metrics in its folder and in MLflow, charts, and the summary at its end."""

from typing import TYPE_CHECKING

from lit_grpo.tracking.spool import read_metrics

if TYPE_CHECKING:
    from lit_grpo.tracking.mlflow_logger import RunLogger
    from lit_grpo.tracking.summary import RunSummary

__all__ = ["RunLogger", "RunSummary", "read_metrics"]


def __getattr__(name: str) -> object:
    # Importing Lightning takes seconds; readers of a run folder do not need it.
    if name == "RunLogger":
        from lit_grpo.tracking.mlflow_logger import RunLogger

        return RunLogger
    if name == "RunSummary":
        from lit_grpo.tracking.summary import RunSummary

        return RunSummary
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
