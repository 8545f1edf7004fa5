"""The process of one vLLM engine: it does what it is told over a connection, and ends when that is closed.

    python -m lit_grpo.engines.vllm_processes.worker DESCRIPTOR

Messages are tuples whose first entry says what they are. In, and what is answered:

    import                                                   what vLLM needs
    prepare seconds                        prepared          the same; longest silence while samples are drawn
    code folder                                              where code lies that came with a model
    build path options tokenizer           ready {max_model_len, vocab_size, cache_bytes}
    work [(number, request, sampling)]     done [(number, position, ids, logprobs, reason, version)], step by step;
                                           step              where none ended for so long
    cancel [number]
    sync version [folder] | None           synced            None: the weights follow as blocks
    buffer handle                                            opens the memory that the blocks lie in
    block entries                          taken             it may be written again
    end | break reason                                       after the last block
    give folder                            buffer, block ..., end      its model's own tensors, for a twin
    enough                                 end                         no more of them
    take version                           synced            takes what a twin gave, as blocks
    sleep level                            slept version, why it must not sample
    close

Instead of any answer ``failed error`` may come, and of ``work`` ``dropped error [number]``. A thread takes messages as
they come, so that whoever sends one never waits for a step, and a closed connection ends the process in the middle of
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_grpo.engines.base import EngineError, NamedWeights
from lit_grpo.engines.vllm_processes.blocks import Buffer, opened, packed, settle, used
from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lit_grpo.engines.vllm.engine import Batch, VLLMEngine

_PR_SET_PDEATHSIG = 1


class Worker:
    """Serves one connection.

    Args:
        connection: to the process that asks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._engine: VLLMEngine | None = None
        self._batches: dict[int, Batch] = {}
        self._missing: dict[int, int] = {}
        """Completions of each batch that have not been sent."""
        self._silence, self._last_sent = math.inf, 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Do what comes until the process is ended."""
        while True:
            # Everything that has come is looked at before the next step.
            while not self._batches or not self._inbox.empty():
                self._handle(*self._inbox.get())
            self._step()

    def _read(self) -> None:
        exit_code = 0
        try:
            while (message := self._connection.recv())[0] != "close":
                # Here and not in its turn: the next message may be unpickled by it before that comes.
                if message[0] == "code":
                    sys.path.append(message[1])
                else:
                    self._inbox.put(message)
        except (OSError, EOFError):
            pass
        # A message that cannot be read: whoever sent it would wait for the answer, and is shown the end of the log.
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            exit_code = 1
        # Not sys.exit, which would wait for a step; whatever this process holds is given back by its end.
        os._exit(exit_code)

    def _send(self, *message: Any) -> None:
        self._last_sent = time.monotonic()
        try:
            self._connection.send(message)
        except OSError:
            os._exit(0)

    def _handle(self, kind: str, *details: Any) -> None:
        try:
            getattr(self, f"_do_{kind}")(*details)
        # Of whatever kind: the process that asked has to know it, and this one can go on.
        except Exception as error:
            self._send("failed", _sendable(error))

    # ---------------------------------------------------------------------------------------------- sampling

    def _do_import(self) -> None:
        # Where it was done already it takes no time.
        from lit_grpo.engines.vllm.start import import_ahead

        import_ahead()

    def _do_prepare(self, silence: float) -> None:
        self._silence = silence
        # Done before anybody's turn to take memory has come.
        self._do_import()
        self._send("prepared")

    def _do_build(self, path: str, options: dict[str, Any], tokenizer: Any) -> None:
        from lit_grpo.engines.vllm.engine import VLLMEngine

        self._engine = VLLMEngine(path, policy_tokenizer=tokenizer, **options)
        # Sampling makes many short-lived objects; each collection would walk all that was made until now.
        gc.collect()
        gc.freeze()
        facts = {"max_model_len": self._engine.max_model_len, "vocab_size": self._engine.vocab_size,
                 "cache_bytes": self._engine.measured_cache_bytes}  # fmt: skip
        self._send("ready", facts)

    def _do_work(self, news: list[tuple[Any, ...]]) -> None:
        for number, request, sampling in news:
            try:
                self._batches[number] = batch = self._open.submit([request], sampling)
                self._missing[number] = len(batch.keys)
            except Exception as error:
                self._send("dropped", _sendable(error), [number])

    def _do_cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            if (batch := self._batches.pop(number, None)) is not None:
                del self._missing[number]
                self._open.cancel(batch)

    def _step(self) -> None:
        try:
            self._open.step()
        except Exception as error:
            numbers = list(self._batches)
            self._do_cancel(numbers)
            self._send("dropped", _sendable(error), numbers)
            return
        done = []
        for number, batch in list(self._batches.items()):
            while batch.finished:
                c = batch.finished.popleft()
                done.append((number, c.sample, c.token_ids, c.logprobs, c.finish_reason, c.policy_version))
                self._missing[number] -= 1
            if not self._missing[number]:
                del self._batches[number], self._missing[number]
        # From this loop, and not from a thread, which would go on where the engine hangs.
        if done:
            self._send("done", done)
        elif time.monotonic() - self._last_sent > self._silence:
            self._send("step")

    # ---------------------------------------------------------------------------------------------- weights

    def _do_sync(self, version: int, folders: list[str] | None) -> None:
        if folders is not None:
            from lit_grpo.engines.vllm_server.weights import read_weights

            self._open.sync(itertools.chain.from_iterable(read_weights(Path(folder)) for folder in folders), version)
            self._send("synced")
        else:
            self._load(self._open.sync, version)

    def _blocks(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the blocks that come, each a copy, until their end.

        Raises:
            EngineError: whoever sends them could not go on.
        """
        buffer = torch.empty(0, dtype=torch.uint8)
        while True:
            kind, *details = self._inbox.get()
            if kind == "end":
                return
            if kind == "break":
                raise EngineError(details[0])
            if kind == "buffer":
                buffer = opened(details[0])
                continue
            # A copy: vLLM holds on to weights of layers that are not complete, and to those that others are tied to. On
            # the engine's own card, which need not be the one where the buffer lies.
            held = used(buffer, details[0]).to(self._device, copy=True)
            weights = [(entry.name, entry.of(held)) for entry in details[0]]
            del held
            settle(self._device)
            self._send("taken")
            while weights:
                yield weights.pop(0)

    def _do_give(self, folder: str) -> None:
        # Its tensors lie in main memory while it sleeps.
        self._open.wake()
        given: Buffer | None = None
        for block in packed(self._open.tensors(), self._device, Path(folder)):
            settle(self._device)
            if block.buffer is not given:
                given = block.buffer
                self._send("buffer", given.handle())
            self._send("block", block.entries)
            if (kind := self._inbox.get()[0]) == "enough":
                break
            if kind != "taken":
                raise EngineError(f"a twin was to take weights, and {kind} came")
        self._send("end")

    def _do_take(self, version: int) -> None:
        self._load(self._open.adopt, version)

    def _load(self, load: Callable[[NamedWeights, int], None], version: int) -> None:
        blocks = self._blocks()
        try:
            load(blocks, version)
        finally:
            # Where it failed, what is still on its way would be taken for messages.
            with contextlib.suppress(EngineError):
                for _ in blocks:
                    pass
        self._send("synced")

    # ---------------------------------------------------------------------------------------------- memory

    def _do_sleep(self, level: int) -> None:
        self._open.sleep(level)
        self._send("slept", self._open.policy_version, self._open.unusable)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._open.on_cpu else torch.device("cuda", torch.cuda.current_device())

    @property
    def _open(self) -> VLLMEngine:
        if self._engine is None:
            raise EngineError("the engine process was not built")
        return self._engine


def _sendable(error: Exception) -> Exception:
    """Return the error as one that the other process can read, whatever it was."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, EngineError):
        return EngineError(str(error), transient=error.transient)
    traceback.print_exception(error)
    return EngineError(f"{type(error).__name__}: {error}", transient=isinstance(error, torch.OutOfMemoryError))


def main(descriptor: int) -> None:
    """Serve the connection behind a descriptor until it is closed."""
    # Ctrl-C is for the process that asks, which closes the connection in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # The parent is the supervisor, whose main thread waits for this process: should it be killed, nothing is left.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Nothing that is started here may hold it open.
    os.set_inheritable(descriptor, False)
    Worker(Connection(descriptor)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
