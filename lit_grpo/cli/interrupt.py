"""The handling of Ctrl-C: the first one ends the run after the rollout under way, saved; the second ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.run.stop import KEYBOARD, request_stop


class FirstCtrlC(Callback):
    """Callback that lets the first Ctrl-C of a fit wait for the end of the rollout, so that nothing is lost.

    With several processes Ctrl-C ends the run at once, as without this callback.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._previous_handler: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupted = False
        # Of several processes each would stop at a rollout of its own. Python takes handlers from the main thread only.
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        # Only noted here: the main thread may be holding any lock at this moment.
        self._interrupted = True
        print("\nlit-grpo: ending after this rollout; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._interrupted:
            request_stop(trainer, "interrupted by Ctrl-C", KEYBOARD)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handler()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After a KeyboardInterrupt Lightning has set a handler of its own, which ignores Ctrl-C while it shuts down.
        if not isinstance(exception, KeyboardInterrupt):
            self._restore_handler()

    def _restore_handler(self) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None
