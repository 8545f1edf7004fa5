"""Ctrl-C: once ends the run after the rollout under way, saved; twice ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.run.stop import KEYBOARD, request_stop


class FirstCtrlC(Callback):
    """Makes the first Ctrl-C of a fit wait for the end of the rollout, so that nothing is lost.

    With several processes each would stop at its own rollout, so there Ctrl-C ends the run at once, as without this.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked = False
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        # Only noted here: the main thread may be holding any lock at this moment.
        self._asked = True
        print("\nlit-grpo: ending after this rollout; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._asked:
            request_stop(trainer, "interrupted by Ctrl-C", KEYBOARD)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt):  # then Lightning ignores Ctrl-C while it shuts down
            self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
