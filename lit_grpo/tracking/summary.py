"""What a person reads of a run: at its start what is trained how, at its end how that went and what to do next."""

from __future__ import annotations

import logging
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_grpo.callbacks.rollout_checkpoint import LAST, RolloutCheckpoint
from lit_grpo.errors import StopRun
from lit_grpo.run.folder import run_folder, run_logger, shown
from lit_grpo.run.steps import counts_as_evaluation, number_from_one
from lit_grpo.run.stop import KEYBOARD, stop_reason
from lit_grpo.terminal.library_output import LOG_FILE
from lit_grpo.terminal.panels import Fact, SampleRow, show
from lit_grpo.tracking.charts import OVERVIEW_KEYS, History, draw_overview

log = logging.getLogger(__name__)

CURVES_FILE = "curves.png"
HELD_OUT_KEY = "val/reward"
"""Key of the mean reward on the held-out sets."""
LAST_STEPS = 10
"""Number of rollouts that the final reward is the mean of."""


class RunSummary(Callback):
    """Callback that prints the start of a fit and its end.

    At the start: recipe, model, engine, devices, batch and memory, as far as module and data module tell them by a
    method ``describe_run()`` that returns text by name. At the end: reward, folder, curves, report, checkpoint, MLflow,
    what to type next and three completions. On a terminal both are panels, otherwise plain lines. The last line of
    standard output is ``final reward R over the last N steps``, N being 10 or the number of rollouts if there are
    fewer; ``final loss L in the last step`` where nothing is rewarded. The curves also go to MLflow.

    Works with any module that logs ``reward`` (and ``entropy``, ``length``, ``grad_norm``). Completions are shown if
    the batches are :class:`lit_grpo.types.Rollout` objects.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._metrics: dict[str, list[float]] = {key: [] for key in OVERVIEW_KEYS}
        self._batch: Any = None
        self._folder = Path()
        self._held_out: dict[int, float] = {}
        """Mean reward on the held-out sets, by rollout."""

    # Recording.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._folder = run_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number_from_one(trainer)
        if trainer.is_global_zero:
            show(*self._start(trainer, pl_module))

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> tuple[str, list[Fact]]:
        """Return the title and the facts of the start."""
        facts: dict[str, str] = {}
        for part in (pl_module, getattr(trainer, "datamodule", None)):
            if callable(describe := getattr(part, "describe_run", None)):
                facts |= describe()
        facts["devices"] = _devices(trainer)
        batches = trainer.num_training_batches * max(1, trainer.max_epochs or 1)
        if not math.isinf(batches):
            facts["rollouts"] = f"{batches:,}"
        before = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        nothing_kept = getattr(trainer, "fast_dev_run", False)
        if not nothing_kept:
            facts["folder"] = shown(self._folder)
        name = "fast_dev_run, which keeps nothing" if nothing_kept else f"Run {self._folder.name}"
        return name + (f" goes on after rollout {before}" if before else ""), list(facts.items())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        logged = trainer.callback_metrics
        self._steps.append(trainer.fit_loop.epoch_loop.total_batch_idx + 1)
        for key, values in self._metrics.items():
            values.append(float(logged.get(key, torch.nan)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        held_out = float(trainer.callback_metrics.get(HELD_OUT_KEY, torch.nan))
        if trainer.state.fn == "fit" and counts_as_evaluation(trainer) and not math.isnan(held_out):
            self._held_out[trainer.fit_loop.epoch_loop.total_batch_idx + 1] = held_out

    # In the checkpoint, so that a resumed run shows its whole history.

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self._steps),
            "metrics": {key: list(values) for key, values in self._metrics.items()},
            "held_out": dict(self._held_out),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = list(state_dict["steps"])
        self._metrics = {key: list(state_dict["metrics"][key]) for key in OVERVIEW_KEYS}
        self._held_out = dict(state_dict.get("held_out", {}))

    def final_reward(self) -> tuple[float, int] | None:
        """Return the mean reward of the last rollouts that have one, and their number; None without rewards."""
        # NaN stands for a rollout of which no reward scored anything.
        rewards = [reward for reward in self._metrics["reward"] if not math.isnan(reward)][-LAST_STEPS:]
        if not rewards:
            return None
        return sum(rewards) / len(rewards), len(rewards)

    def samples(self) -> list[SampleRow]:
        """Return the completions of the last rollout with the highest, the middle and the lowest reward.

        Those that no reward scored are left out.
        """
        batch = self._batch
        if (
            batch is None
            or not getattr(batch, "rewards", True)
            or not all(hasattr(batch, name) for name in ("prompts", "texts", "reward", "group_size"))
        ):
            return []
        scored = [i for i in range(len(batch.texts)) if not math.isnan(float(batch.reward[i]))]
        order = sorted(scored, key=lambda i: -float(batch.reward[i]))
        chosen = dict.fromkeys([order[0], order[len(order) // 2], order[-1]]) if order else {}
        return [
            SampleRow(batch.prompts[i // batch.group_size].question, batch.texts[i], float(batch.reward[i]))
            for i in chosen
        ]

    # Printing. Lightning calls `teardown` after a fit that ended by itself, and only `on_exception` after any other.

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            # Otherwise the bar ends after this callback, and draws itself once more below the last line.
            if trainer.progress_bar_callback is not None:
                trainer.progress_bar_callback.teardown(trainer, pl_module, stage)
            reason = stop_reason(trainer)
            if reason is None:
                how = _stopped_early(trainer) or "finished"
            else:
                how = "interrupted" if reason.monitor == KEYBOARD else f"stopped by {reason.monitor}: {reason.reason}"
            self._print(trainer, how, unfinished=reason is not None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        if trainer.state.fn != "fit":
            return
        if not batches.processed:
            # Any other exception has a screen of its own.
            if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
                print("lit-grpo: interrupted before the first rollout ended; nothing was saved", file=sys.stderr)
            return
        if batches.processed == batches.ready and batches.ready not in self._steps[-1:]:
            # Another callback raised before this one had its turn and before Lightning logged the step, which the
            # checkpoint below holds.
            self._record(trainer)
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.on_exception(trainer, pl_module, exception)
        for callback in trainer.checkpoint_callbacks:
            # Its own turn comes after this callback, which prints the name of what it saves.
            if isinstance(callback, RolloutCheckpoint):
                callback.save_what_is_whole(trainer, exception)
        if isinstance(exception, StopRun):
            how = f"stopped: {exception.reason}"
        elif isinstance(exception, KeyboardInterrupt):
            how = "interrupted"
        elif isinstance(exception, SIGTERMException):
            how = "ended by SIGTERM"
        else:
            how = f"failed: {type(exception).__name__}"
        self._print(trainer, how, unfinished=True)

    def _print(self, trainer: Trainer, how: str, unfinished: bool) -> None:
        if not trainer.is_global_zero:
            return
        nothing_kept = getattr(trainer, "fast_dev_run", False)
        facts = self._scores()
        if not nothing_kept:
            facts.append(("folder", shown(self._folder)))
        curves = self._draw() if self._steps and not nothing_kept else None
        if curves:
            facts.append(("curves", shown(curves)))
        report = next((c.report_path for c in trainer.callbacks if getattr(c, "report_path", None)), None)  # type: ignore[attr-defined]
        if report is not None:
            facts.append(("report", shown(report)))
        # Only where the program has one that holds something: what libraries have said is asked for when a run failed.
        log_file = self._folder / LOG_FILE
        if how.startswith("failed") and log_file.exists():
            facts.append(("log", shown(log_file)))
        facts += self._checkpoint_facts(trainer, unfinished)
        logger = run_logger(trainer)
        if logger is not None and logger.started:
            if curves:
                logger.log_artifact(curves)
            self._upload_checkpoint(trainer, logger)
            logger.flush()
            if (command := logger.view_command()) is not None:
                facts.append(("MLflow", command))
                if (page := logger.page_address()) is not None:
                    facts.append(("its page", page))
            if report := logger.delivery_report(shown_by_caller=True):
                facts.append(("not sent", report))
        count = f"{len(self._steps)} rollout" + ("" if len(self._steps) == 1 else "s")
        # What was printed on standard error so far stands above the summary where both streams go to one file.
        sys.stderr.flush()
        name = "fast_dev_run, which keeps nothing," if nothing_kept else f"Run {self._folder.name}"
        facts += [] if unfinished else self._next_facts(trainer)
        show(f"{name} {how} after {count}", facts, self.samples())
        final = self.final_reward()
        if final is not None:
            print(f"final reward {final[0]:.3f} over the last {final[1]} steps", flush=True)
        elif self._steps and "loss" in trainer.callback_metrics:
            print(f"final loss {float(trainer.callback_metrics['loss']):.3f} in the last step", flush=True)

    def _upload_checkpoint(self, trainer: Trainer, logger: Any) -> None:
        """Make the checkpoint that the logger wants an artifact of the run."""
        saver = next((c for c in trainer.checkpoint_callbacks if isinstance(c, RolloutCheckpoint)), None)
        wanted = getattr(logger, "checkpoints", "none")
        if saver is None or wanted == "none":
            return
        best = Path(saver.best_model_path) if wanted == "best" and saver.best_model_path else None
        if (path := best or saver.last_path) is not None:
            logger.log_artifact(path.resolve(), "checkpoints")

    def _checkpoint_facts(self, trainer: Trainer, unfinished: bool) -> list[Fact]:
        saver = next((c for c in trainer.checkpoint_callbacks if isinstance(c, RolloutCheckpoint)), None)
        if saver is None or saver.last_path is None:
            return [("checkpoint", "none")] if saver is not None and unfinished else []
        facts = [("checkpoint", f"{shown(saver.last_path)} (after rollout {saver.saved_rollout})")]
        config = self._folder / "config.yaml"
        if unfinished and config.exists():
            # By its fixed name: the command stays right when the run goes on and saves again.
            last = saver.last_path.with_name(LAST)
            command = ["lit-grpo", "fit", "--config", shown(config), "--ckpt_path", shown(last)]
            # Checkpoints that lie elsewhere do not tell which run they belong to.
            if last.absolute().parent.parent != self._folder.absolute() and run_logger(trainer) is not None:
                command += ["--trainer.logger.run_dir", shown(self._folder)]
            facts.append(("go on", shlex.join(command)))
        return facts

    def _scores(self) -> list[Fact]:
        """Return how good the run was: in training at its end and at its best, and on what is held out."""
        facts: list[Fact] = []
        final = self.final_reward()
        if final is not None:
            rewards = zip(self._metrics["reward"], self._steps, strict=True)
            # Of equal ones the first, as for what is held out.
            best = max(((r, step) for r, step in rewards if not math.isnan(r)), key=lambda one: one[0])
            last = f"mean of the last {final[1]}" if final[1] > 1 else "one rollout"
            facts.append(("reward", f"{final[0]:.3f} ({last}), best {best[0]:.3f} at rollout {best[1]}"))
        if self._held_out:
            last_at = max(self._held_out)
            best_at = max(self._held_out, key=lambda step: self._held_out[step])
            text = f"{self._held_out[last_at]:.3f} at rollout {last_at}"
            if best_at != last_at:
                text += f", best {self._held_out[best_at]:.3f} at rollout {best_at}"
            facts.append(("held out", text))
        return facts

    def _next_facts(self, trainer: Trainer) -> list[Fact]:
        """Return what a person may type next, after a run that has come to its end."""
        saver = next((c for c in trainer.checkpoint_callbacks if isinstance(c, RolloutCheckpoint)), None)
        if saver is None or saver.last_path is None or "://" in str(saver.last_path):
            return []
        path = Path(saver.best_model_path) if saver.best_model_path else saver.last_path
        command = ["lit-grpo", "export", "--checkpoint", shown(path), "--output", f"models/{self._folder.name}"]
        return [("next", shlex.join(command))]

    def _draw(self) -> Path | None:
        path = self._folder / CURVES_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draw_overview(History(self._steps, self._metrics), self._folder.name))
        # A run is not lost for want of a picture.
        except Exception as error:
            log.warning("The curves could not be drawn: %s", error)
            return None
        return path


def _devices(trainer: Trainer) -> str:
    """Name the processes and what they compute on."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    count = "" if trainer.world_size == 1 else f"{trainer.world_size} x "
    cores = torch.get_num_threads()
    threads = f", {cores} thread{'s' if cores > 1 else ''}" if device.type == "cpu" else ""
    spread = "" if trainer.world_size == 1 else f", {type(trainer.strategy).__name__}"
    return f"{count}{name}{threads}{spread}, precision {trainer.precision}"


def _stopped_early(trainer: Trainer) -> str | None:
    """Say which of Lightning's callbacks has ended the run before its time, and why; None if none has."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        message = getattr(callback, "stopping_reason_message", None)
        if message and trainer.should_stop:
            return f"stopped early by {type(callback).__name__} ({message.partition(' Signaling')[0].rstrip('.')})"
    return None
