"""The progress of a run under way: drawn anew in place on a terminal, one line a rollout elsewhere."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lit_grpo.terminal.console import can_redraw, drawing_on, make_console
from lit_grpo.terminal.figures import Progress, chosen, display, line

_REFRESHES = 4
"""How often in a second the terminal is drawn anew."""
_RECENT = 20
"""Number of rollouts whose mean time says how long the rest takes."""
_OF_THE_LEARNER = ("learn", "evaluate", "checkpoint")


class RunProgress(ProgressBar):
    """Progress bar for rollouts: phase in hand, rollout i of n, reward, entropy, length, tokens a second, time left.

    On a terminal these are a few lines that are drawn anew in place; what is printed or logged meanwhile stands above
    them. In a pipe, a file or under ``TERM=dumb`` every rollout is one line on standard output with the same figures.
    The command line uses it wherever ``trainer.callbacks`` holds no other progress bar, and
    ``trainer.enable_progress_bar: false`` leaves it out. In Python it is one of the Trainer's callbacks:
    ``Trainer(callbacks=[RunProgress()])``.

    It works with any module; metrics that a module logs with ``prog_bar=True`` are shown behind the others. The phases
    ``sync``, ``generate`` and ``rewards`` are told by :class:`lit_grpo.RolloutDataModule`, which calls
    ``on_phase(name)`` of every callback that has it.

    Args:
        console: where it is drawn; None: standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console
        self._live: Live | None = None
        self._drawing_on = ExitStack()
        self._enabled = True
        self._phase, self._phase_began = "", 0.0
        self._part: tuple[int, int] | None = None
        self._done = 0
        self._total: int | None = None
        self._metrics: dict[str, float | str] = {}
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._rollout_began: float | None = None
        self._left: float | None = None
        self._left_at = 0.0

    # Lightning's interface of progress bars.

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        # Lightning calls this on ranks other than 0, and while it looks for a learning rate.
        self._enabled = False
        self._stop()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._part, self._left, self._metrics = None, None, {}
        self._durations.clear()
        self._done, self._total, self._rollout_began = 0, None, None
        self._begin("start")
        self._start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    # What the run does.

    def on_phase(self, phase: str) -> None:
        """Take note that a phase of making a rollout begins; called from whichever thread makes it."""
        # A rollout that is made beside the learner, or in an evaluation, is not what the run waits for.
        if self._part is not None:
            return
        if threading.current_thread() is not threading.main_thread() and self._phase in _OF_THE_LEARNER:
            return
        self._begin(phase)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = self.total_train_batches * max(1, trainer.max_epochs or 1)
        self._total = None if math.isinf(batches) else int(batches)
        self._done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._rollout_began = time.monotonic()
        self._begin("generate")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin("learn")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        own = self.get_metrics(trainer, pl_module)
        # v_num is Lightning's version number of the run, which says nothing of its progress.
        own.pop("v_num", None)
        plain = {key: value for key, value in own.items() if isinstance(value, float | int | str)}
        self._metrics = chosen({key: float(value) for key, value in trainer.callback_metrics.items()}, plain)
        self._estimate()
        self._begin("generate")
        if self._enabled and self._live is None:
            print(line(self._state()), file=sys.stdout, flush=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._begin("checkpoint")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("end")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluate(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluate(trainer.num_test_batches)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluate(trainer.num_predict_batches)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._another_part()

    def on_test_batch_end(self, *_: Any) -> None:
        self._another_part()

    def on_predict_batch_end(self, *_: Any) -> None:
        self._another_part()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._part = None
        self._begin("generate" if trainer.state.fn == "fit" else "end")

    def _evaluate(self, batches: Any) -> None:
        counts = batches if isinstance(batches, list) else [batches]
        self._part = 0, int(sum(count for count in counts if not math.isinf(count)))
        self._begin("evaluate")

    def _another_part(self) -> None:
        if self._part is not None:
            self._part = self._part[0] + 1, max(self._part[0] + 1, self._part[1])

    def _begin(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()

    def _estimate(self) -> None:
        now = time.monotonic()
        if self._rollout_began is not None:
            self._durations.append(now - self._rollout_began)
        self._rollout_began = now
        # The first rollout starts engines and compiles: it tells little of the others.
        recent = list(self._durations)[1:] if len(self._durations) < _RECENT else list(self._durations)
        self._left = None
        if recent and self._total is not None and self._done < self._total:
            self._left, self._left_at = sum(recent) / len(recent) * (self._total - self._done), now

    def _state(self) -> Progress:
        now = time.monotonic()
        left = None if self._left is None else max(0.0, self._left - (now - self._left_at))
        return Progress(
            phase=self._phase,
            seconds=now - self._phase_began,
            done=self._done,
            total=self._total,
            part=self._part,
            metrics=self._metrics,
            left=left,
        )

    # Drawing.

    def _start(self) -> None:
        console = self._console or make_console()
        if not self._enabled or self._live is not None or not can_redraw(console):
            return
        self._live = Live(
            get_renderable=self._drawn,
            console=console,
            refresh_per_second=_REFRESHES,
            # Otherwise lines for a log file would go to the terminal.
            redirect_stderr=sys.stderr.isatty(),
        )
        _drawing.add(self)
        self._drawing_on.enter_context(drawing_on(console))
        self._live.start(refresh=True)

    def _drawn(self) -> Text:
        console = self._console or (self._live.console if self._live is not None else make_console())
        return display(self._state(), console, console.width)

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        self._phase, self._left, self._part = "", None, None
        # Nothing was trained: there is nothing that would be worth a line.
        if not self._metrics:
            live.transient = True
        # It draws itself once more, without a phase.
        live.stop()
        self._drawing_on.close()
        _drawing.discard(self)


_drawing: set[RunProgress] = set()
"""Those that have replaced the standard streams."""


def _leave_terminal() -> None:
    """Give the terminal back at the end of a process whose run ended in no hook."""
    for progress in list(_drawing):
        progress.disable()


def _in_child() -> None:
    # Of a process that was forked while the terminal was drawn on: its copy of the lock may be held for ever by a
    # thread that it does not have.
    if _drawing:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        _drawing.clear()


atexit.register(_leave_terminal)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
