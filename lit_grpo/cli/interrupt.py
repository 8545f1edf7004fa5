"""How a run ends that is told to: the first Ctrl-C after the rollout under way, the second and SIGTERM soon.

Whatever the run is doing, it is over in a stated time: see :mod:`lit_grpo.cli.watchdog`.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.cli import watchdog
from lit_grpo.run.stop import KEYBOARD, request_stop

TERM_SECONDS = 2.0
"""Seconds from SIGTERM after which a run of one process does not wait for the end of its rollout any more."""


class FirstCtrlC(Callback):
    """Callback that ends a run in time, and saved wherever that is possible.

    The first Ctrl-C of a fit waits for the end of the rollout, so that nothing is lost; the second ends the run at
    once. SIGTERM ends it after the rollout if that takes no more than 2 seconds, else there and then, with what was
    whole after the last one. A run that hangs where Python cannot be interrupted is killed 10 seconds after SIGTERM or
    the second Ctrl-C; a checkpoint that is being written has a minute more.

    With several processes the first Ctrl-C ends the run at once, as without this callback, and SIGTERM waits for the
    others, at most a minute.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._ending = False
        self._previous_handlers: dict[int, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._ending = False
        # Python takes handlers from the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return
        alone = trainer.world_size == 1
        watchdog.arm(watchdog.END_SECONDS if alone else watchdog.END_SECONDS_RANKS)
        # Before Lightning's own handler is there, which calls the one that it finds as well. Of several processes each
        # would leave at a place of its own.
        if alone:
            self._set_handler(signal.SIGTERM, self._handle_term)
            self._set_handler(signal.SIGALRM, self._handle_alarm)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupted = False
        # Of several processes each would stop at a rollout of its own.
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._set_handler(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        # Only noted here: the main thread may be holding any lock at this moment.
        self._interrupted = True
        print("\nlit-grpo: ending after this rollout; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    def _handle_term(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous_handlers.get(signal.SIGTERM)
        if callable(previous):
            previous(number, frame)
        # Not a second time: it would break off what is done at the end, such as the last save.
        if not self._ending:
            signal.setitimer(signal.ITIMER_REAL, TERM_SECONDS)

    def _handle_alarm(self, number: int, frame: FrameType | None) -> None:
        print("lit-grpo: ended by SIGTERM in the middle of a rollout", file=sys.stderr, flush=True)
        raise SIGTERMException

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Not to be broken off: the run ends with the hook that saves.
        self._cancel_alarm()
        watchdog.saving()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._interrupted:
            request_stop(trainer, "interrupted by Ctrl-C", KEYBOARD)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cancel_alarm()
        self._restore_handlers(signal.SIGINT)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._ending = True
        self._cancel_alarm()
        # Before the other callbacks, such as the one that writes the report: the time is short.
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            # Also where nothing more is saved: one that was begun behind the training is waited for.
            watchdog.saving()
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, RolloutCheckpoint):
                    callback.save_what_is_whole(trainer, exception)
            watchdog.saved()
        # After a KeyboardInterrupt Lightning has set a handler of its own, which ignores Ctrl-C while it shuts down.
        if not isinstance(exception, KeyboardInterrupt):
            self._restore_handlers(signal.SIGINT)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Not called after an exception; Lightning then sets these handlers once more. `watchdog.disarm` undoes both.
        self._cancel_alarm()
        self._restore_handlers(signal.SIGTERM, signal.SIGALRM)

    def _set_handler(self, number: int, handler: Any) -> None:
        if number not in self._previous_handlers:
            self._previous_handlers[number] = signal.signal(number, handler)

    def _restore_handlers(self, *numbers: int) -> None:
        for number in numbers:
            previous = self._previous_handlers.pop(number, None)
            if previous is not None:
                signal.signal(number, previous)

    @staticmethod
    def _cancel_alarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
