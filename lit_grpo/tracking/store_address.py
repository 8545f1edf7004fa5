"""The address of the MLflow store of a run, and how a person gets from there to the run."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from lit_grpo.errors import UserError
from lit_grpo.tracking.no_store import NO_STORE
from lit_grpo.utils.secrets import masked_text


@dataclass(frozen=True)
class StoreAddress:
    """Where the MLflow run of a run is kept."""

    uri: str
    """Address of the store or server, or ``none``: the run is kept in its folder alone."""
    artifact_location: str | None
    """Place where a new experiment keeps its artifacts; None: the server chooses."""

    @classmethod
    def choose(cls, root: Path, uri: str | None, artifact_location: str | None) -> StoreAddress:
        """Return the address that was given, or else the one that is in force for runs below a folder.

        Args:
            root: folder of all runs, absolute; a store of its own is ``mlflow.db`` in it.
            uri: address that was given; None: ``MLFLOW_TRACKING_URI``, or a store in ``root``.
            artifact_location: place that was given; None: ``root/artifacts`` for an SQLite store.

        Raises:
            UserError: the address is one of plain files, in which MLflow no longer keeps runs.
        """
        # Read now, not at import: a program may set the variable after importing us.
        address = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root}/mlflow.db"
        is_address = "://" in address or address in ("databricks", NO_STORE)
        if address.startswith("file:") or not is_address:
            raise UserError(
                f"MLflow no longer keeps runs in plain files: {masked_text(address)!r}",
                where="RunLogger.tracking_uri" if uri else "environment variable MLFLOW_TRACKING_URI",
                remedy="leave it out, or give sqlite:///path/mlflow.db or the address of a server",
            )
        if artifact_location is None and address.startswith("sqlite:"):
            artifact_location = (root / "artifacts").as_uri()
        return cls(address, artifact_location)

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return masked_text(self.uri)

    def page(self, run_id: str | None, experiment_id: str | None) -> str | None:
        """Return the address of a run's page where MLflow shows a local store; None for a server.

        MLflow's own first page shows traces of language models, of which a run has none.

        Args:
            run_id: id of the run; None: it is not known yet.
            experiment_id: id of its experiment; likewise.
        """
        if not self.uri.startswith("sqlite:") or run_id is None or experiment_id is None:
            return None
        return f"http://127.0.0.1:5000/#/experiments/{experiment_id}/runs/{run_id}/model-metrics"

    def view_command(self, run_id: str | None) -> str | None:
        """Return the address of a run in MLflow, or the command that shows its store; None without a store."""
        if self.uri == NO_STORE:
            return None
        if self.uri.startswith("http"):
            return masked_text(f"{self.uri.rstrip('/')}/#/runs/{run_id or ''}".rstrip("/"))
        return shlex.join(["mlflow", "ui", "--backend-store-uri", self.shown])
