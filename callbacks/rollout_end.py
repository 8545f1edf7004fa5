"""The moment between two rollouts: trained on, validated and logged. Runs are saved and set back here, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_grpo.callbacks.diagnosis.actions import Journal
from lit_grpo.run.folder import run_logger

Function = Callable[[Trainer, LightningModule], None]

FIRST, SECOND = 0, 1
"""Turns: what may set the run back comes before what saves it, so that no run is saved that is about to be given up."""


class RolloutEnd(Callback):
    """Callback that calls functions after each rollout, when Lightning has validated and logged it too.

    Lightning's own last hook of a batch comes before validation and logging. A run that was saved there would, when it
    is resumed, lack the evaluation and the logged line of that rollout.

    Its state is what else a run needs to go on as if it had not been cut: the step under which the next rollout is
    logged, the metrics of the last evaluation, which callbacks go on reading until the next one, and how long the
    journal of findings was, so that a resumed run does not write the same findings a second time.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[int, Function]] = []
        self._trainer: Trainer | None = None
        self._saved: dict[str, Any] = {}
        self._journal: Journal | None = None
        self.under_way = False
        """Whether a rollout is trained on whose validation or logging is still to come."""
        self.given_up = False
        """Whether the present state is about to be given up by a rollback, so that it must not be saved."""

    @classmethod
    def of(cls, trainer: Trainer) -> RolloutEnd:
        """Return the trainer's one, which is made and attached at the first call, in a callback's ``setup``."""
        # Every Trainer has callbacks, but Lightning does not declare them.
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        found = next((callback for callback in callbacks if isinstance(callback, cls)), None)
        if found is None:
            found = cls()
            callbacks.append(found)
            found._attach(trainer)
        return found

    def add(self, function: Function, turn: int) -> None:
        """Call ``function(trainer, module)`` after each rollout; those of :data:`FIRST` before the others."""
        # Equality and not identity: each access of a method makes a new object.
        self.remove(function)
        self._functions = sorted([*self._functions, (turn, function)], key=lambda entry: entry[0])

    def remove(self, function: Function) -> None:
        """Call it no more."""
        self._functions = [entry for entry in self._functions if entry[1] != function]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._journal = Journal.of(trainer)

    # Lightning has no hook at this moment, so the method of its loop that validates is wrapped, on this one object.

    def _attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        loop: Any = trainer.fit_loop.epoch_loop
        validate_and_count = loop.on_advance_end

        def on_advance_end(fetcher: Any) -> None:
            try:
                validate_and_count(fetcher)
            except SIGTERMException:
                # Raised at its very end: everything is done but the functions, which an exception must not call.
                self.under_way = False
                raise
            # Lightning also comes here without a rollout, where it has skipped a validation after a resume.
            if self.under_way:
                self.under_way = False
                for _, function in list(self._functions):
                    function(trainer, trainer.lightning_module)

        loop.on_advance_end = on_advance_end

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.under_way = True
        # Lightning (2.6.6) counts one too many where it goes on from a rollout that was validated.
        if "logged_steps" in self._saved:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._saved.pop("logged_steps")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not when it is loaded: Lightning forgets all metrics after it has loaded a checkpoint.
        self.restore(trainer)
        length = self._saved.pop("journal", None)
        # A run that begins anew in its own folder, because it was killed before anything was saved.
        if length is None and trainer.ckpt_path is None and run_logger(trainer) is not None:
            length = 0
        if length is not None and self._journal is not None:
            self._journal.cut(length)

    def restore(self, trainer: Trainer) -> None:
        """Put the loaded metrics of the last evaluation where callbacks read them."""
        if "evaluation" not in self._saved:
            return
        known = trainer._logger_connector._callback_metrics
        for key in [key for key in known if key.startswith("val/")]:
            del known[key]
        for key, value in self._saved.pop("evaluation").items():
            known[key] = torch.tensor(value, dtype=torch.float64)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The wrapped method is an attribute of the loop object; without it the class's own is found again.
        vars(trainer.fit_loop.epoch_loop).pop("on_advance_end", None)
        # Every Trainer has callbacks, but Lightning does not declare them.
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer is None:
            return {}
        loop: Any = trainer.fit_loop.epoch_loop
        # Inside a rollout's hooks, Lightning has yet to count it.
        steps = loop._batches_that_stepped + self.under_way
        # Not Trainer.callback_metrics: reading that one makes Lightning compute what is still being accumulated.
        known = trainer._logger_connector._callback_metrics
        evaluation = {key: float(value) for key, value in known.items() if key.startswith("val/")}
        return {
            "logged_steps": steps,
            "evaluation": evaluation,
            "journal": 0 if self._journal is None else self._journal.length(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)
