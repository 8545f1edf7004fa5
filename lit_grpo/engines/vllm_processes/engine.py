"""Several vLLM engines, each in a process of its own, that share one card or the cores of this machine.

What limits vLLM with small models is Python on one core: it prepares every step and reads every sampled token. On one
H100 two processes sample from 1.5B parameters twice as fast as one, and four from 0.5B (docs/rollouts.md).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.engines.base import EngineError, NamedWeights
from lit_grpo.engines.vllm.requests import check_requests
from lit_grpo.engines.vllm.start import check_in_process, checked_path
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.engines.vllm_processes.settings import per_process
from lit_grpo.engines.vllm_processes.shares import Shares
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, Request, Sampling, WeightForm


class VLLMProcesses:
    """A rollout engine of several processes, each of which runs a :class:`lit_grpo.engines.vllm.engine.VLLMEngine`.

    What it promises is what that engine promises: every sample has its own seed, so that which process draws it, and
    beside which others, changes neither its distribution nor, as far as vLLM computes the same in batches of other
    sizes, its tokens. Samples of one prompt stay together (:mod:`lit_grpo.engines.vllm_processes.shares`).

    Unlike an engine in this process it goes on sampling while the caller does something else, and this process only
    waits for what comes.

    Weights go from process to process on the card (:mod:`lit_grpo.engines.vllm_processes.blocks`); on CPU through files
    in shared memory. A version counts once all processes have it; until then, and where one failed, nothing is sampled.

    A process that dies or hangs is started again with the same weights, and what it had not finished is asked again,
    with the same seeds: on CPU from the files, on a card from the policy while it stands still (``current_weights``),
    else from another of the processes. None outlives this process, however that ends.

    Args:
        model_path: folder of a Hugging Face model.
        processes: number of processes.
        end_token_ids: ids that end a completion.
        policy_tokenizer: to decode with where ``sampling.stop`` is set, as of ``VLLMEngine``. It is sent to the
            processes.
        policy_model: the transformers model whose weights come by ``sync``, as of ``VLLMEngine``.
        current_weights: gives the weights of the last sync once more; None: they may have changed since.
        group: processes that were begun with these options already; None: they are started here.
        weight_files: hand weights over as files, which stay for a process that is started again; None: on CPU alone.
        card: number of the card that the processes run on which are started here; None: this process's own.
        progress_seconds: a process that has something to do and neither takes a step nor answers for so long is killed
            and started again, as one that has died. No step of vLLM may take as long, the first one included.
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
        group: EngineGroup | None = None,
        weight_files: bool | None = None,
        card: int | None = None,
        progress_seconds: float = 300.0,
        **options: Any,
    ) -> None:
        check_in_process()
        path = checked_path(model_path)
        part = per_process({"end_token_ids": tuple(end_token_ids), **options}, processes)
        self._has_tokenizer = policy_tokenizer is not None
        self.end_token_ids = tuple(sorted(set(end_token_ids)))
        self._version = -1
        self._unusable = "it was started without weights" if options.get("load_format") == "dummy" else None
        self._numbers = itertools.count()
        self._shares = Shares(processes, part["max_num_seqs"])
        self._inboxes: dict[int, deque[Completion | Exception]] = {}
        """What has come for each open generation and was not yet taken."""
        self._group = group or EngineGroup(
            processes,
            (str(path), part, policy_tokenizer),
            make_scratch_folder(None, 0),
            progress_seconds=progress_seconds,
            adapted=options.get("adapter_rank") is not None,
            weight_files=weight_files,
            card=card,
        )
        self._group.connect(
            take=self._take,
            lost=self._shares.take_back,
            busy=lambda i: bool(self._shares.given[i]),
            policy_model=policy_model,
            current_weights=current_weights,
        )
        try:
            self._group.start()
        except BaseException:
            self.close()
            raise
        self.max_model_len: int = self._group.facts["max_model_len"]

    @property
    def cache_bytes(self) -> int | None:
        """Size of each process's key-value cache, where vLLM found it by measuring the card; None elsewhere."""
        found = self._group.facts.get("cache_bytes")
        return None if found is None else int(found)

    @property
    def policy_version(self) -> int:
        """Version of the weights in all processes; -1 before the first sync and after a failed one."""
        return self._version

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self._group)

    @property
    def wanted_weights(self) -> WeightForm:
        """What the next sync must bring, see :class:`lit_grpo.engines.base.AdapterEngine`."""
        return self._group.wanted_weights

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
        self._require_weights()
        vocab_size = self._group.facts["vocab_size"]
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab_size=vocab_size)
        if sampling.stop and not self._has_tokenizer:
            raise EngineError("sampling.stop needs the policy's tokenizer, and the engine was made without one")
        return self._generate(list(requests), sampling)

    def _generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        # The first of it is asked for now, which may be long after the call.
        self._require_weights()
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
            self._group.come_to_an_end()
        finally:
            del self._inboxes[generation]
            for i, numbers in self._shares.drop(generation).items():
                # One that has died has nothing to cancel; as little has a closed engine.
                with contextlib.suppress(EngineError):
                    self._group.tell([i], ("cancel", numbers))

    def _go_on(self) -> None:
        """Hand out what there is room for, and wait until something has come or a process has died."""
        self._group.mend(self._version)
        for i, news in self._shares.hand_out().items():
            self._group.tell([i], ("work", [(n, share.request, share.sampling) for n, share in news]))
        if self._group.whole:
            self._group.receive()

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
            failure, numbers = details
            owners = {self._shares.given[i][n].owner for n in numbers if n in self._shares.given[i]}
            for owner in owners:
                self._inboxes[owner].append(failure)  # type: ignore[index]
        else:
            raise EngineError(f"engine process {i} sent {kind!r}: {details}")

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
        broke_off: list[Exception] = []
        try:
            self._group.load(_watched(weights, broke_off), version)
        except Exception as error:
            self._unusable = f"the sync of version {version} failed: {error}"
            if isinstance(error, EngineError | UserError):
                raise
            weights_named = f"the weights of version {version}" if version >= 0 else "the policy's weights"
            # What vLLM does not take has come from a process, as an EngineError.
            if error in broke_off:
                raise EngineError(f"the learner could not give {weights_named}: {error}") from error
            raise EngineError(f"{weights_named} cannot be {self._group.way_of_weights}: {error}") from error
        self._version, self._unusable = version, None

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
        for version, unusable in self._group.ask(range(self.processes), ("sleep", level), "slept").values():
            self._version, self._unusable = version, unusable

    def close(self) -> None:
        """Break off what runs, end the processes, remove the files. Safe to call twice."""
        self._group.close()

    def _require_open(self) -> None:
        if self._group.closed:
            raise EngineError("the engine is closed")

    def _require_weights(self) -> None:
        self._require_open()
        unusable = "its processes died again and again" if self._group.gave_up else self._unusable
        if unusable:
            raise EngineError(f"the engine must be given weights before it can sample: {unusable}")


def _watched(weights: NamedWeights, broke_off: list[Exception]) -> NamedWeights:
    """Yield the weights; an error of their stream is noted in ``broke_off`` too."""
    try:
        yield from weights
    except Exception as error:
        broke_off.append(error)
        raise
