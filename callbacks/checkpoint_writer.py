"""The writer of a run's checkpoints: behind the training, one at a time, by all ranks together.

The step waits for a copy of the run in main memory; a thread writes it. All checkpoints of a run go through one writer,
those of the run itself and those that a rollback returns to, so that there is never more than one copy, and they come
to the disk in the order in which they were made. Two of the same moment share the copy.

=========================  ==================================================================================
what                       who waits for the write under way
=========================  ==================================================================================
the next checkpoint        the step after which it is due
end of the run, a stop     the run, which writes its last checkpoint itself
SIGTERM, Ctrl-C, an error  the process, before it ends
a rollback                 the run, before it looks for a place to return to
SIGKILL                    nobody: what is half-written has a hidden name, and the checkpoint before it holds
=========================  ==================================================================================
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy

from lit_grpo.callbacks.checkpoint_files import Ranks, is_full, write_content, write_shards
from lit_grpo.callbacks.host_copy import HostCopy, plain_tensors
from lit_grpo.callbacks.host_memory import HostMemory
from lit_grpo.utils.memory import free_what_is_unused, is_out_of_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Save:
    """One checkpoint that is to be written, and what follows from how that ends."""

    path: Path
    then: Callable[[], None]
    """Called on rank 0 once the checkpoint is in place, in the thread that wrote it."""
    failed: Callable[[BaseException], None]
    """Called on all ranks, between two steps of the run, with the error for which there is no checkpoint."""
    make_room: Callable[[], bool] = lambda: False
    """Called on rank 0 where the disk is full; says whether it is worth another try."""


class CheckpointWriter:
    """The one writer of a trainer's checkpoints, see :meth:`of`."""

    _of: ClassVar[WeakKeyDictionary[Trainer, CheckpointWriter]] = WeakKeyDictionary()

    def __init__(self, trainer: Trainer) -> None:
        # A group of its own, since the thread exchanges what it has to beside the learner's collectives; and by gloo,
        # which takes plain values on the CPU.
        several = trainer.world_size > 1
        self._ranks = Ranks.of(trainer, torch.distributed.new_group(backend="gloo") if several else None)
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._copy: HostCopy | None = None
        self._moment: int | None = None
        self._waiting: list[tuple[Save, Callable[[], None]]] = []
        self._failures: list[tuple[Save, BaseException]] = []
        self._lock = threading.Lock()
        """Held while the thread looks whether anything is left to do, and while it is given more."""
        self._working = False
        """Whether the thread will look for more."""

    @classmethod
    def of(cls, trainer: Trainer) -> CheckpointWriter:
        """Return the trainer's writer, which is made at the first call: all ranks must come to that alike."""
        if trainer not in cls._of:
            cls._of[trainer] = cls(trainer)
        return cls._of[trainer]

    @classmethod
    def finish_of(cls, trainer: Trainer) -> None:
        """Call :meth:`finish` of the trainer's writer, if there is one."""
        if trainer in cls._of:
            cls._of[trainer].finish()

    @classmethod
    def close_of(cls, trainer: Trainer) -> None:
        """Call :meth:`finish` at the end of a fit, and give the writer's memory back."""
        try:
            cls.finish_of(trainer)
        finally:
            if (writer := cls._of.pop(trainer, None)) is not None:
                writer._memory.close()

    @classmethod
    def poll_of(cls, trainer: Trainer, moment: int) -> None:
        """Call :meth:`poll` of the trainer's writer, if there is one."""
        if trainer in cls._of:
            cls._of[trainer].poll(moment)

    def make_way(self, moment: int) -> None:
        """Wait for a write under way, unless it is of the same moment, whose copy the next one can share.

        Raises:
            BaseException: what the write ended with, unless the disk refused.
        """
        if self._moment != moment:
            self.finish()

    def reserve(self, trainer: Trainer) -> bool:
        """Begin to make room in main memory for a copy of the run, ahead of the first checkpoint.

        Returns:
            Whether it is begun; not before the optimizers have a state.
        """
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        if not states:
            return False
        # In one file, rank 0 writes for all, and whole tensors are in main memory already.
        sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        if _writer_of(trainer, self._ranks) is not None and (sharded or self._ranks.rank == 0):
            self._memory.reserve(plain_tensors([trainer.strategy.lightning_module_state_dict(), states]))
        return True

    def poll(self, moment: int) -> None:
        """Tell of a write that has ended in an error, without waiting for one that is under way.

        Does nothing on several ranks: all of them must know of it at the same time. Nor does it where the write was of
        this very moment, whose copy the next one can share however soon the first had ended.
        """
        ended = self._thread is not None and not self._thread.is_alive()
        if self._ranks.world_size == 1 and ended and self._moment != moment:
            self.finish()

    def finish(self) -> None:
        """Wait for the write under way, if any, and tell of its failure. All ranks must call it alike.

        Raises:
            BaseException: what the write ended with, unless the disk refused.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._copy is not None:
            self._copy.release()
            self._copy = None
        self._moment = None
        failures, self._failures = self._failures, []
        for save, error in failures:
            save.failed(error)
        for _, error in failures:
            if not isinstance(error, OSError):
                raise error

    def save(self, trainer: Trainer, save: Save, *, moment: int, behind: bool) -> bool:
        """Save the run as it is now. All ranks must call it, after :meth:`make_way` or :meth:`finish`.

        Args:
            trainer: the trainer of the run.
            save: the checkpoint.
            moment: number that is the same as long as weights and optimizers are.
            behind: whether the training goes on while it is written. Where that cannot be, for a strategy of somebody
                else's or too little main memory, it waits all the same.

        Returns:
            Whether the checkpoint is there, or under way.

        Raises:
            BaseException: what a write that is waited for ended with, unless the disk refused.
        """
        # All ranks: what is in shards is gathered, and random states are exchanged.
        content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        write = _writer_of(trainer, self._ranks)
        if behind and write is not None and (copied := self._copied(trainer, content)) is not None:
            self._start((save, partial(self._write, save, copied[0], write)), moment)
            return True
        # What shares the moment comes first.
        self.finish()
        try:
            self._write(save, content, write or trainer.strategy.save_checkpoint)
        except BaseException as error:
            save.failed(error)
            if not isinstance(error, OSError):
                raise
            return False
        return True

    def _copied(self, trainer: Trainer, content: dict[str, Any]) -> tuple[dict[str, Any]] | None:
        """Return a copy of a checkpoint, in a tuple of its own; None, on all ranks, where there is no memory for it."""
        copied: dict[str, Any] | None = {}
        # In one file, rank 0 writes for all.
        if self._ranks.rank == 0 or isinstance(trainer.strategy, ModelParallelStrategy):
            self._copy = self._copy or HostCopy(self._memory)
            try:
                copied = self._copy.of(content)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                copied = None
        # By the default group: the thread may be using its own.
        if all(Ranks.of(trainer).gather(copied is not None)):
            return None if copied is None else (copied,)
        free_what_is_unused("cpu")
        if self._ranks.rank == 0:
            log.warning("There is no memory for a copy of the run: the training waits while a checkpoint is written.")
        return None

    def _start(self, job: tuple[Save, Callable[[], None]], moment: int) -> None:
        self._moment = moment
        with self._lock:
            self._waiting.append(job)
            if self._working:
                return
            self._working = True
        if self._thread is not None:
            self._thread.join()
        # Not a daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._work, name="checkpoint")
        self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working = False
                    return
                save, write = self._waiting.pop(0)
            try:
                write()
            # Told where the run can be taken back to what it was, in finish().
            except BaseException as error:
                self._failures.append((save, error))

    def _write(self, save: Save, content: dict[str, Any], write: Callable[[dict[str, Any], Path], None]) -> None:
        # A writer takes the tensors out of what it is given, and may be called twice.
        try:
            write_content(dict(content), save.path, write, self._ranks)
        except OSError as error:
            room = self._ranks.rank == 0 and is_full(error) and save.make_room()
            if not self._ranks.gather(room)[0]:
                raise
            write_content(dict(content), save.path, write, self._ranks)
        if self._ranks.rank == 0:
            save.then()


def _writer_of(trainer: Trainer, ranks: Ranks) -> Callable[[dict[str, Any], Path], None] | None:
    """Return what writes a checkpoint beside the learner's collectives; None: the strategy itself, which waits."""
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        if not strategy._save_distributed_checkpoint:
            return None
        return lambda content, path: write_shards(content, path, rank=ranks.rank, group=ranks.group)
    # Lightning's own writes on rank 0 and exchanges nothing; of another nothing is known.
    return strategy.save_checkpoint if type(strategy).save_checkpoint is Strategy.save_checkpoint else None
