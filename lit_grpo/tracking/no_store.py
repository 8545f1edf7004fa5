"""The other end of a run that is kept in its folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NO_STORE = "none"
"""Value of ``tracking_uri`` that keeps a run out of MLflow."""


class NoStore:
    """Target of the sender that has nothing to do: everything is in the folder of the run already."""

    identity: str | None = None

    def start(self) -> bool:
        return False

    def metrics(self, records: list[dict[str, Any]]) -> None:
        pass

    def params(self, params: Mapping[str, str]) -> None:
        pass

    def tags(self, tags: Mapping[str, str]) -> None:
        pass

    def remove_tags(self, names: Sequence[str]) -> None:
        pass

    def artifact(self, path: Path, folder: str | None) -> None:
        pass

    def inputs(self, datasets: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]) -> None:
        pass

    def end(self, status: str) -> None:
        pass

    def forget(self, step: int) -> None:
        pass

    def find(self, identity: str) -> str | None:
        return None

    def close_dead(self, run_id: str, status: str, reason: str | None) -> None:
        pass
