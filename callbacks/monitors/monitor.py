"""The base of all monitors, which makes findings from logged metrics, and what its subclasses need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl

from lit_grpo.callbacks.diagnosis.actions import Actions, Journal, act, check_actions, chosen
from lit_grpo.callbacks.diagnosis.diagnosis import merge
from lit_grpo.callbacks.diagnosis.findings import SEVERITIES, Evidence, Finding, Severity
from lit_grpo.callbacks.diagnosis.holding import HoldingFindings
from lit_grpo.callbacks.diagnosis.kinds import FindingKind, declare, finding_kind
from lit_grpo.callbacks.monitors.facts import UNKNOWN, facts_of
from lit_grpo.callbacks.monitors.history import History
from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Numbers = tuple[str, int, float, float] | tuple[str, int, float, float, float | None]
"""The fields of an :class:`Evidence`: metric, window, value, threshold[, before]."""

REARM = 10
"""Rollouts after which an alarm that does not hold any more is over, so that the next one is a new finding."""


class Monitor(pl.Callback):
    """Base of the callbacks that watch some logged metrics and raise findings.

    A subclass names the metrics it reads in ``keys`` and what it can find in ``findings``, and says in :meth:`check`
    which alarms hold now. Everything else is here: an alarm that goes on is one finding, which is raised again only
    when it gets graver or comes back. A bound on one metric needs no subclass, see
    :class:`lit_grpo.callbacks.ThresholdMonitor`.

    A monitor works alone in any Lightning project: ``Trainer(callbacks=[EntropyMonitor()])``. The metrics come from
    ``pl_module.step_metrics`` (a ``dict[str, float]`` of the last training step) if the module has it, else from
    ``trainer.callback_metrics``, under the keys of docs/metrics.md; a monitor whose keys are not logged is silent. One
    training batch is one step. With several processes the numbers of rank 0 decide, so all ranks do the same.

    Several monitors belong into a :class:`lit_grpo.callbacks.HealthMonitor`, which makes one diagnosis of what all of
    them find, and can roll back.

    Args:
        actions: action, ``log`` or ``stop``, by severity or by name of a diagnosis. Left out: ``log`` for ``info`` and
            ``warning``, ``stop`` for ``critical``.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    """Metrics that the monitor reads from its history."""
    findings: ClassVar[tuple[FindingKind, ...]] = ()
    """Kinds of findings that the monitor raises. One that is left out becomes a diagnosis of its own name."""
    memory: ClassVar[int] = 120
    """Number of values of each key that are remembered."""
    also_saved: ClassVar[tuple[str, ...]] = ()
    """Names of further attributes, of plain types, that are part of the state."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declare(cls.findings)

    def __init__(self, actions: dict[str, str] | None = None) -> None:
        self.actions: Actions = check_actions(actions, type(self).__name__, alone=True)
        self.history = History(self.keys, self.memory)
        self.step = 0
        """Rollouts trained on when metrics were last observed."""
        self.facts = UNKNOWN
        """What is known of the module's objective; all of it unknown in a replay."""
        self._active: dict[str, tuple[Finding, int]] = {}
        """The last finding of each kind, and the step at which it was last seen."""
        self._holding = HoldingFindings()
        self._journal: Journal | None = None

    # For subclasses.

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        """Return all alarms that hold at this step, new or not. ``self.history`` already has the step's numbers.

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
        remedies: tuple[str, ...] | None = None,
        about: FindingKind | None = None,
    ) -> Finding:
        """Make a finding of the present step.

        Args:
            kind: name of a :class:`lit_grpo.callbacks.FindingKind`.
            severity: ``info``, ``warning`` or ``critical``.
            explanation: what was seen, in one sentence.
            evidence: (metric, window, value, threshold[, before]) of each number behind it.
            onset: step at which what is seen began; the present one if left out.
            remedies: what to do, best first; those of the kind if left out.
            about: the kind itself; the declared one of this name if left out.
        """
        about = finding_kind(kind) if about is None else about
        remedies = about.remedies if remedies is None else remedies
        # A window may reach back to before the first rollout.
        onset = self.step if onset is None else min(max(onset, 1), self.step)
        numbers = tuple(Evidence(*one) for one in evidence)
        return Finding(type(self).__name__, kind, self.step, onset, severity, numbers, explanation, remedies, about)

    def know(self, pl_module: Any) -> None:
        """Take the facts from the module as it is now: a remedy may have changed its objective."""
        self.facts = facts_of(pl_module)

    # Replay.

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Take the numbers of one step and return the findings that are new.

        It needs no Lightning: a recorded run is replayed by calling it with one step after the other.
        """
        self.step = step
        self.history.push(step, metrics)
        new: list[Finding] = []
        for found in self.check(step, metrics):
            known, seen = self._active.get(found.kind, (None, step))
            if known is not None and step - seen <= REARM:
                graver = SEVERITIES.index(found.severity) > SEVERITIES.index(known.severity)
                if not graver:
                    # The alarm goes on: the first finding still holds, only the time at which it was seen moves.
                    self._active[found.kind] = (known, step)
                    continue
                found = replace(found, onset=min(known.onset, found.onset))
            self._active[found.kind] = (found, step)
            new.append(found)
        return new

    def active(self) -> list[Finding]:
        """Return the findings that hold, or held within the last :data:`REARM` rollouts."""
        return [found for found, seen in self._active.values() if self.step - seen <= REARM]

    # Hooks of Lightning.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._journal = Journal.of(trainer)
            self.know(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.know(pl_module)
        new = self.observe(trained_rollouts(trainer), read_metrics(trainer, pl_module))
        for entries in self._holding.update(self.step, self.active()):
            if self._journal is not None:
                self._journal.write("over", entries)
        diagnosis = merge(self.active()) if new else None
        if diagnosis is not None and self._journal is not None:
            # A milder finding that joins an alarm must not repeat the action that was taken on that.
            gravest = any(found.severity == diagnosis.severity for found in new)
            action = chosen(self.actions, diagnosis) if gravest else "log"
            act(trainer, self._journal, new, diagnosis, action, type(self).__name__)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._journal is not None:
            self._journal.close(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "history": self.history.state_dict(),
            "active": {kind: [found.to_dict(), seen] for kind, (found, seen) in self._active.items()},
            "holding": self._holding.state(),
            **{name: getattr(self, name) for name in self.also_saved},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.history.load_state_dict(state_dict["history"])
        self._active = {kind: (Finding.from_dict(f), seen) for kind, (f, seen) in state_dict["active"].items()}
        self._holding.restore(state_dict["holding"])
        # What an older version did not save begins anew, as the history of a key that was not watched then.
        for name in self.also_saved:
            setattr(self, name, state_dict.get(name, getattr(self, name)))


def trained_rollouts(trainer: Trainer) -> int:
    """Count the rollouts trained on since the run began, resumed parts included."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def read_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
    """Return the metrics of the last training step, and of the last evaluation under ``val/``, alike on every rank."""
    own = getattr(pl_module, "step_metrics", None)
    logged = trainer.callback_metrics
    if own is None:
        values = {key: float(value) for key, value in logged.items()}
    else:
        values = {key: float(value) for key, value in logged.items() if key.startswith("val/")} | dict(own)
    if trainer.world_size > 1:
        # Rank 0 decides for all: ranks that acted on numbers of their own would not stop or roll back together.
        values = trainer.strategy.broadcast(values)
    return values


def positive(where: str, **values: float) -> None:
    """Refuse thresholds and windows that are not above 0.

    Raises:
        UserError: one of them is not; names the first.
    """
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name} is {value}, must be above 0", where=f"{where}.{name}")
