"""What all monitors share: numbers in, findings out; the same on every rank; state that survives a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl

from lit_grpo.callbacks.diagnosis.actions import Actions, Journal, act, check_actions, chosen
from lit_grpo.callbacks.diagnosis.diagnosis import merge
from lit_grpo.callbacks.diagnosis.findings import SEVERITIES, Evidence, Finding, Severity
from lit_grpo.callbacks.monitors.history import History
from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Numbers = tuple[str, int, float, float] | tuple[str, int, float, float, float | None]
"""What :class:`Evidence` is made from."""

REARM = 10
"""An alarm that has not held for this many rollouts is over: the next one is a new finding."""


class Monitor(pl.Callback):
    """Watches some logged metrics and raises findings.

    A subclass names what it reads in ``keys`` and says in :meth:`check` which alarms hold now. Everything else is here:
    an alarm that goes on is one finding, raised again only when it gets graver or comes back.

    It works alone in any Lightning project: ``Trainer(callbacks=[EntropyMonitor()])``. The metrics come from
    ``pl_module.step_metrics`` (a ``dict[str, float]`` of the last training step) if the module has it, else from
    ``trainer.callback_metrics``, under the keys of docs/metrics.md; a monitor whose keys are not logged is silent. One
    training batch is one step. With several processes the numbers of rank 0 decide, so all ranks do the same.

    Together with others it belongs into :class:`lit_grpo.callbacks.HealthMonitor`, which makes one diagnosis of what
    all of them find, and can roll back.

    Args:
        actions: what to do, ``log`` or ``stop``, by severity or name of a diagnosis. Left out: ``log`` for ``info`` and
            ``warning``, ``stop`` for ``critical``.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    """Metrics it reads."""
    memory: ClassVar[int] = 120
    """Values of each that it remembers."""
    also_saved: ClassVar[tuple[str, ...]] = ()
    """Further attributes of plain types that are part of its state."""

    def __init__(self, actions: dict[str, str] | None = None) -> None:
        self.actions: Actions = check_actions(actions, type(self).__name__, alone=True)
        self.history = History(self.keys, self.memory)
        self.step = 0
        """Rollouts trained on when it last looked."""
        self._active: dict[str, tuple[Finding, int]] = {}
        """The finding of each kind that still counts, and when it was last seen."""
        self._journal: Journal | None = None

    # What a subclass writes.

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        """All alarms that hold at this step. ``self.history`` already holds the step's numbers.

        Args:
            step: rollouts trained on, from 1.
            metrics: what the step logged.
        """
        raise NotImplementedError

    def finding(
        self,
        kind: str,
        severity: Severity,
        explanation: str,
        *evidence: Numbers,
        onset: int | None = None,
        remedies: tuple[str, ...] = (),
    ) -> Finding:
        """A finding at the present step; each evidence is (metric, window, value, threshold[, before])."""
        onset = self.step if onset is None else min(onset, self.step)
        numbers = tuple(Evidence(*one) for one in evidence)
        return Finding(type(self).__name__, kind, self.step, onset, severity, numbers, explanation, remedies)

    # What replays.

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Look at the numbers of one step; the alarms that are new.

        Needs no Lightning: a recorded run is replayed by calling it with one step after the other.
        """
        self.step = step
        self.history.push(step, metrics)
        new: list[Finding] = []
        for found in self.check(step, metrics):
            known, seen = self._active.get(found.kind, (None, step))
            if known is not None and step - seen <= REARM:
                graver = SEVERITIES.index(found.severity) > SEVERITIES.index(known.severity)
                onset = min(known.onset, found.onset)
                if not graver:
                    # It goes on: what was said first still holds, the time it was seen moves on.
                    self._active[found.kind] = (known, step)
                    continue
                found = Finding(
                    found.monitor,
                    found.kind,
                    found.step,
                    onset,
                    found.severity,
                    found.evidence,
                    found.explanation,
                    found.remedies,
                )
            self._active[found.kind] = (found, step)
            new.append(found)
        return new

    def active(self) -> list[Finding]:
        """Findings that hold, or held in the last rollouts."""
        return [found for found, seen in self._active.values() if self.step - seen <= REARM]

    # Lightning.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._journal = Journal.of(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        new = self.observe(trained_rollouts(trainer), read_metrics(trainer, pl_module))
        diagnosis = merge(self.active()) if new else None
        if diagnosis is not None and self._journal is not None:
            grave = any(found.severity == diagnosis.severity for found in new)
            action = chosen(self.actions, diagnosis) if grave else "log"
            act(trainer, self._journal, new, diagnosis, action, type(self).__name__)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._journal is not None:
            self._journal.close(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "history": self.history.state_dict(),
            "active": {kind: [found.to_dict(), seen] for kind, (found, seen) in self._active.items()},
            **{name: getattr(self, name) for name in self.also_saved},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.history.load_state_dict(state_dict["history"])
        self._active = {kind: (Finding.from_dict(f), seen) for kind, (f, seen) in state_dict["active"].items()}
        for name in self.also_saved:
            setattr(self, name, state_dict[name])


def trained_rollouts(trainer: Trainer) -> int:
    """Rollouts trained on since the run began, resumed parts included."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def read_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
    """The numbers of the last training step, and the last evaluation's under ``val/``; rank 0's on every rank."""
    own = getattr(pl_module, "step_metrics", None)
    logged = trainer.callback_metrics
    if own is None:
        values = {key: float(value) for key, value in logged.items()}
    else:
        values = {key: float(value) for key, value in logged.items() if key.startswith("val/")} | dict(own)
    if trainer.world_size > 1:
        values = trainer.strategy.broadcast(values)
    return values


def positive(where: str, **values: float) -> None:
    """Refuse thresholds and windows that are not above 0.

    Raises:
        UserError: names the first.
    """
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name} is {value}, must be above 0", where=f"{where}.{name}")
