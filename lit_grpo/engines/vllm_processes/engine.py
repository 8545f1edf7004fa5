"""Several vLLM engines, each in a process of its own, that share one card or the cores of this machine.

What limits vLLM with small models is Python on one core: it prepares every step and reads every sampled token. On one
H100 two processes sample from 1.5B parameters twice as fast as one, and four from 0.5B (docs/rollouts.md).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import torch

from lit_grpo.engines.base import EngineContext, EngineError, NamedWeights
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.vllm.names import as_in_checkpoint
from lit_grpo.engines.vllm.requests import check_requests
from lit_grpo.engines.vllm.settings import engine_options, model_config_of
from lit_grpo.engines.vllm.start import check_in_process, checked_path
from lit_grpo.engines.vllm_processes.blocks import Buffer, packed, settle
from lit_grpo.engines.vllm_processes.process import EngineLog, EngineProcess, Gone
from lit_grpo.engines.vllm_processes.settings import environment, per_process
from lit_grpo.engines.vllm_processes.shares import Shares
from lit_grpo.engines.vllm_server.weights import make_scratch_folder, write_weights
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, Request, Sampling

log = logging.getLogger(__name__)

RESTARTS = 3
"""Deaths of engine processes in one generation or sync after which the run ends."""
_START_SECONDS = 900.0


class VLLMProcesses:
    """A rollout engine of several processes, each of which runs a :class:`lit_grpo.engines.vllm.engine.VLLMEngine`.

    What it promises is what that engine promises: every sample has its own seed, so that which process draws it, and
    beside which others, changes neither its distribution nor, as far as vLLM computes the same in batches of other
    sizes, its tokens. Samples of one prompt stay together (:mod:`lit_grpo.engines.vllm_processes.shares`).

    Unlike an engine in this process it goes on sampling while the caller does something else, and this process only
    waits for what comes.

    Weights go from process to process on the card (:mod:`lit_grpo.engines.vllm_processes.blocks`); on CPU through files
    in shared memory. A version counts once all processes have it; until then, and where one failed, nothing is sampled.

    A process that dies is started again with the same weights, and what it had not finished is asked again, with the
    same seeds: on CPU from the files, on a card from the policy while it stands still (``current_weights``), else from
    another of the processes. None outlives this process, however that ends.

    Args:
        model_path: folder of a Hugging Face model.
        processes: number of processes.
        end_token_ids: ids that end a completion.
        policy_tokenizer: to decode with where ``sampling.stop`` is set, as of ``VLLMEngine``. It is sent to the
            processes.
        policy_model: the transformers model whose weights come by ``sync``, as of ``VLLMEngine``.
        current_weights: gives the weights of the last sync once more; None: they may have changed since.
        scratch: folder for what is handed over, which is removed with the engine; None: one is made.
        weight_files: hand weights over as files, which stay for a process that is started again; None: on CPU alone.
        options: the other arguments of ``VLLMEngine``. What is a share of something (memory, ``max_num_seqs``) is that
            of all processes together, and divided among them.

    Raises:
        UserError: vLLM is not installed, the folder is missing, or vLLM refuses an option.
        EngineError: a process does not start.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        processes: int,
        end_token_ids: Sequence[int],
        policy_tokenizer: Any = None,
        policy_model: Any = None,
        current_weights: Callable[[], NamedWeights] | None = None,
        scratch: Path | None = None,
        weight_files: bool | None = None,
        **options: Any,
    ) -> None:
        check_in_process()
        self._path = checked_path(model_path)
        self._tokenizer, self._policy_model, self._current_weights = policy_tokenizer, policy_model, current_weights
        self._options = per_process({"end_token_ids": tuple(end_token_ids), **options}, processes)
        self.end_token_ids = tuple(sorted(set(end_token_ids)))
        self._version = -1
        self._unusable = "it was started without weights" if options.get("load_format") == "dummy" else None
        on_card = torch.cuda.is_available()
        # Of the thread that builds the engine: others, in which a process may have to be mended, begin with card 0.
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")
        self._weight_files = not on_card if weight_files is None else weight_files
        self._numbers = itertools.count()
        self._shares = Shares(processes, self._options["max_num_seqs"])
        self._inboxes: dict[int, deque[Completion | Exception]] = {}
        """What has come for each open generation and was not yet taken."""
        self._deaths = 0
        """Of processes, since a generation or sync last came to its end."""
        self._closed = False
        self._scratch = make_scratch_folder(None, 0) if scratch is None else scratch
        self._log = EngineLog()
        self._processes = [EngineProcess(environment(processes), self._scratch, self._log) for _ in range(processes)]
        self._holds_weights = [False] * processes
        """Which processes run and have the weights of the last sync."""
        # A run that ends with an exception closes nothing.
        self._clean_up = weakref.finalize(self, _clean_up, self._processes, self._scratch)
        self._facts: dict[str, Any] = {}
        try:
            self._start(range(processes))
        except (Gone, EngineError) as error:
            what = "a process of vLLM ended before it was ready" if isinstance(error, Gone) else str(error)
            tail = self._log.tail()
            self.close()
            raise EngineError(f"{what}. {tail}") from error
        except BaseException:
            self.close()
            raise
        self._holds_weights = [True] * processes
        self.max_model_len: int = self._facts["max_model_len"]

    @classmethod
    def from_context(cls, context: EngineContext, *, processes: int, **settings: Any) -> Self:
        """Build the engine of a run; ``settings`` are those of :class:`lit_grpo.engines.config.VLLMEngineConfig`."""
        options = engine_options(context, VLLMEngineConfig(**settings))
        policy = context.policy
        # The learner stands still while an engine samples that is not beside it, so its weights are those of the last
        # sync. Gathering shards takes all ranks.
        still = not context.beside_learner and not policy.sharded
        # A quantized weight has the shape of what it stands for elsewhere.
        weight_bytes = sum(getattr(p, "quant_state", p).shape.numel() * 4 for p in policy.model.parameters())
        scratch = make_scratch_folder(None, weight_bytes)
        try:
            # It stays: a process that is started again reads it again.
            model_config_of(context).save_pretrained(scratch / "model")
            return cls(
                scratch / "model",
                processes=processes,
                policy_tokenizer=context.tokenizer if context.wants_stop_strings else None,
                policy_model=policy.model,
                current_weights=policy.named_weights if still else None,
                scratch=scratch,
                **options,
            )
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    @property
    def policy_version(self) -> int:
        """Version of the weights in all processes; -1 before the first sync and after a failed one."""
        return self._version

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self._processes)

    # ---------------------------------------------------------------------------------------------- start

    def _start(self, which: Sequence[int]) -> None:
        """Start processes with the weights of the folder.

        Raises:
            Gone: one ended before it was ready.
            UserError: vLLM refuses its options.
            EngineError: it does not start for another reason.
        """
        started = time.monotonic()
        for i in which:
            self._processes[i].start()
            self._processes[i].send(("prepare",))
        for i in which:
            self._reply(i, "prepared", seconds=_START_SECONDS)
        build = ("build", str(self._path), self._options, self._tokenizer)
        # vLLM measures how much of the card it takes itself by how much is gone, so no two may take some at once.
        measuring = torch.cuda.is_available() and "kv_cache_memory_bytes" not in self._options
        for turn in [[i] for i in which] if measuring else [list(which)]:
            for i in turn:
                self._processes[i].send(build)
            for i in turn:
                (self._facts,) = self._reply(i, "ready", seconds=_START_SECONDS)
        log.debug("%d engine processes were ready after %.1f s", len(which), time.monotonic() - started)

    # ---------------------------------------------------------------------------------------------- sampling

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every sample as it finishes; see :class:`lit_grpo.engines.base.RolloutEngine`.

        The processes go on sampling while the caller does something else. Closing or dropping the iterator cancels what
        is left. Several generations may be open at once.

        Raises:
            UserError: at the call: a request or a setting that vLLM would refuse or quietly change.
            EngineError: the engine is closed or holds no usable weights, vLLM failed while sampling, or processes died
                again and again.
        """
        self._require_open()
        if self._unusable:
            raise EngineError(f"the engine must be given weights before it can sample: {self._unusable}")
        vocab_size = self._facts["vocab_size"]
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab_size=vocab_size)
        if sampling.stop and self._tokenizer is None:
            raise EngineError("sampling.stop needs the policy's tokenizer, and the engine was made without one")
        return self._generate(list(requests), sampling)

    def _generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        self._require_open()
        generation = next(self._numbers)
        inbox = self._inboxes[generation] = deque()
        try:
            missing = self._shares.add(generation, requests, sampling)
            while missing:
                while inbox:
                    came = inbox.popleft()
                    if isinstance(came, Exception):
                        raise came
                    missing -= 1
                    yield came
                if missing:
                    self._require_open()
                    self._go_on()
            self._deaths = 0
        finally:
            del self._inboxes[generation]
            for i, numbers in self._shares.drop(generation).items():
                # One that has died has nothing to cancel.
                with contextlib.suppress(Gone):
                    self._processes[i].send(("cancel", numbers))

    def _go_on(self) -> None:
        """Hand out what there is room for, and wait until something has come or a process has died."""
        self._mend()
        for i, news in self._shares.hand_out().items():
            try:
                self._processes[i].send(("work", [(n, share.request, share.sampling) for n, share in news]))
            except Gone:
                self._lost(i)
        if not all(self._holds_weights):
            return
        by_connection = {process.connection: i for i, process in enumerate(self._processes)}
        for connection in wait(list(by_connection)):
            i = by_connection[connection]  # type: ignore[index]
            try:
                self._take(i, self._processes[i].receive())
            except Gone:
                self._lost(i)

    def _take(self, i: int, message: tuple[Any, ...]) -> None:
        """Put what a process has sent of its own accord where it belongs."""
        kind, *details = message
        if kind == "done":
            for number, position, ids, logprobs, reason, version in details[0]:
                try:
                    share = self._shares.finish(i, number, position, len(ids))
                except KeyError as error:
                    raise EngineError(f"engine process {i} gave a sample twice") from error
                if share is None:
                    continue
                index, sample = share.request.index, share.samples[position]
                if version != self._version:
                    raise EngineError(
                        f"sample {sample} of request {index} was sampled with the weights of version {version} instead "
                        f"of {self._version}"
                    )
                self._inboxes[share.owner].append(Completion(index, sample, ids, logprobs, reason, version))  # type: ignore[index]
        elif kind == "dropped":
            error, numbers = details
            owners = {self._shares.given[i][n].owner for n in numbers if n in self._shares.given[i]}
            for owner in owners:
                self._inboxes[owner].append(error)  # type: ignore[index]
        else:
            raise EngineError(f"engine process {i} sent {kind!r}: {details}")

    def _reply(self, i: int, *kinds: str, seconds: float | None = None) -> list[Any]:
        """Wait for the answer of a process to what it was told, and return what comes with it.

        Raises:
            Gone: the process has ended.
            UserError: it refused.
            EngineError: it failed, or nothing came in time.
        """
        while True:
            try:
                message = self._processes[i].receive(seconds)
            except TimeoutError as error:
                raise EngineError(f"no answer came from a process of vLLM. {self._log.tail()}") from error
            kind, *details = message
            if kind in kinds:
                return details if len(kinds) == 1 else [kind, *details]
            if kind == "failed":
                raise details[0]
            # Of a generation that is still open, or was cancelled.
            self._take(i, message)

    # ---------------------------------------------------------------------------------------------- weights

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Load the weights of ``version`` into all processes; forget cached prefixes.

        Weights may lie on any device and in any float format; they are read one at a time.

        Raises:
            EngineError: samples of an older version are still running, the weights do not fit the model, or processes
                died again and again. After all but the first the engine refuses to sample until a sync succeeds.
        """
        self._require_open()
        if self._inboxes:
            raise EngineError(
                f"weights of version {version} came while {len(self._inboxes)} generations of version "
                f"{self._version} are running: exhaust or close them first"
            )
        self._version, self._unusable = -1, f"a sync of version {version} did not finish"
        try:
            stream = weights if self._policy_model is None else as_in_checkpoint(self._policy_model, weights)
            if self._weight_files:
                write_weights(self._weights, stream, None)
                self._load_files(range(self.processes), version)
            else:
                self._load_blocks(range(self.processes), stream, version)
            self._mend(version)
        except Exception as error:
            self._unusable = f"the sync of version {version} failed: {error}"
            if isinstance(error, EngineError | UserError):
                raise
            weights_named = f"the weights of version {version}" if version >= 0 else "the policy's weights"
            raise EngineError(f"{weights_named} cannot be loaded into vLLM: {error}") from error
        self._version, self._unusable, self._deaths = version, None, 0

    @property
    def _weights(self) -> Path:
        """Folder of the weights of the last sync, on CPU."""
        return self._scratch / "weights"

    def _load_files(self, which: Sequence[int], version: int) -> None:
        """Have processes that run load the weights from the files."""
        self._load(which, ("sync", version, str(self._weights)))

    def _load(self, which: Sequence[int], message: tuple[Any, ...]) -> None:
        """Tell processes what lets them end their loading, and note which of them have the weights."""
        for i in which:
            self._holds_weights[i] = False
        for i in self._ask(which, message, "synced"):
            self._holds_weights[i] = True

    def _load_blocks(self, which: Sequence[int], weights: NamedWeights, version: int) -> None:
        """Hand processes that run the weights, block by block.

        All of the stream is read, also where a process dies meanwhile: other ranks may be gathering it too.

        Raises:
            EngineError: the weights do not fit, or the stream broke off; the processes have then heard of its end.
        """
        there = self._tell(which, ("sync", version, None))
        opened: Buffer | None = None
        try:
            for block in packed(weights, self._device, self._scratch):
                settle(self._device)
                if block.buffer is not opened:
                    opened = block.buffer
                    there = [i for i in there if self._tell([i], ("buffer", opened.handle()))]
                there = list(self._ask(there, ("block", block.entries), "taken"))
        except BaseException as error:
            with contextlib.suppress(EngineError):
                self._load(there, ("break", f"{type(error).__name__}: {error}"))
            raise
        self._load(there, ("end",))
        if self._device.type == "cuda":
            # What the processes had opened is free from now on.
            torch.cuda.ipc_collect()

    def _tell(self, which: Sequence[int], message: tuple[Any, ...]) -> list[int]:
        """Tell processes something, and return those that are still there."""
        there = []
        for i in which:
            with self._counted(i):
                self._processes[i].send(message)
                there.append(i)
        return there

    def _ask(self, which: Sequence[int], message: tuple[Any, ...], kind: str) -> dict[int, list[Any]]:
        """Tell processes something, and return what those that are still there answer.

        Raises:
            UserError: one refused; all have answered by then, so that none of their answers is taken for another.
            EngineError: one failed, as above.
        """
        answers: dict[int, list[Any]] = {}
        refused: Exception | None = None
        for i in self._tell(which, message):
            try:
                with self._counted(i):
                    answers[i] = self._reply(i, kind)
            except (EngineError, UserError) as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return answers

    # ---------------------------------------------------------------------------------------------- failures

    @contextlib.contextmanager
    def _counted(self, i: int) -> Iterator[None]:
        """Take note if the process dies inside, and go on behind the block."""
        try:
            yield
        except Gone:
            self._lost(i)

    def _lost(self, i: int) -> None:
        """Take note that a process has died.

        Raises:
            EngineError: that has happened too often.
        """
        self._deaths += 1
        self._processes[i].stop()
        self._holds_weights[i] = False
        self._shares.take_back(i)
        if self._deaths > RESTARTS:
            self._unusable = "its processes died again and again"
            raise EngineError(
                f"processes of vLLM died {self._deaths} times in one generation or sync, and are not started again. "
                f"{self._log.tail()}"
            )
        log.warning("Process %d of vLLM died; it is started again, and what it had not finished is asked again.", i)

    def _mend(self, version: int | None = None) -> None:
        """Start processes that have died again, with the weights that the others have."""
        version = self._version if version is None else version
        while dead := [i for i, holds in enumerate(self._holds_weights) if not holds]:
            i = dead[0]
            try:
                with self._counted(i):
                    self._start([i])
                    # Without a sync the folder's own weights are in use.
                    if version != -1:
                        self._load_again(i, version)
                    self._holds_weights[i] = True
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
            weights = self._current_weights()
            model = self._policy_model
            self._load_blocks([i], weights if model is None else as_in_checkpoint(model, weights), version)
        elif twins:
            self._load_from_twin(i, twins[0], version)
        else:
            raise EngineError(
                f"all processes of vLLM died, and the weights of version {version} with them. {self._log.tail()}"
            )

    def _load_from_twin(self, i: int, twin: int, version: int) -> None:
        """Have a process take the tensors of another one's model.

        Raises:
            Gone: the process has died, or the other one has, which is noted.
        """
        self._processes[i].send(("take", version))
        message = self._of_twin(twin, ("give", str(self._scratch)))
        while message[0] != "end":
            try:
                self._processes[i].send(tuple(message))
                if message[0] == "block":
                    self._reply(i, "taken")
            except Gone:
                with contextlib.suppress(EngineError):
                    self._of_twin(twin, ("enough",))
                raise
            message = self._of_twin(twin, ("taken",) if message[0] == "block" else None)
        self._processes[i].send(("end",))
        self._reply(i, "synced")

    def _of_twin(self, twin: int, message: tuple[Any, ...] | None) -> list[Any]:
        try:
            if message is not None:
                self._processes[twin].send(message)
            return self._reply(twin, "buffer", "block", "end")
        except Gone:
            self._lost(twin)
            raise

    # ---------------------------------------------------------------------------------------------- memory

    def sleep(self, level: int = 2) -> None:
        """Give the card's memory to the learner, in all processes; no-op on CPU.

        Args:
            level: 1 keeps the weights in main memory; 2 drops them, and a sync must follow before sampling.

        Raises:
            UserError: there is no such level, or the engine was started without sleep mode.
            EngineError: samples are running.
        """
        self._require_open()
        if self._inboxes:
            raise EngineError(f"cannot sleep while {len(self._inboxes)} generations are running")
        # One that has died is not needed before the next generation or sync, which start it again.
        for version, unusable in self._ask(range(self.processes), ("sleep", level), "slept").values():
            self._version, self._unusable = version, unusable

    def close(self) -> None:
        """Break off what runs, end the processes, remove the files. Safe to call twice."""
        self._closed = True
        self._clean_up()
        self._log.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")


def _clean_up(processes: Sequence[EngineProcess], scratch: Path) -> None:
    # All are told before the first is waited for.
    for process in processes:
        with contextlib.suppress(Gone):
            process.send(("close",))
    for process in processes:
        process.stop()
    shutil.rmtree(scratch, ignore_errors=True)
