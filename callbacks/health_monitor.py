"""Many monitors together: one diagnosis of what they find, and what is done about it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.callbacks.checkpoint_files import expected_bytes
from lit_grpo.callbacks.diagnosis.actions import Action, Actions, Journal, act, check_actions, chosen
from lit_grpo.callbacks.diagnosis.diagnosis import Diagnosis, merge
from lit_grpo.callbacks.diagnosis.findings import SEVERITIES, Finding
from lit_grpo.callbacks.diagnosis.holding import HoldingFindings
from lit_grpo.callbacks.diagnosis.kinds import diagnosis_kinds
from lit_grpo.callbacks.diagnosis.remedies import Remedy, scale_learning_rate
from lit_grpo.callbacks.monitors import GradientNormMonitor, all_monitors
from lit_grpo.callbacks.monitors.monitor import Monitor, read_metrics, trained_rollouts
from lit_grpo.callbacks.notify import Notifier, Notify, diagnosis_message, end_message
from lit_grpo.callbacks.rollback import CheckpointRing, can_return, give_up_later_checkpoints, restore
from lit_grpo.callbacks.rollout_end import FIRST, RolloutEnd
from lit_grpo.errors import StopRun, UserError
from lit_grpo.run.folder import run_folder, run_logger
from lit_grpo.run.stop import KEYBOARD, stop_reason
from lit_grpo.utils.dataclasses import from_arguments
from lit_grpo.utils.text import in_bytes

log = logging.getLogger(__name__)

ROLLBACK_TRIAL = 50
"""Rollouts after a rollback within which new trouble means that it did not go back far enough."""


@dataclass
class _Rollback:
    """A rollback that is decided and waits for the end of the batch."""

    diagnosis: Diagnosis
    target: int
    remedy: Remedy


class HealthMonitor(pl.Callback):
    """Many monitors that watch a run, one diagnosis of what they find at one time, and the action that follows from it.

    ``log`` writes it to ``findings.jsonl`` in the folder of the run and to MLflow. ``stop`` saves the run and ends it
    with exit code 3. ``adjust`` applies the remedy and goes on. ``rollback`` returns, within the same fit, to the
    newest checkpoint from before the onset of what is now known to have gone wrong, applies the remedy, and goes on
    from there: weights, optimizers, schedules, data, loop progress, monitors and random state are those of the
    checkpoint, as if the run had been resumed from it. When no rollback is left, when there is no such checkpoint, or
    when going back cannot mend it (plumbing, noisy rewards), the run is stopped instead. Whatever is chosen, a step
    that is not finite is left out, and a spike of the gradient norm is clipped (``GradientNormMonitor.clip_spikes``).

    Args:
        monitors: monitors that watch the run; None takes one of each that comes with lit-grpo, with defaults.
        actions: action by severity or by the name of a diagnosis, which wins: ``log``, ``skip_step``, ``adjust``,
            ``stop`` or ``rollback``. Left out: ``log`` for ``info`` and ``warning``, ``stop`` for ``critical``.
        remedies: remedy by the name of a diagnosis, in the place of the one that its
            :class:`lit_grpo.callbacks.DiagnosisKind` declares.
        rollbacks: most rollbacks in a run.
        adjustments: most adjustments in a run.
        checkpoint_every: rollouts between two checkpoints to go back to; saved only if some action is ``rollback``.
        checkpoints: number of them that are kept besides the first.
        notify: webhook and command that are told of each diagnosis once, and again if it returns after it was over or
            gets graver; None: nobody is told. Rank 0 alone tells.
    """

    # Counts of rollbacks must not be set back by a rollback, which would then never come to an end.
    survives_rollback = True

    def __init__(
        self,
        monitors: list[Monitor] | None = None,
        actions: dict[str, str] | None = None,
        remedies: dict[str, Remedy] | None = None,
        rollbacks: int = 2,
        adjustments: int = 3,
        checkpoint_every: int = 10,
        checkpoints: int = 6,
        notify: Notify | None = None,
    ) -> None:
        self.monitors = all_monitors() if monitors is None else list(monitors)
        self.actions: Actions = check_actions(actions, "HealthMonitor", alone=False)
        self.remedies: dict[str, Remedy] = {name: kind.remedy for name, kind in diagnosis_kinds().items()}
        self._given = frozenset(remedies or {})
        """Diagnoses whose remedy was given as an argument."""
        for name, remedy in (remedies or {}).items():
            check_actions({name: "log"}, "HealthMonitor", alone=True)
            self.remedies[name] = remedy if isinstance(remedy, Remedy) else Remedy(**remedy)
        for name, value, least in (
            ("rollbacks", rollbacks, 0),
            ("adjustments", adjustments, 0),
            ("checkpoint_every", checkpoint_every, 1),
            ("checkpoints", checkpoints, 1),
        ):
            if value < least:
                raise UserError(f"{name} is {value}, must be at least {least}", where=f"HealthMonitor.{name}")
        self.rollbacks, self.adjustments = rollbacks, adjustments
        self.ring = CheckpointRing(checkpoint_every, checkpoints)
        self.diagnosis: Diagnosis | None = None
        """The last diagnosis; None as long as there is none."""
        self.targets: list[int] = []
        """Rollouts trained on in the checkpoint of each rollback so far."""
        self.adjusted: list[str] = []
        """Names of the diagnoses that were answered by an adjustment."""
        self._scales: list[float] = []
        """Factors on the learning rate of all remedies so far, in order."""
        self._changed: list[dict[str, Any]] = []
        """Changes of the objective so far, in order, which a run that is resumed needs again."""
        self._rollout_end: RolloutEnd | None = None
        self._folder = Path()
        self._decided: _Rollback | None = None
        self._journal: Journal | None = None
        self.notify: Notify | None = None if notify is None else from_arguments(Notify, notify, "HealthMonitor.notify")
        self._notifier: Notifier | None = None
        self._holding = HoldingFindings()
        self._notified: dict[str, str] = {}
        """Severity with which each diagnosis was told that is not over, by name."""

    # Replay.

    def observe(self, step: int, metrics: dict[str, float]) -> tuple[list[Finding], Diagnosis | None]:
        """Take the numbers of one step, as :meth:`Monitor.observe` does.

        Returns:
            The findings that are new, and one diagnosis of all that hold, or None if nothing is new.
        """
        new = [found for monitor in self.monitors for found in monitor.observe(step, metrics)]
        if not new:
            return [], None
        return new, merge([found for monitor in self.monitors for found in monitor.active()])

    # Hooks of Lightning.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._journal = Journal.of(trainer)
        for monitor in self.monitors:
            monitor.setup(trainer, pl_module, stage)
        # Monitors raise alarms in the middle of a batch's callbacks; the others must have seen the batch first, and the
        # run must not be saved before it has gone back.
        self._rollout_end = RolloutEnd.of(trainer)
        self._rollout_end.add(self._end_of_rollout, FIRST)
        self._try_remedies(trainer, pl_module)
        # On all ranks, each of which must ask for the folder.
        self._folder = run_folder(trainer)
        if self.notify is not None and trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            self._notifier = Notifier(self.notify)

    def _try_remedies(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Try every remedy that the actions could apply, and say which of them would be a lower learning rate.

        Raises:
            UserError: a remedy that was given, and not declared by its diagnosis, does not fit the run.
        """
        unfit: dict[str, list[str]] = {}
        for name, remedy in self.remedies.items():
            if not self._may_apply(name):
                continue
            _, reason = remedy.fitted(pl_module)
            if reason and name in self._given:
                raise UserError(
                    f"the remedy of {name} does not fit this run: {reason}",
                    where=f"HealthMonitor.remedies.{name}",
                    remedy="give another, or leave it out for that of its diagnosis",
                )
            if reason:
                unfit.setdefault(reason, []).append(name)
        for reason, names in unfit.items():
            if trainer.is_global_zero:
                log.warning(
                    "HealthMonitor: after %s the learning rate would be lowered, and the objective stays as it is: %s",
                    ", ".join(names),
                    reason,
                )

    def _may_apply(self, name: str) -> bool:
        """Tell whether a diagnosis can be answered by its remedy under the actions that were chosen."""
        kind = diagnosis_kinds().get(name)
        own = self.actions.get(name)
        chosen_actions = {own} if own is not None else {self.actions[severity] for severity in SEVERITIES}
        if own is None and kind is not None and kind.outlives_rollback:
            chosen_actions -= {"rollback"}
        return bool(chosen_actions & {"rollback", "adjust"})

    @property
    def _can_roll_back(self) -> bool:
        return "rollback" in self.actions.values() and self.rollbacks > len(self.targets)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ring.open(trainer)
        if self._can_roll_back:
            each, count = expected_bytes(trainer), self.ring.keep + 1
            rank_zero_info(f"to roll back to, up to {count} checkpoints of about {in_bytes(each)} are kept besides: at "
                           f"most {in_bytes(count * each)}")  # fmt: skip
        # Objectives alone: optimizers and schedules have kept their changed rates in the checkpoint.
        for changes in self._changed:
            # A module may have change_objective; Lightning declares only what every module has.
            pl_module.change_objective(dict(changes))  # type: ignore[operator]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The untouched run is a place to return to as well: trouble may begin before the first checkpoint is due.
        if self._can_roll_back and not trained_rollouts(trainer) and not getattr(trainer, "fast_dev_run", False):
            self.ring.save(trainer, 0)

    def veto_update(self, trainer: Trainer, module: LightningModule, metrics: dict[str, float]) -> str | None:
        """Say why the optimizer step that is about to be taken should be left out; None lets it be taken.

        See :class:`lit_grpo.learner.optimizer_step.OptimizerStepper`.
        """
        # All of them are asked, since each remembers the norms that it was shown.
        vetoes = [m.veto_update(trainer, module, metrics) for m in self.monitors if hasattr(m, "veto_update")]
        reason = next((veto for veto in vetoes if veto), None)
        if reason and self._journal is not None:
            self._journal.write("skip_step", {"step": trained_rollouts(trainer), "reason": reason})
        return reason

    def limit_update(self, trainer: Trainer, module: LightningModule, metrics: dict[str, float]) -> dict[str, float]:
        """Name the gradient norms that the optimizer step that is about to be taken is to be clipped to, by key.

        See :class:`lit_grpo.learner.optimizer_step.OptimizerStepper`.
        """
        limits: dict[str, float] = {}
        for monitor in self.monitors:
            if hasattr(monitor, "limit_update"):
                for key, limit in (monitor.limit_update(trainer, module, metrics) or {}).items():
                    limits[key] = min(limit, limits.get(key, limit))
        if limits and self._journal is not None:
            entries = [f"{key} {metrics[key]:.3g} to {limit:.3g}" for key, limit in limits.items()]
            self._journal.write("clipped_step", {"step": trained_rollouts(trainer), "reason": ", ".join(entries)})
        return limits

    def mends_lost_weights(self, trainer: Trainer) -> bool:
        """Tell whether a rollback will follow when an optimizer step leaves weights that are not finite.

        See :class:`lit_grpo.learner.optimizer_step.OptimizerStepper`.
        """
        watches = any(isinstance(monitor, GradientNormMonitor) for monitor in self.monitors)
        action = self.actions.get("non_finite") or self.actions["critical"]
        return (
            watches and action == "rollback" and self._can_roll_back and bool(self.ring.saved) and can_return(trainer)
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for monitor in self.monitors:
            monitor.know(pl_module)
        new, diagnosis = self.observe(trained_rollouts(trainer), read_metrics(trainer, pl_module))
        if diagnosis is not None and diagnosis.name in self._holding.diagnoses():
            # What was told of a diagnosis that holds on is not told again because something milder has come: that is.
            milder = all(found.severity != diagnosis.severity for found in new)
            diagnosis = merge(new) if milder else diagnosis
        self._note_what_is_over(trainer, trained_rollouts(trainer))
        if diagnosis is None or self._journal is None:
            return
        self.diagnosis = diagnosis
        action: Action = "log"
        # A milder finding that joins an alarm must not repeat the action that was taken on that.
        if any(found.severity == diagnosis.severity for found in new):
            action = chosen(self.actions, diagnosis)
        reason = ""
        if action == "rollback":
            self._decided, reason = self._plan(trainer, diagnosis)
            action = "rollback" if self._decided is not None else "stop"
            if self._rollout_end is not None:
                self._rollout_end.given_up = self._decided is not None
        elif action == "adjust" and (diagnosis.name in self.adjusted or len(self.adjusted) >= self.adjustments):
            action = "log"
        act(trainer, self._journal, new, diagnosis, action, type(self).__name__, reason)
        self._tell(diagnosis, action, reason)
        if action == "adjust":
            self.adjusted.append(diagnosis.name)
            self._apply(trainer, pl_module, self._remedy(diagnosis.name), {"event": "adjust", "step": diagnosis.step})

    def _note_what_is_over(self, trainer: Trainer, step: int) -> None:
        ended = self._holding.update(step, (f for monitor in self.monitors for f in monitor.active()))
        for entries in ended:
            if self._journal is not None:
                self._journal.write("over", entries)
        still = self._holding.diagnoses()
        self._notified = {name: severity for name, severity in self._notified.items() if name in still}
        logger = run_logger(trainer)
        if ended and logger is not None:
            # A tracker shows a run by its tags, and must not show what is over as what is wrong with it.
            logger.set_tags({"diagnosis": self._name_of_what_holds() or "none", "diagnosis_step": step})

    def _tell(self, diagnosis: Diagnosis, action: str, reason: str) -> None:
        """Send a diagnosis that is new, has returned, or is graver than it was when it was sent."""
        if self.notify is None or not self.notify.tells(diagnosis.severity):
            return
        before = self._notified.get(diagnosis.name)
        # On all ranks, so that the state is the same whichever rank saves it.
        if before is None or SEVERITIES.index(diagnosis.severity) > SEVERITIES.index(before):
            self._notified[diagnosis.name] = diagnosis.severity
            if self._notifier is not None:
                self._notifier.send(diagnosis_message(self._folder.name, str(self._folder), diagnosis, action, reason))

    def _tell_the_end(self, trainer: Trainer, how: str, diagnosis: str | None) -> None:
        """Send how the run ended, if that is asked for, and wait a moment for what is under way."""
        if self._notifier is None:
            return
        if self._notifier.settings.on_end and how:
            step = trained_rollouts(trainer)
            self._notifier.send(end_message(self._folder.name, str(self._folder), step, how, diagnosis))
        self._notifier.close()
        self._notifier = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._journal is not None:
            self._journal.close(trainer)
        # A run that was stopped may be resumed, and its ring goes on with these checkpoints.
        if not trainer.should_stop:
            self.ring.clear(trainer)
        stopped = stop_reason(trainer)
        how = "finished" if stopped is None else f"stopped by {stopped.monitor}: {stopped.reason}"
        # Who stopped it at the keyboard knows.
        how = "" if stopped is not None and stopped.monitor == KEYBOARD else how
        self._tell_the_end(trainer, how, self._name_of_what_holds())

    def _name_of_what_holds(self) -> str | None:
        known = merge([found for monitor in self.monitors for found in monitor.active()])
        return None if known is None else known.name

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._journal is not None and isinstance(exception, StopRun):
            step = trained_rollouts(trainer)
            known = merge([found for monitor in self.monitors for found in monitor.active()])
            # The exception's own diagnosis is the best there is; else it is what was critical before.
            name = getattr(exception, "diagnosis", None)
            if name is None and known is not None and known.severity == "critical":
                name = known.name
            self._journal.write("exception", {"step": step, "reason": exception.reason, "diagnosis": name})
            logger = run_logger(trainer)
            if name is not None and logger is not None:
                logger.set_tags({"diagnosis": name, "diagnosis_step": step})
            self._journal.close(trainer)
        if isinstance(exception, StopRun):
            how = f"stopped: {exception.reason}"
        else:
            first_line = str(exception).strip().partition("\n")[0]
            how = f"broke off: {type(exception).__name__}" + (f": {first_line}" if first_line else "")
        how = "" if isinstance(exception, KeyboardInterrupt) else how
        self._tell_the_end(trainer, how, getattr(exception, "diagnosis", None) or self._name_of_what_holds())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._rollout_end is not None:
            self._rollout_end.remove(self._end_of_rollout)
        # A run that was killed after its last checkpoint and is resumed has nothing left to train: on_train_end never
        # comes, and nothing will be gone back to.
        # Lightning declares a smaller class than the one that counts epochs.
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if stage == "fit" and epochs.processed and not trainer.should_stop:
            self.ring.open(trainer)
            self.ring.clear(trainer)

    # Rollbacks and adjustments.

    def _plan(self, trainer: Trainer, diagnosis: Diagnosis) -> tuple[_Rollback | None, str]:
        """Decide which rollback to make, or say why there is none."""
        # A rollback that was asked for by the name of the diagnosis is made even where going back does not mend it.
        kind = diagnosis_kinds().get(diagnosis.name)
        if kind is not None and kind.outlives_rollback and diagnosis.name not in self.actions:
            return None, "going back would not mend it"
        if len(self.targets) >= self.rollbacks:
            return None, f"all {self.rollbacks} rollbacks are spent"
        if not can_return(trainer):
            return None, "the train loader has no state_dict, so its position cannot be set back"
        target = self.ring.before(trainer, diagnosis.onset)
        if self.targets and diagnosis.step - self.targets[-1] <= ROLLBACK_TRIAL:
            # The trouble came back: go back further than last time, or to the same point if that was the first.
            last = self.targets[-1]
            if target is None or target >= last:
                target = self.ring.before(trainer, last)
            if target is None:
                target = self.ring.before(trainer, last + 1)
        if target is None:
            return None, f"there is no checkpoint from before rollout {diagnosis.onset}"
        return _Rollback(diagnosis, target, self._remedy(diagnosis.name)), ""

    def _remedy(self, name: str) -> Remedy:
        return self.remedies.get(name) or Remedy()

    def _end_of_rollout(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back if that was decided, else save a checkpoint if one is due; before the run itself is saved."""
        if self._decided is not None:
            decided, self._decided = self._decided, None
            self._go_back(trainer, pl_module, decided)
            return
        step = trained_rollouts(trainer)
        over = trainer.should_stop or trainer.is_last_batch
        # Not while something is critical: that state is none to return to.
        if self._can_roll_back and step % self.ring.every == 0 and not over and not self._is_critical():
            self.ring.save(trainer, step)

    def _is_critical(self) -> bool:
        return any(found.severity == "critical" for monitor in self.monitors for found in monitor.active())

    def _go_back(self, trainer: Trainer, pl_module: LightningModule, decided: _Rollback) -> None:
        left_at = trained_rollouts(trainer)
        checkpoint = restore(trainer, pl_module, self.ring.path(decided.target))
        # This callback survives the rollback and its monitors do not: their histories go back with the run.
        state = checkpoint["callbacks"][self.state_key]
        self._restore_monitors(state)
        # A checkpoint from before a remedy has the rates from before it, and the run would go wrong again just as it
        # did: what has been learned about the rate is kept.
        for scale in self._scales[len(state["scales"]) :]:
            scale_learning_rate(trainer, scale)
        void = self.ring.forget_after(decided.target)
        self.targets.append(decided.target)
        event = {
            "event": "rollback",
            "step": left_at,
            "target": decided.target,
            "diagnosis": decided.diagnosis.name,
            "left": self.rollbacks - len(self.targets),
        }
        applied = self._apply(trainer, pl_module, decided.remedy, event)
        if self._rollout_end is not None:
            self._rollout_end.given_up = False
        # After the remedy and the journal, so that the checkpoint that is saved in their place holds both. From the
        # moment when it is in place the rollback has happened; a run that is killed before makes it again, for which it
        # needs what it went back to, and finds none of what is removed here.
        if give_up_later_checkpoints(trainer):
            self.ring.remove(trainer, void)
        logger = run_logger(trainer)
        if logger is not None:
            logger.set_tags({"rollbacks": len(self.targets), "rollback_target": decided.target})
        if trainer.is_global_zero:
            log.warning(
                "rollback %d of %d: from rollout %d to %d because of %s; remedy: %s",
                len(self.targets),
                self.rollbacks,
                left_at,
                decided.target,
                decided.diagnosis.name,
                applied.plain(),
            )

    def _apply(self, trainer: Trainer, pl_module: LightningModule, remedy: Remedy, event: dict[str, Any]) -> Remedy:
        """Change the run and write down how. An objective that cannot be changed so keeps a lower rate instead."""
        applied, reason = remedy.fitted(pl_module)
        if reason and trainer.is_global_zero:
            log.warning("the learning rate is lowered, and the objective stays as it is: %s", reason)
        applied.apply(trainer, pl_module)
        self._scales.append(applied.lr_scale)
        if applied.objective:
            self._changed.append(dict(applied.objective))
        if self._journal is not None:
            entries = {key: value for key, value in event.items() if key != "event"}
            why = {"instead": reason} if reason else {}
            self._journal.write(event["event"], {**entries, "remedy": applied.plain(), **why})
        return applied

    # State.

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitors": [[type(monitor).__name__, monitor.state_dict()] for monitor in self.monitors],
            "saved": list(self.ring.saved),
            "targets": list(self.targets),
            "adjusted": list(self.adjusted),
            "changed": [dict(changes) for changes in self._changed],
            "scales": list(self._scales),
            "holding": self._holding.state(),
            "notified": dict(self._notified),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restore_monitors(state_dict)
        self.ring.saved = list(state_dict["saved"])
        self.targets, self.adjusted = list(state_dict["targets"]), list(state_dict["adjusted"])
        self._changed = [dict(changes) for changes in state_dict["changed"]]
        self._scales = list(state_dict["scales"])
        self._holding.restore(state_dict["holding"])
        self._notified = dict(state_dict["notified"])

    def _restore_monitors(self, state_dict: dict[str, Any]) -> None:
        """Give monitors their states by class and order; a monitor that is new to the run starts with nothing."""
        states = list(state_dict["monitors"])
        for monitor in self.monitors:
            entry = next((entry for entry in states if entry[0] == type(monitor).__name__), None)
            if entry is not None:
                states.remove(entry)
                monitor.load_state_dict(entry[1])
