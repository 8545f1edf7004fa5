"""What follows from a diagnosis: which action is chosen, and those that every monitor can take alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lit_grpo.callbacks.diagnosis.diagnosis import Diagnosis, numbers_of
from lit_grpo.callbacks.diagnosis.findings import SEVERITIES, Finding
from lit_grpo.callbacks.diagnosis.kinds import diagnosis_kinds
from lit_grpo.errors import UserError
from lit_grpo.run.folder import run_folder, run_logger
from lit_grpo.run.stop import request_stop
from lit_grpo.utils.files import write_atomically
from lit_grpo.utils.spelling import nearest

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

Action = Literal["log", "skip_step", "adjust", "stop", "rollback"]
"""``log``: write it down. ``skip_step``: the same; what can be known before an optimizer step (gradient norms, loss)
has clipped it or left it out already. ``adjust``: apply the remedy and go on. ``stop``: save and end with exit code 3.
``rollback``: return to the last checkpoint from before the onset, then apply the remedy."""

Actions = dict[str, Action]
"""Action by severity, or by the name of a diagnosis, which wins."""

DEFAULT_ACTIONS: Actions = {"info": "log", "warning": "log", "critical": "stop"}

FINDINGS_FILE = "findings.jsonl"
"""In the folder of the run. Each line has ``event``: ``finding``, ``diagnosis`` (with the ``action`` that was taken),
``over``, ``rollback``, ``adjust``, ``skip_step``, ``clipped_step`` or ``exception``."""


def check_actions(given: Mapping[str, str] | None, where: str, *, alone: bool) -> Actions:
    """Put the given actions over the defaults, so that every severity has one.

    Args:
        given: action by severity or by name of a diagnosis.
        where: class name of the callback that takes them, for errors.
        alone: whether the callback is a single monitor, which can only log and stop.

    Raises:
        UserError: a severity, diagnosis or action does not exist.
    """
    known = [*SEVERITIES, *diagnosis_kinds()]
    possible = ("log", "stop") if alone else get_args(Action)
    actions = dict(DEFAULT_ACTIONS)
    for key, action in (given or {}).items():
        if key not in known:
            near = nearest(key, known)
            raise UserError(
                f"{key!r} is neither a severity nor a diagnosis",
                where=f"{where}.actions",
                remedy=(f"did you mean {near!r}? " if near else "") + f"Severities are {', '.join(SEVERITIES)}",
            )
        if action not in possible:
            hint = ", or put the monitor into a HealthMonitor, which can do more" if action in get_args(Action) else ""
            raise UserError(
                f"{action!r} is no action of {where}",
                where=f"{where}.actions.{key}",
                remedy=f"choose one of {', '.join(possible)}{hint}",
            )
        # mypy cannot know that the plain string was just found to be one of the names.
        actions[key] = action  # type: ignore[assignment]
    return actions


def chosen(actions: Actions, diagnosis: Diagnosis) -> Action:
    """Choose the action for a diagnosis: by its name if that has one, else by its severity."""
    return actions.get(diagnosis.name) or actions[diagnosis.severity]


class Journal:
    """The file of what was found and done in a run, which is also sent to MLflow.

    Args:
        path: the file; None on ranks other than 0.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of(cls, trainer: Trainer) -> Journal:
        """Open the journal of the trainer's run. All ranks must call it."""
        folder = run_folder(trainer)
        return cls(folder / FINDINGS_FILE if trainer.is_global_zero and not _is_fast_dev_run(trainer) else None)

    def write(self, event: str, entries: Mapping[str, Any]) -> None:
        """Append one line with an event and its entries; a disk that refuses is logged and never stops a run."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **entries}, allow_nan=False, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s).", self.path, error)

    def length(self) -> int:
        """Return the length of the file in bytes; 0 where there is none, or on ranks other than 0."""
        try:
            return 0 if self.path is None else self.path.stat().st_size
        except OSError:
            return 0

    def cut(self, length: int) -> None:
        """Take away what was written after the first ``length`` bytes, but for how a run ended.

        A run that goes on from a checkpoint finds anew what it had found after that, and would write it twice.
        """
        if self.path is None or self.length() <= length:
            return
        try:
            content = self.path.read_bytes()
            ends = [line for line in content[length:].splitlines(keepends=True) if b'"event": "exception"' in line]
            write_atomically(self.path, content[:length] + b"".join(line for line in ends if line.endswith(b"\n")))
        except OSError as error:
            log.warning("%s cannot be written (%s).", self.path, error)

    def close(self, trainer: Trainer) -> None:
        """Send the file to the run's MLflow logger, if there are a file and a logger."""
        logger = run_logger(trainer)
        if logger is not None and self.path is not None and self.path.exists():
            logger.log_artifact(self.path)


def act(
    trainer: Trainer,
    journal: Journal,
    new: Iterable[Finding],
    diagnosis: Diagnosis,
    action: Action,
    monitor: str,
    reason: str = "",
) -> None:
    """Write down and log what was found, and stop the run if that is the action. All ranks must call it alike.

    Args:
        trainer: trainer of the run.
        journal: file in which findings and diagnosis are written down.
        new: findings that are not written down yet.
        diagnosis: diagnosis made of all findings that hold.
        action: action that was chosen; of them all only ``log`` and ``stop`` are done here.
        monitor: name of the callback that decided.
        reason: why the action is not the one that was asked for, or "".
    """
    for finding in new:
        journal.write("finding", {**finding.to_dict(), "diagnosis": finding.about.diagnosis.name})
    journal.write("diagnosis", {**diagnosis.to_dict(), "action": action} | ({"instead": reason} if reason else {}))
    logger = run_logger(trainer)
    if logger is not None and diagnosis.severity != "info":
        logger.set_tags({"diagnosis": diagnosis.name, "diagnosis_step": diagnosis.step})
    if trainer.is_global_zero:
        log_it = log.info if diagnosis.severity == "info" else log.warning
        log_it("%s at step %d: %s", diagnosis.severity, diagnosis.step, _told(diagnosis, list(new), action))
    if action == "stop":
        why = f" ({reason})" if reason else ""
        request_stop(trainer, f"{diagnosis.name}: {diagnosis.explanation}{why}", monitor)


def _told(diagnosis: Diagnosis, new: Sequence[Finding], action: Action) -> str:
    """Write what a person is told of a diagnosis: all of it, or what is new where it was told before and holds on."""
    before = [f for f in diagnosis.findings if f not in new and f.about.diagnosis.name == diagnosis.name]
    if action == "log" and any(f.severity == diagnosis.severity for f in before):
        numbers = ", ".join(numbers_of(new, diagnosis.step)) or "; ".join(f.explanation for f in new)
        title = before[0].about.title or before[0].explanation
        return f"{title}, as since step {diagnosis.onset}; new: {numbers}."
    remedy = f" Remedy: {diagnosis.remedies[0]}." if diagnosis.remedies else ""
    return f"{diagnosis.explanation}.{remedy}"


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a :data:`FINDINGS_FILE`, in order, up to a last line that was cut off."""
    lines: list[dict[str, Any]] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _is_fast_dev_run(trainer: Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))
