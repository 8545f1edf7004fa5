"""Signals and the loss of ranks in a run of several processes: all of them end together, and soon."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_grpo.distributed.rank_watch import Loss, RankWatch
from lit_grpo.errors import StopRun, UserError
from lit_grpo.run.folder import run_logger

_TOGETHER_SECONDS = 1.0
"""How far apart ranks may break off that all do for the same reason."""
_NOTICE_SECONDS = 5.0
"""How long a rank whose collective failed waits for word of who was lost."""
_COLLECTIVE_SECONDS = 3.0
"""How long the main thread gets to notice by itself that a rank was lost, as gloo lets it."""
_LINE = 500
"""Characters of each line of an error that the other ranks are told."""
_END_SECONDS = 12.0
"""How long a rank may then take to end: to close its MLflow run, to tell whoever is to be told."""


class RankCallback(Callback):
    """Callback that lets all ranks of a run end together, whichever of them is signalled, stops or dies.

    A signal only sets a flag; the ranks agree on it at the end of each rollout and of each batch of an evaluation, and
    then save and end alike. (Lightning 2.6 broadcasts inside its handler, while another rank may be in the midst of
    another collective: both then wait for ever.) A rank that has died, or that gives no sign of life, ends the others,
    with one message that names it. Nothing of this waits for another rank but one reduction of two numbers a rollout.

    :class:`lit_grpo.LitGRPO` adds it where there are several processes.

    Args:
        silence: seconds without a sign of life after which a rank counts as lost; None: they are not watched.
    """

    def __init__(self, silence: float | None = 40.0) -> None:
        if silence is not None and not silence >= 1:
            raise UserError(
                f"max_rank_silence is {silence} seconds, must be at least 1",
                where="model.guards.max_rank_silence",
                remedy="leave it out, or set null to switch the watch off",
            )
        self._silence = silence
        self._terminated = self._requeued = False
        self._requeue: Any = None
        self._watch: RankWatch | None = None
        self._lost: Loss | None = None
        self._noticed = threading.Event()
        self._ending = threading.Event()
        self._trainer: Trainer | None = None

    # Signals.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._terminated = self._requeued = False
        self._ending.clear()
        # Lightning looks these two up when it sets its handlers, which it does after this hook.
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = self._note_sigterm
        if self._requeue is None:
            self._requeue = connector._slurm_sigusr_handler_fn
        connector._slurm_sigusr_handler_fn = self._note_requeue
        if self._silence is not None and self._watch is None:
            self._start_watch(trainer, self._silence)

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: the main thread may be in a collective, or hold any lock, at this moment.
        self._terminated = True

    def _note_requeue(self, number: int, frame: FrameType | None) -> None:
        self._requeued = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._agree(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._agree(trainer)

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._agree(trainer)

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._agree(trainer)

    def _agree(self, trainer: Trainer) -> None:
        """Give all ranks the signals of any of them."""
        if trainer.world_size == 1 or trainer.sanity_checking:
            terminated, requeued = self._terminated, self._requeued
        else:
            own = torch.tensor([float(self._terminated), float(self._requeued)], device=trainer.strategy.root_device)
            agreed: Any = trainer.strategy.reduce(own, reduce_op="max")
            terminated, requeued = (bool(flag) for flag in agreed.tolist())
        self._requeued = False
        if requeued:
            # What Lightning does in the handler itself: it saves the run, and asks Slurm to queue it again.
            self._requeue(0, None)
        if terminated:
            let_children_end()
            # Checkpoints come after this callback, and Lightning ends the run after the batch.
            trainer._signal_connector.received_sigterm = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        let_children_end()

    # Ranks that are lost.

    def _start_watch(self, trainer: Trainer, silence: float) -> None:
        host = "127.0.0.1" if trainer.num_nodes == 1 else os.environ.get("MASTER_ADDR", "127.0.0.1")
        watch = RankWatch(trainer.global_rank, silence, self._on_loss)
        try:
            watch.start(trainer.strategy.broadcast, host)
        except OSError as error:
            print(
                f"lit-grpo: rank {trainer.global_rank} is not watched ({error}): should another rank die, this one may "
                "wait for it until its collectives time out",
                file=sys.stderr,
                flush=True,
            )
            return
        self._watch = watch
        # The watch names who was lost and ends the others, the MLflow run too. Lightning's launcher would kill rank 0.
        let_children_end()

    def _on_loss(self, loss: Loss) -> None:
        """End this process, since a rank is gone; called in the thread of the watch."""
        # All ranks may break off for one reason, as with Ctrl-C in their terminal; each then says it itself.
        if loss.kind == "broke off" and self._ending.wait(_TOGETHER_SECONDS):
            return
        self._lost = loss
        # Rank 0 speaks for all; where it is lost itself, the first process of each machine does.
        speaks = self._rank == 0 or (
            loss.process.rank == 0 and (self._rank == 1 or os.environ.get("LOCAL_RANK") == "0")
        )
        if speaks and not loss.told:
            print(_said(loss), file=sys.stderr, flush=True)
        if loss.kind == "silent":
            # It can do nothing itself, and would keep its memory.
            loss.process.kill()
        self._noticed.set()
        # The main thread is in a collective that fails at once (gloo) or after many minutes (NCCL).
        if self._ending.wait(_COLLECTIVE_SECONDS):
            threading.Event().wait(_END_SECONDS)
        else:
            closing = threading.Thread(target=self._close_logger, daemon=True)
            closing.start()
            closing.join(_END_SECONDS)
        # No exception can be raised in a main thread that waits in C.
        os._exit(1)

    @property
    def _rank(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_rank

    def _close_logger(self) -> None:
        logger = None if self._trainer is None or self._rank else run_logger(self._trainer)
        if logger is not None:
            logger.set_tags({"stop.reason": str(self._lost)})
            logger.finalize("failed")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        let_children_end()
        if self._watch is None:
            return
        together = isinstance(exception, StopRun | SIGTERMException)
        # A collective that failed because of another rank: what that was is known in a moment.
        if not together and _is_of_a_collective(exception) and self._noticed.wait(_NOTICE_SECONDS):
            self._ending.set()
            # The message is out. The traceback of the collective would bury it.
            sys.excepthook = lambda *_: None
            return
        self._ending.set()
        self._watch.stop(None if together else _told(exception))
        self._watch = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._watch is not None and self._lost is None:
            self._ending.set()
            self._watch.stop()
            self._watch = None


def let_children_end() -> None:
    """Let ranks that Lightning's launcher has started end before rank 0 does, with whatever exit code.

    The launcher watches them in a thread of rank 0, and kills rank 0 as soon as one ends with a code above 0, as all do
    after SIGTERM or a stop: in the midst of its report, and before its MLflow run is closed.
    """
    for thread in threading.enumerate():
        if type(thread).__name__ == "_ChildProcessObserver":
            # It looks once more before it asks whether it is finished: it must have nobody left to look after.
            thread._child_processes = []  # type: ignore[attr-defined]


def _told(exception: BaseException) -> str:
    """Return what the others are told of an exception: its first line, and of bad input where it is and what to do."""
    text = str(exception).strip()
    lines = text.splitlines() if isinstance(exception, UserError) else text.splitlines()[:1]
    return "\n".join(line[:_LINE] for line in (f"{type(exception).__name__}: {lines[0] if lines else ''}", *lines[1:]))


def _said(loss: Loss) -> str:
    """Return the message about a rank that was lost: one line, and below it what its error says of place and remedy."""
    first, *more = str(loss).splitlines()
    line = f"lit-grpo: {first.rstrip('.')}. The run cannot go on without it and ends."
    return "\n".join([line, *more])


def _is_of_a_collective(exception: BaseException) -> bool:
    """Tell whether an exception may come from a collective whose other side is gone."""
    if isinstance(exception, UserError):
        return False
    text = f"{type(exception).__name__} {exception}".lower()
    words = ("gloo", "nccl", "connection closed", "connection reset", "dist", "tcpstore", "broken pipe", "peer")
    return isinstance(exception, RuntimeError | OSError) and any(word in text for word in words)


def watch_ranks(trainer: Trainer, silence: float | None) -> None:
    """Put a :class:`RankCallback` before all callbacks of a Trainer with several processes that has none.

    Args:
        trainer: the run's trainer.
        silence: seconds without a sign of life after which a rank counts as lost; None: they are not watched.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.world_size > 1 and not any(isinstance(callback, RankCallback) for callback in callbacks):
        callbacks.insert(0, RankCallback(silence))
