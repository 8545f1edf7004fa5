"""The processes of an engine as one: started, told and asked together, given weights, and mended when one dies."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from lit_grpo.engines.base import EngineError, NamedWeights
from lit_grpo.engines.vllm.names import as_in_checkpoint
from lit_grpo.engines.vllm_processes.blocks import Buffer, packed, settle
from lit_grpo.engines.vllm_processes.process import EngineProcess, Gone, Hung, close_all
from lit_grpo.engines.vllm_processes.reserve import Reserve
from lit_grpo.engines.vllm_processes.settings import environment
from lit_grpo.engines.vllm_processes.weight_files import WeightFiles
from lit_grpo.engines.vllm_server.scratch import remove_scratch_folder
from lit_grpo.errors import UserError
from lit_grpo.types import WeightForm
from lit_grpo.utils.threads import DaemonThreads

log = logging.getLogger(__name__)

RESTARTS = 3
"""Deaths of engine processes in one generation or sync after which the run ends."""
_START_SECONDS = 900.0
_WAITS = 20
"""Waits after which a silent process hangs; processes speak as often."""

Message = tuple[Any, ...]
Build = tuple[str, dict[str, Any], Any]
"""What a process makes its engine of: path, options, tokenizer."""


class EngineGroup:
    """Processes that run an engine each and hold the same weights.

    Args:
        count: number of processes.
        build: what each of them makes its engine of; None: :meth:`build_ahead` tells it.
        scratch: folder for what is handed over, which is removed with the group.
        progress_seconds: a process that has something to do and is silent for so long hangs.
        adapted: the weights come in the form that :attr:`wanted_weights` names, and not with adapters merged in.
        weight_files: hand weights over as files, which stay for a process that is started again; None: on CPU alone.
        card: number of the card that the processes run on; None: this process's own.
        reserve: processes that run already, ``count`` of them with this ``scratch``; None: they are started here.
    """

    def __init__(
        self,
        count: int,
        build: Build | None,
        scratch: Path,
        *,
        progress_seconds: float,
        adapted: bool = False,
        weight_files: bool | None = None,
        card: int | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self._build, self._scratch, self._progress_seconds = build, scratch, progress_seconds
        # Nothing is sampled, and nothing lost, before `connect`.
        self._take: Callable[[int, Message], None] = lambda i, message: None
        self._note_lost: Callable[[int], None] = lambda i: None
        self._busy: Callable[[int], bool] = lambda i: False
        self._silent = [0.0] * count
        """Seconds that a busy process was waited for since something came from it."""
        self._adapted, self._holds_base = adapted, False
        self._files = WeightFiles(scratch, adapted=adapted)
        self._policy_model: Any = None
        self._current_weights: Callable[[], NamedWeights] | None = None
        on_card = torch.cuda.is_available()
        # Of the thread that builds the engine: others, in which a process may have to be mended, begin with card 0.
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")
        self._weight_files = not on_card if weight_files is None else weight_files
        if reserve is None:
            reserve = Reserve(count, environment(count, card=card), scratch, progress_seconds)
        self._log, self._processes = reserve.hand_over()
        self._ahead = DaemonThreads(1, "engine_start")
        """Starts processes beside the caller, one thing after the other."""
        self._begun: list[Future[None]] = []
        self._prepared, self._unbuilt = False, list(range(count))
        self._assumed = False
        """Whether the size of the caches is what an earlier run has measured."""
        self._holds_weights = [False] * count
        """Which processes run and have the weights that were loaded last."""
        self._deaths = 0
        """Of processes, since a generation or sync last came to its end."""
        self.gave_up = False
        """Whether they died too often, and are not started again before the next weights come."""
        self.closed = False
        self.facts: dict[str, Any] = {}
        """What the engines say of themselves."""
        # A run that ends with an exception closes nothing.
        self._clean_up = weakref.finalize(self, _clean_up, self._processes, scratch, self._ahead)

    def __len__(self) -> int:
        return len(self._processes)

    def connect(
        self,
        *,
        take: Callable[[int, Message], None],
        lost: Callable[[int], None],
        busy: Callable[[int], bool],
        policy_model: Any = None,
        current_weights: Callable[[], NamedWeights] | None = None,
    ) -> None:
        """Tell whom the processes sample for, before the first of them is asked to.

        Args:
            take: is given (process, message) where a message answers nothing.
            lost: is told of each process that has died, before it is started again.
            busy: tells whether a process has samples to draw, so that it must take steps.
            policy_model: the transformers model whose weights come, which knows their names on disk; None: they come
                under such names.
            current_weights: gives the weights that were loaded last once more; None: they may have changed since.
        """
        self._take, self._note_lost, self._busy = take, lost, busy
        self._policy_model, self._current_weights = policy_model, current_weights

    def prepare_ahead(self) -> None:
        """Begin to start the processes, up to where they take memory on a card, and return at once."""
        self._begun.append(self._ahead.submit(self._prepare, range(len(self))))

    def build_ahead(self, build: Build, cache_bytes: int | None = None) -> None:
        """Begin to build the engines as well, where a learner may take and free memory on the card meanwhile.

        vLLM finds out what room there is for keys and values by how much of the card is gone after a trial. Memory that
        the learner takes during it would be missing in every engine, and where the learner frees some vLLM gives up. So
        an engine that has to measure is not built before :meth:`start`, when the learner stands still; who knows the
        size measures nothing, and does not mind.

        Args:
            build: what they make their engines of.
            cache_bytes: the size that an earlier run has measured with the same settings on the same card.
        """
        self._build = build
        if cache_bytes is not None and self._measures:
            self.facts["cache_bytes"], self._assumed = cache_bytes, True
        # Nor is a learner disturbed that compiles for the first time and times its kernels on the card: the first run
        # with some settings is one that measures, and later ones find their kernels chosen.
        if not self._must_measure:
            self._begun.append(self._ahead.submit(self._make, self._unbuilt))

    @property
    def built_ahead(self) -> bool:
        """Whether nothing that was begun ahead is under way, and nothing is left for :meth:`start`, or that fails."""
        if not all(future.done() for future in self._begun):
            return False
        return not self._unbuilt or any(future.exception() is not None for future in self._begun)

    def start(self) -> None:
        """Start all processes, with the weights of the folder, or wait for those that were begun ahead.

        Raises:
            UserError: vLLM refuses its options.
            EngineError: one does not start for another reason.
        """
        try:
            try:
                self._go_on_from_ahead()
            except (Gone, EngineError, UserError) as error:
                if not self._assumed or self.closed:
                    raise
                log.warning("vLLM did not start with the cache of an earlier run, and measures anew: %r.", error)
                self.facts, self._assumed, self._unbuilt = {}, False, []
                for process in self._processes:
                    process.stop()
                self._start(range(len(self)))
        except (Gone, EngineError) as error:
            what = "a process of vLLM ended before it was ready" if isinstance(error, Gone) else str(error)
            raise EngineError(f"{what}. {self._log.tail()}") from error
        self._holds_weights = [True] * len(self)

    def _go_on_from_ahead(self) -> None:
        began, self._begun = self._begun, []
        for future in began:
            future.result()
        if not self._prepared:
            self._prepare(range(len(self)))
        self._make(self._unbuilt)

    @property
    def whole(self) -> bool:
        """Whether all processes run and have the same weights, as far as is known."""
        return all(self._holds_weights)

    def come_to_an_end(self) -> None:
        """Take note that a generation has come to its end: deaths are counted anew."""
        self._deaths = 0

    def receive(self) -> None:
        """Wait until something has come from a process, and pass on all that has; or note that one died or hangs."""
        by_connection: dict[Any, int] = {process.connection: i for i, process in enumerate(self._processes)}
        # In short waits, none of which counts for more: this process and theirs may have been stopped together. And a
        # caller that comes late has not waited.
        longest, start = self._progress_seconds / _WAITS, time.monotonic()
        came = {by_connection[connection] for connection in wait(list(by_connection), longest)}
        waited = min(longest, time.monotonic() - start)
        for i in range(len(self)):
            with self._counted(i):
                if i in came:
                    message = self._processes[i].receive()
                    self._silent[i] = 0.0
                    if message[0] != "step":
                        self._take(i, message)
                    continue
                self._silent[i] = self._silent[i] + waited if self._busy(i) else 0.0
                if self._silent[i] >= self._progress_seconds:
                    raise Hung

    def close(self) -> None:
        """End the processes, and remove the files. Safe to call twice."""
        self.closed = True
        self._clean_up()
        self._log.close()

    def _start(self, which: Sequence[int]) -> None:
        """Start processes with the weights of the folder.

        Raises:
            Gone: one ended before it was ready.
            UserError: vLLM refuses its options.
            EngineError: it does not start for another reason.
        """
        self._prepare(which)
        self._make(list(which))

    def _prepare(self, which: Sequence[int]) -> None:
        """Start processes, which import vLLM and take nothing on the card yet; they do so all at once.

        Raises:
            Gone: one ended.
            EngineError: one does not answer.
        """
        for i in which:
            if not self._processes[i].running:
                self._processes[i].start()
            self._processes[i].patience = self._progress_seconds
            self._processes[i].send(("prepare", self._progress_seconds / _WAITS))
            self._silent[i] = 0.0
        for i in which:
            self._reply(i, "prepared", seconds=_START_SECONDS)
        self._prepared = True

    @property
    def _measures(self) -> bool:
        """Whether vLLM finds the size of its cache by what is free on a card, unless it is told."""
        assert self._build is not None
        return torch.cuda.is_available() and self._build[1].get("kv_cache_memory_bytes") is None

    @property
    def _must_measure(self) -> bool:
        return self._measures and not self.facts.get("cache_bytes")

    def _make(self, waiting: list[int]) -> None:
        """Have processes that are prepared build their engines, and take each out of the list that is ready.

        Raises:
            Gone: one ended before it was ready.
            UserError: vLLM refuses its options.
            EngineError: it does not build for another reason.
        """
        assert self._build is not None
        path, options, tokenizer = self._build
        while waiting:
            # No two may measure the card at once, see build_ahead. What the first has found holds for the others, and
            # for later starts: they load weights and capture graphs beside each other.
            measured = self.facts.get("cache_bytes")
            turn = waiting[:1] if self._must_measure else list(waiting)
            told = {"kv_cache_memory_bytes": measured} if self._measures and measured else {}
            for i in turn:
                if (code := _code_of_models()) is not None:
                    self._processes[i].send(("code", code))
                self._processes[i].send(("build", path, options | told, tokenizer))
            for i in turn:
                (facts,) = self._reply(i, "ready", seconds=_START_SECONDS)
                # One that was told the size has measured nothing.
                self.facts = {**facts, "cache_bytes": facts["cache_bytes"] or measured}
                waiting.remove(i)

    # ---------------------------------------------------------------------------------------------- messages

    def tell(self, which: Sequence[int], message: Message) -> list[int]:
        """Tell processes something, and return those that are still there."""
        there = []
        for i in which:
            with self._counted(i):
                self._processes[i].send(message)
                there.append(i)
        return there

    def ask(self, which: Sequence[int], message: Message, kind: str) -> dict[int, list[Any]]:
        """Tell processes something, and return what those that are still there answer.

        A failure of one is raised when all that were told have answered, so that no answer is taken for another.

        Raises:
            UserError: one refused.
            EngineError: one failed, or processes have died too often.
        """
        answers: dict[int, list[Any]] = {}
        refused: Exception | None = None
        told: list[int] = []
        for i in which:
            try:
                told += self.tell([i], message)
            except EngineError as error:
                refused = refused or error
        for i in told:
            try:
                with self._counted(i):
                    answers[i] = self._reply(i, kind)
            except (EngineError, UserError) as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return answers

    def _reply(self, i: int, *kinds: str, seconds: float | None = None) -> list[Any]:
        """Wait for the answer of a process to what it was told, and return what comes with it.

        Raises:
            Gone: the process has ended.
            UserError: it refused.
            Hung: nothing came for as long as it may be silent, and no ``seconds`` were given.
            EngineError: it failed, or nothing came in time.
        """
        while True:
            try:
                message = self._processes[i].receive(self._progress_seconds if seconds is None else seconds)
            except TimeoutError as error:
                if seconds is None:
                    raise Hung from error
                raise EngineError(f"no answer came from a process of vLLM. {self._log.tail()}") from error
            kind, *details = message
            if kind in kinds:
                return details if len(kinds) == 1 else [kind, *details]
            if kind == "failed":
                raise details[0]
            if kind == "step":
                continue
            # Of a generation that is still open, or was cancelled.
            self._take(i, message)

    # ---------------------------------------------------------------------------------------------- weights

    def load(self, weights: NamedWeights, version: int) -> None:
        """Give all processes the weights of ``version``, also those that have died meanwhile.

        Raises:
            EngineError: the weights do not fit, or processes died too often.
            OSError: there is no room for the files.
        """
        self._deaths, self.gave_up = 0, False
        stream = self._named(weights)
        holds_base, self._holds_base = self._holds_base, False
        if self._weight_files:
            folders = self._files.write(stream, adapters_alone=holds_base and self._adapted)
            self._load_files(range(len(self)), version, folders)
        else:
            self._load_blocks(range(len(self)), stream, version)
        self.mend(version)
        self._deaths = 0
        # As the engines see it: below 0 is no version of a run.
        self._holds_base = version >= 0

    @property
    def wanted_weights(self) -> WeightForm:
        """What the next weights must be, see :class:`lit_grpo.engines.base.AdapterEngine`."""
        if not self._adapted:
            return "merged"
        return "adapters" if self._holds_base else "apart"

    @property
    def way_of_weights(self) -> str:
        """What is done with weights to hand them over, in words."""
        return f"written to {self._scratch}" if self._weight_files else "put where the processes of vLLM find them"

    def _named(self, weights: NamedWeights) -> NamedWeights:
        return weights if self._policy_model is None else as_in_checkpoint(self._policy_model, weights)

    def _load_files(self, which: Sequence[int], version: int, folders: Sequence[Path] | None = None) -> None:
        """Have processes that run load the weights from their files; None: all of them."""
        self._load(which, ("sync", version, [str(folder) for folder in folders or self._files.folders]))

    def _load(self, which: Sequence[int], message: Message) -> None:
        """Tell processes what lets them end their loading, and note which of them have the weights.

        Raises:
            EngineError: the weights do not fit.
        """
        for i in which:
            self._holds_weights[i] = False
        for i in self.ask(which, message, "synced"):
            self._holds_weights[i] = True

    def _load_blocks(self, which: Sequence[int], weights: NamedWeights, version: int) -> None:
        """Hand processes that run the weights, block by block.

        All of the stream is read, also where a process dies meanwhile: other ranks may be gathering it too.

        Raises:
            EngineError: the weights do not fit, or the stream broke off; the processes have then heard of its end.
        """
        there: list[int] = []
        opened: Buffer | None = None
        try:
            for i in which:
                there += self.tell([i], ("sync", version, None))
            for block in packed(weights, self._device, self._scratch):
                settle(self._device)
                if block.buffer is not opened:
                    opened = block.buffer
                    there = [i for i in there if self.tell([i], ("buffer", opened.handle()))]
                there = list(self.ask(there, ("block", block.entries), "taken"))
        except BaseException as error:
            with contextlib.suppress(EngineError):
                self._load(there, ("break", f"{type(error).__name__}: {error}"))
            raise
        self._load(there, ("end",))
        if self._device.type == "cuda":
            # What the processes had opened is free from now on.
            torch.cuda.ipc_collect()

    # ---------------------------------------------------------------------------------------------- failures

    @contextlib.contextmanager
    def _counted(self, i: int) -> Iterator[None]:
        """Take note if the process dies inside, and go on behind the block."""
        try:
            yield
        except Gone as error:
            self._lost(i, error)

    def _lost(self, i: int, gone: Gone) -> None:
        """Take note that a process has died, or hangs, and end it.

        Raises:
            EngineError: that has happened too often, or the engine was closed meanwhile.
        """
        if self.closed:
            raise EngineError("the engine is closed")
        self._deaths += 1
        hung = isinstance(gone, Hung)
        self._processes[i].stop(kill=hung)
        self._holds_weights[i] = False
        self._silent[i] = 0.0
        self._note_lost(i)
        if self._deaths > RESTARTS:
            self.gave_up = True
            raise EngineError(
                f"processes of vLLM died or hung {self._deaths} times in one generation or sync, and are not started "
                f"again. "
                f"{self._log.tail()}"
            )
        what = (
            f"has neither taken a step nor answered for {self._progress_seconds:g} s "
            "(data.engine.progress_seconds) and was killed"
            if hung
            else "died"
        )
        log.warning("Process %d of vLLM %s; it is started again, and what it had not finished is asked again.", i, what)

    def mend(self, version: int) -> None:
        """Start processes that have died again, with the weights of ``version``, which the others have.

        Raises:
            EngineError: they died too often, or nobody has these weights any longer.
        """
        while dead := [i for i, holds in enumerate(self._holds_weights) if not holds]:
            i = dead[0]
            try:
                with self._counted(i):
                    self._start([i])
                    # Without a sync the folder's own weights are in use.
                    if version != -1:
                        self._load_again(i, version)
                    self._holds_weights[i] = True
            except _TwinGone:
                # Its death is noted. This one waits for more, and is started anew.
                self._processes[i].stop()
            except (EngineError, UserError):
                # It may be waiting for more weights.
                self._processes[i].stop()
                raise

    def _load_again(self, i: int, version: int) -> None:
        """Give a process that was just started the weights of the last sync."""
        twins = [j for j, holds in enumerate(self._holds_weights) if holds]
        if self._weight_files:
            self._load_files([i], version)
        elif self._current_weights is not None:
            self._load_blocks([i], self._named(self._current_weights()), version)
        elif twins:
            self._load_from_twin(i, twins[0], version)
        else:
            raise EngineError(
                f"all processes of vLLM died, and the weights of version {version} with them. {self._log.tail()}"
            )

    def _load_from_twin(self, i: int, twin: int, version: int) -> None:
        """Have a process take the tensors of another one's model.

        Raises:
            Gone: the process has died.
            _TwinGone: the other one has, which is noted.
            EngineError: it cannot take them.
        """
        self._processes[i].send(("take", version))
        message = self._of_twin(twin, ("give", str(self._scratch)))
        while message[0] != "end":
            try:
                self._processes[i].send(tuple(message))
                if message[0] == "block":
                    self._reply(i, "taken")
            except (Gone, EngineError, UserError):
                with contextlib.suppress(EngineError, _TwinGone):
                    self._end_giving(twin)
                raise
            message = self._of_twin(twin, ("taken",) if message[0] == "block" else None)
        self._processes[i].send(("end",))
        self._reply(i, "synced")

    def _end_giving(self, twin: int) -> None:
        # It may have sent a block already that nobody has asked for.
        kind = self._of_twin(twin, ("enough",))[0]
        while kind != "end":
            kind = self._of_twin(twin, None)[0]

    def _of_twin(self, twin: int, message: Message | None) -> list[Any]:
        try:
            if message is not None:
                self._processes[twin].send(message)
            return self._reply(twin, "buffer", "block", "end")
        except Gone as error:
            self._lost(twin, error)
            raise _TwinGone from error


class _TwinGone(Exception):  # noqa: N818 - as Gone
    """The process that gave its weights to another has ended."""


def _code_of_models() -> str | None:
    """Return the folder of the code that came with models, from which their tokenizers are unpickled; None: of none."""
    # transformers puts it behind those that Python looks in. Not imported: where nothing has, there is no such code.
    loader: Any = sys.modules.get("transformers.dynamic_module_utils")
    if loader is None:
        return None
    known = f"{loader.TRANSFORMERS_DYNAMIC_MODULE_NAME}."
    return str(loader.HF_MODULES_CACHE) if any(name.startswith(known) for name in sys.modules) else None


def _clean_up(processes: Sequence[EngineProcess], scratch: Path, ahead: DaemonThreads) -> None:
    ahead.shutdown()
    close_all(processes)
    remove_scratch_folder(scratch)
