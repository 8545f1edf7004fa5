"""MLflow's own client, made when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_grpo.tracking.mlflow_target import MlflowTarget
from lit_grpo.tracking.no_store import NO_STORE, NoStore


class LazyClient:
    """Stand-in for ``MlflowClient`` that makes the client at its first use.

    Args:
        open_target: opens the run, and returns where it is kept.
    """

    # Lightning touches `logger.experiment` before any data is read, and importing MLflow takes 5 seconds.

    def __init__(self, open_target: Callable[[], MlflowTarget | NoStore]) -> None:
        self._open_target = open_target

    def __getattr__(self, name: str) -> Any:
        target = self._open_target()
        if isinstance(target, NoStore):
            raise AttributeError(
                f"the run is kept in its folder alone (tracking_uri: {NO_STORE}): MLflow has no {name}"
            )
        return getattr(target.client, name)
