"""Which findings hold, so that a journal can say when one is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lit_grpo.callbacks.diagnosis.findings import Finding


class HoldingFindings:
    """The findings that held after the last rollout, by monitor and kind.

    Attributes:
        since: diagnosis that each speaks for, and the step at which it was raised, by (monitor, kind).
    """

    def __init__(self) -> None:
        self.since: dict[tuple[str, str], tuple[str, int]] = {}

    def update(self, step: int, findings: Iterable[Finding]) -> list[dict[str, Any]]:
        """Take the findings that hold at a step, and return the entries of an ``over`` event for each that ended."""
        now = {(f.monitor, f.kind): (f.about.diagnosis.name, f.step) for f in findings}
        ended = [(key, value) for key, value in self.since.items() if key not in now]
        self.since = now
        return [
            {"step": step, "monitor": monitor, "kind": kind, "diagnosis": name, "raised": raised}
            for (monitor, kind), (name, raised) in ended
        ]

    def diagnoses(self) -> set[str]:
        """Return the names of the diagnoses that some finding that holds speaks for."""
        return {name for name, _ in self.since.values()}

    def state(self) -> list[list[Any]]:
        """Return what holds as plain types, for checkpoints."""
        return [[*key, *value] for key, value in self.since.items()]

    def restore(self, state: Iterable[Iterable[Any]]) -> None:
        """Take what :meth:`state` returned."""
        self.since = {(monitor, kind): (name, step) for monitor, kind, name, step in state}
