"""Record of the last rollouts on disk, so that a run which went wrong can be looked at token by token."""

from __future__ import annotations

import json
import logging
import math
import re
import time
import weakref
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_grpo.callbacks.diagnosis.actions import FINDINGS_FILE
from lit_grpo.callbacks.monitors.monitor import trained_rollouts
from lit_grpo.errors import UserError
from lit_grpo.run import flight
from lit_grpo.run.folder import run_folder, run_logger
from lit_grpo.run.stop import KEYBOARD, stop_reason

log = logging.getLogger(__name__)

_PER_TOKEN = {
    "old_logprobs": "learner_logprobs",
    "ref_logprobs": "ref_logprobs",
    "entropy": "entropy",
    "values": "values",
}
"""Name in the record by field of an :class:`lit_grpo.types.Experience`, for fields of shape [N, T]."""


class FlightRecorder(pl.Callback):
    """Recorder of every rollout in ``<run folder>/flight``: tokens, log-probabilities, entropies, advantages, texts.

    The folder holds the last ``steps`` rollouts and, of those before, at most ``landmarks`` spread evenly over the run,
    so that there is always something from before a fault began. An alarm (a diagnosis of a monitor that is more than
    ``info``), a stop or an exception keeps all of it in ``flight/<reason>-<step>``, by hard links where the disk can.
    ``lit-grpo report`` shows it; the format is in :mod:`lit_grpo.run.flight`.

    With several processes rank 0's part of each rollout is recorded. If the disk refuses, that is logged once, and the
    run goes on without a record.

    It records what the module leaves in ``step_result.snapshot`` (:class:`lit_grpo.types.RolloutSnapshot`): experience
    and advantages ([N] or [N, T]), and log-probabilities and entropies before the first update where the experience
    lacks them; of a module without them it records the rollout alone.

    Args:
        steps: number of newest rollouts that are kept.
        landmarks: most earlier rollouts that are kept besides.
        groups: how many of the first groups of each rollout are recorded; None records all.
        dumps: most records that are kept after an alarm, a stop or an exception.
        upload: whether what is kept is also sent to MLflow.
    """

    def __init__(
        self, steps: int = 20, landmarks: int = 8, groups: int | None = None, dumps: int = 5, upload: bool = False
    ) -> None:
        for name, value, least in (("steps", steps, 1), ("landmarks", landmarks, 0), ("dumps", dumps, 0)):
            if value < least:
                raise UserError(f"{name} is {value}, must be at least {least}", where=f"FlightRecorder.{name}")
        if groups is not None and groups < 1:
            raise UserError(f"groups is {groups}, must be at least 1", where="FlightRecorder.groups")
        self.steps, self.landmarks, self.groups, self.dumps, self.upload = steps, landmarks, groups, dumps, upload
        self.step = 0
        """Rollouts trained on at the last record."""
        self.seconds = 0.0
        """Time in seconds spent on recording since the process began."""
        self._kept: list[str] = []
        """Names of the folders that were kept after an alarm, a stop or an exception."""
        self._folder: Path | None = None
        self._batch: Any = None
        self._batch_step = 0
        """Rollouts trained on with the batch under way."""
        self._seen: weakref.ref[Any] | None = None
        """The experience that was recorded last; where it is still the newest, the learner has made no other since."""
        self._journal_offset: int | None = 0
        """Bytes of the journal that were read so far; None until the first batch of a fit."""
        self._written_tokens: set[int] = set()
        """Token ids whose texts are in the record already."""
        self._failed = False
        """Whether recording has failed once, after which nothing is recorded any more."""

    # Hooks.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        run = run_folder(trainer)
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            self._folder = run / flight.FOLDER
            self._journal_offset = None
            self._written_tokens = set(flight.read_token_texts(self._folder))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._folder is not None and self._journal_offset is None:
            # Not before: when training starts, what a killed process wrote after its last checkpoint is cut away.
            findings = self._folder.parent / FINDINGS_FILE
            self._journal_offset = findings.stat().st_size if findings.exists() else 0
        # Before anything is recorded: a rollback trains on some steps again, which replaces their records.
        self._dump_if_alarmed(trainer)
        self._batch, self._batch_step = batch, trained_rollouts(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._record(pl_module, batch, self._batch_step)
        self._batch = None
        self._dump_if_alarmed(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Monitors may come after this callback in the last batch.
        self._dump_if_alarmed(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._folder is None or trainer.state.fn != "fit":
            return
        # A batch that is still here was broken off inside its step.
        if self._batch is not None:
            self._record(pl_module, self._batch, self._batch_step, unfinished=True)
            self._batch = None
        self._dump_if_alarmed(trainer)
        if not isinstance(exception, KeyboardInterrupt | SystemExit):
            self.dump(trainer, "exception", f"{type(exception).__name__}: {exception}")

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "kept": list(self._kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self._kept = state_dict["step"], list(state_dict["kept"])

    # Recording.

    def _record(self, pl_module: LightningModule, batch: Any, step: int, unfinished: bool = False) -> None:
        if self._folder is None or self._failed or not hasattr(batch, "completions"):
            return
        started = time.perf_counter()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tensors, rollout = self._gather(pl_module, batch)
            self._write_token_texts(pl_module, batch)
            rollout |= {"step": step, "unfinished": unfinished, "wall_time": time.time()}
            flight.write_step(flight.step_file(self._folder, step), tensors, rollout)
            self.step = step
            self._thin_out()
        # Whatever it is: a run must not end because its record cannot be written.
        except Exception as error:
            self._failed = True
            log.warning("The flight recorder gives up at step %d: %s: %s", step, type(error).__name__, error)
        self.seconds += time.perf_counter() - started

    def _gather(self, pl_module: LightningModule, batch: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Make the tensors and the metadata of a record."""
        size = batch.group_size
        groups = len(batch.prompts) if self.groups is None else min(self.groups, len(batch.prompts))
        count = groups * size
        completions, prompts = batch.completions[:count], batch.prompts[:groups]
        lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int32)
        tensors = {
            "lengths": lengths,
            "tokens": _flat(c.token_ids for c in completions),
            "sampler_logprobs": _flat((c.logprobs for c in completions), np.float32),
            "reward": batch.reward[:count].float().cpu(),
            "truncated": torch.tensor([c.truncated for c in completions]),
            "policy_version": torch.tensor([c.policy_version for c in completions], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(p.token_ids) for p in prompts], dtype=torch.int32),
            "prompt_tokens": _flat(p.token_ids for p in prompts),
        }
        tensors |= {f"reward/{name}": values[:count].float().cpu() for name, values in batch.rewards.items()}
        for name in ("correct", "judged", "no_answer"):
            if (flags := getattr(batch, name, None)) is not None:
                tensors[name] = flags[:count].cpu()
        tensors |= self._of_learner(pl_module, lengths)
        rollout = {
            "group_size": size,
            "temperature": batch.temperature,
            "prompts": [{"id": p.id, "question": p.question, "answer": p.answer_column} for p in prompts],
            "texts": list(batch.texts[:count]),
        }
        # With one reward its scores are the total itself, and safetensors refuses two names for one memory.
        return {name: value.clone() for name, value in tensors.items()}, rollout

    def _of_learner(self, pl_module: LightningModule, lengths: Tensor) -> dict[str, Tensor]:
        """Return the learner's tensors of the rollout, each flat over generated tokens; {} if it has made none yet."""
        result = getattr(pl_module, "step_result", None)
        if result is None:
            return {}
        snapshot = result.snapshot
        experience = snapshot.experience
        if experience is None or (self._seen is not None and self._seen() is experience):
            return {}
        # A weak reference: holding the experience would hold its memory.
        self._seen = weakref.ref(experience)
        width, count = experience.width, len(lengths)
        # Places of the drawn tokens in a flat [n * T], found once for all of them and not for each by its mask.
        drawn = (torch.arange(width)[None, :] < lengths[:, None]).flatten().nonzero()[:, 0]
        found: dict[str, Any] = {_PER_TOKEN[name]: getattr(experience, name, None) for name in _PER_TOKEN}
        for name, other in (("learner_logprobs", "logprobs"), ("entropy", "entropy")):
            if found[name] is None:
                found[name] = getattr(snapshot, other)
        advantages = snapshot.advantages
        if advantages is not None:
            found["advantages"] = advantages[:, None].expand(-1, width) if advantages.ndim == 1 else advantages
        tensors = {
            name: value.detach()[:count].reshape(-1)[drawn.to(value.device)].float().cpu()
            for name, value in found.items()
            if value is not None and tuple(value.shape) == (len(experience.lengths), width)
        }
        tensors["mask"] = experience.mask[:count].cpu().reshape(-1)[drawn]
        return tensors

    def _write_token_texts(self, pl_module: LightningModule, batch: Any) -> None:
        tokenizer = getattr(pl_module, "tokenizer", None)
        if tokenizer is None:
            return
        fresh = set().union(*(c.token_ids for c in batch.completions)) - self._written_tokens
        if fresh:
            assert self._folder is not None
            lines = [json.dumps([i, tokenizer.decode([i])]) + "\n" for i in sorted(fresh)]
            with (self._folder / flight.TOKENS_FILE).open("a", encoding="utf-8") as file:
                file.writelines(lines)
            self._written_tokens |= fresh

    def _thin_out(self) -> None:
        """Delete the records that are neither among the newest nor landmarks."""
        assert self._folder is not None
        files = flight.recorded_steps(self._folder)
        # The distance doubles whenever there are too many: landmarks stay evenly spread, however long the run gets. It
        # goes by the rollouts that there were, and not by the files: a run that was killed or went back may lack some.
        past, stride = self.step - self.steps, 1
        while math.ceil(past / stride) > self.landmarks > 0:
            stride *= 2
        for step, file in files.items():
            if step <= past and ((step - 1) % stride or not self.landmarks):
                file.unlink(missing_ok=True)

    # Dumping.

    def dump(self, trainer: Trainer, reason: str, explanation: str, step: int | None = None) -> Path | None:
        """Keep all that is recorded now in ``flight/<reason>-<step>``.

        Args:
            trainer: trainer of the run.
            reason: short name of why it is kept.
            explanation: sentence that is written to ``reason.json``.
            step: rollout in the name of the folder; that of the last record if left out.

        Returns:
            The folder, or None if nothing is recorded or ``dumps`` folders are kept already.
        """
        if self._folder is None or not flight.recorded_steps(self._folder) or len(self._kept) >= self.dumps:
            return None
        step = self.step if step is None else step
        name = f"{re.sub(r'[^A-Za-z0-9_]+', '_', reason)}-{step:06d}"
        target = self._folder / name
        if name in self._kept:
            return target
        try:
            flight.link_folder(self._folder, target)
            content = {"reason": reason, "step": step, "explanation": explanation}
            (target / flight.REASON_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("The flight record could not be kept in %s: %s", target, error)
            return None
        self._kept.append(name)
        if self.upload and (logger := run_logger(trainer)) is not None:
            logger.log_artifact(target, f"{flight.FOLDER}/{name}")
        return target

    def _dump_if_alarmed(self, trainer: Trainer) -> None:
        """Keep the record if a monitor has written a new diagnosis, or the run is being stopped."""
        if self._folder is None:
            return
        try:
            diagnoses = self._new_diagnoses()
        except (OSError, ValueError, KeyError) as error:
            log.warning("%s cannot be read (%s).", FINDINGS_FILE, error)
            diagnoses = []
        for name, explanation, step in diagnoses:
            if not any(kept.startswith(f"{name}-") for kept in self._kept):
                self.dump(trainer, name, explanation, step)
        stop = stop_reason(trainer)
        if (
            stop is not None
            and stop.monitor != KEYBOARD
            and not any(k.endswith(f"-{self.step:06d}") for k in self._kept)
        ):
            self.dump(trainer, "stop", f"{stop.monitor}: {stop.reason}")

    def _new_diagnoses(self) -> list[tuple[str, str, int | None]]:
        """Read (name, explanation, step) of each new diagnosis that is more than ``info``."""
        assert self._folder is not None
        path = self._folder.parent / FINDINGS_FILE
        if self._journal_offset is None or not path.exists() or path.stat().st_size <= self._journal_offset:
            return []
        with path.open("rb") as file:
            file.seek(self._journal_offset)
            data = file.read()
        # A last line that is still being written is read next time.
        whole = data[: data.rfind(b"\n") + 1]
        self._journal_offset += len(whole)
        events = [json.loads(line) for line in whole.splitlines() if line.strip()]
        return [
            (str(e["diagnosis"]), str(e.get("explanation", "")), e.get("step"))
            for e in events
            if e.get("event") == "diagnosis" and e.get("severity") != "info"
        ]


def _flat(rows: Iterable[Iterable[Any]], dtype: Any = np.int32) -> Tensor:
    # NumPy reads an iterator several times faster than torch reads a list; this is most of a record's cost.
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))
