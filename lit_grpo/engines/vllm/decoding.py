"""Steps in which samples only need their next token, without a walk through vLLM's scheduler for each of them."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

from lit_grpo.engines.vllm.steady import SteadySamples
from lit_grpo.engines.vllm.tokens import SampledTokens

KNOWN_SCHEDULERS = {
    "e2b8de67": "0.26.0",
    "8aa8bab8": "0.26.0",
    "35482795": "0.32.0",
    "ca0abce3": "0.32.0",
}
"""Digests of the code of vLLM that is spared, of ``Scheduler`` and ``AsyncScheduler``, and a version that has it.

See :func:`scheduler_digest`.
"""

_NEARLY = 8
"""A batch counts as full with one in so many of the places free that samples take together."""
# What :class:`PlainDecoding` has no part in: a scheduler for which one of these is otherwise is left alone.
_WITHOUT = {
    "log_stats": False,
    "connector": None,
    "ec_connector": None,
    "aux_output_connector": None,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "defer_block_free": False,
    "is_encoder_decoder": False,
    "need_mamba_block_aligned_split": False,
    "use_pp": False,
    "use_eagle": False,
    "num_spec_tokens": 0,
    "num_lookahead_tokens": 0,
    "num_sampled_tokens_per_step": 1,
    "pp_size": 1,
}


class PlainDecoding:
    """Schedules and files the next token of running samples in two short loops, and leaves all else to vLLM.

    vLLM's scheduler spends some ten microseconds on each token of each sample: a dozen conditions and calls to find
    that the sample needs one more token and no memory, and as many to append the token and find that nothing has come
    to an end. Sampling from a small model is bound by the speed of Python, and much of its time is that. Both questions
    are answered here by the numbers that vLLM's own code compares. A sample that needs memory is given its block here
    too, unless vLLM may give some in the same step. Its own methods still run in every step, for samples that begin,
    end or are read in. What it keeps for each sample is the same after every step, but for counters of samples that
    need nothing for some steps (:mod:`lit_grpo.engines.vllm.steady`): they are the same wherever vLLM reads them, and
    after :meth:`write`.

    The methods that are spared must be those that were read: they are compared by their code, and with any other
    nothing is changed. Nor is anything for models with several kinds of cache, drafts, connectors, or where vLLM
    counts statistics.

    Args:
        engine: a ``vllm.v1.engine.llm_engine.LLMEngine`` whose core is in this process.
        running: where the tokens of each sample go, by vLLM's id of the request; samples that are not in it are left to
            vLLM.
        together: places of a full batch that must be free before waiting samples take them, together; 1: each takes a
            place that is free, as vLLM would have it.
    """

    def __init__(self, engine: Any, running: Mapping[str, SampledTokens], together: int = 1) -> None:
        self._scheduler: Any = None
        self._manager: Any = None
        self._running: Mapping[str, SampledTokens] | None = None
        self._steady: Any = None
        self._together, self._was_full = together, False
        try:
            scheduler = engine.engine_core.engine_core.scheduler
            manager = scheduler.kv_cache_manager
            if not _is_plain(scheduler, manager) or scheduler_digest(type(scheduler)) not in KNOWN_SCHEDULERS:
                return
            from vllm.v1.request import RequestStatus
        except (AttributeError, ImportError, IndexError, OSError, TypeError):
            return
        self._scheduler, self._manager, self._running = scheduler, manager, running
        self._decoding = RequestStatus.RUNNING
        kind = manager.coordinator.single_type_managers[0]
        self._blocks, self._filed, self._size = kind.req_to_blocks, kind.num_cached_block, int(kind.block_size)
        self._new_blocks, self._file_blocks = kind.allocate_new_blocks, manager.block_pool.cache_full_blocks
        self._files, self._group = bool(manager.enable_caching), kind.kv_cache_group_id
        # One step is scheduled before the tokens of the last are known.
        self._ahead = type(scheduler).__name__ == "AsyncScheduler"
        self._limits = [n for n in ("max_num_running_reqs", "max_num_active_reqs") if hasattr(scheduler, n)]
        self._steady = SteadySamples(scheduler, ahead=self._ahead, size=self._size)
        # Paused, vLLM schedules nothing, or nothing new.
        self._unpaused = scheduler._pause_state
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._finish = scheduler.finish_requests
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output
        scheduler.finish_requests = self.finish_requests

    @property
    def active(self) -> bool:
        """Whether it takes part in the engine's steps."""
        return self._scheduler is not None

    def close(self) -> None:
        """Give vLLM its own methods back, and hold no reference to the engine any longer."""
        if self._scheduler is not None:
            self.write()
            del self._scheduler.schedule, self._scheduler.update_from_output, self._scheduler.finish_requests
        self._scheduler = self._manager = self._running = self._blocks = self._filed = None
        self._schedule = self._update = self._finish = self._new_blocks = self._file_blocks = self._steady = None

    def write(self) -> None:
        """Bring all that vLLM keeps of running samples up to date."""
        if self._scheduler is not None:
            self._steady.write_all()

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Have vLLM take samples off, and return what its own ``finish_requests`` returns."""
        samples = self._steady.samples
        # One name, several, or None: all that there are.
        if request_ids is not None:
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for name in list(samples) if request_ids is None else request_ids:
            if name in samples:
                self._steady.write(name)
        return self._finish(request_ids, *args, **kwargs)

    # The loops below run once for each token of each sample, so they make no call that can be spared.

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Return what vLLM's own ``schedule`` returns."""
        scheduler = self._scheduler
        held = throttle_prefills or scheduler._pause_state is not self._unpaused
        waits = self._waits(scheduler)
        running, steady = scheduler.running, self._steady
        steady.begin()
        samples = steady.samples
        own = [request for request in running if request.request_id not in samples]
        # Where some are taken off past `finish_requests`, as by a reset of prefixes that does not wait for them.
        if len(own) + len(samples) != len(running):
            steady.keep({request.request_id for request in running})
        found = None if held else self._plain(scheduler, own, len(samples))
        if found is None:
            # It looks at all of them.
            steady.write_all()
            steady.scheduled += 1
            return self._schedule(throttle_prefills)
        plain, others, growing, full = found
        count = len(plain) + len(samples)
        grown = self._grow(growing)
        self._file(full)
        # vLLM sees the other samples alone, with what the plain ones leave of the batch.
        before = {name: getattr(scheduler, name) for name in self._limits}
        budget = scheduler.max_num_scheduled_tokens
        earlier = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        scheduler.running = others
        scheduler.max_num_scheduled_tokens = budget - count
        for name, limit in before.items():
            setattr(scheduler, name, len(others) if waits else limit - count)
        others_before = len(others)
        try:
            output = self._schedule()
        finally:
            admitted = scheduler.running[others_before:]
            scheduler.running = running + admitted if admitted else running
            scheduler.max_num_scheduled_tokens = budget
            for name, limit in before.items():
                setattr(scheduler, name, limit)
        self._add(output, plain, running, grown)
        if earlier is not None:
            earlier.update(output.num_scheduled_tokens)
        self._advance(plain, scheduler)
        steady.scheduled += 1
        self._become_steady(plain)
        return output

    def _waits(self, scheduler: Any) -> bool:
        """Return whether samples that wait are to go on waiting, though there is a place for one."""
        waiting = len(scheduler.waiting)
        free = min([getattr(scheduler, name) for name in self._limits]) - len(scheduler.running)
        if not waiting or free >= min(self._together, waiting):
            self._was_full = False
        # While a batch is filled some of its samples end, so that it is never quite full.
        elif free <= self._together // _NEARLY:
            self._was_full = True
        return self._was_full

    def _plain(
        self, scheduler: Any, own: list[Any], steady: int
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]] | None:
        """Return the samples that only need one token, the others, and which of the first need a block or filled one.

        None: the step is vLLM's. It is where a sample is read in, and where vLLM may have to take one off.

        Args:
            scheduler: vLLM's.
            own: running samples that are not steady.
            steady: number of those that are.
        """
        size, blocks, filed, files = self._size, self._blocks, self._filed, self._files
        last = scheduler.max_model_len - 1
        earlier = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        plain, others, growing, full = [], [], [], []
        for request in own:
            placeholders = request.num_output_placeholders
            needed, known = request.num_computed_tokens + 1, len(request._all_token_ids)
            if request.is_prefill_chunk or known + placeholders != needed:
                return None
            name = request.request_id
            room = len(blocks[name]) * size
            if (
                needed <= room + 1
                and needed <= last
                and (not placeholders or needed + 1 - placeholders < request.num_prompt_tokens + request.max_tokens)
                and (earlier is None or name in earlier)
            ):
                plain.append(request)
                if needed > room:
                    growing.append(request)
                # Full blocks of known tokens are filed; without placeholders the last known token is the needed one.
                if files and known // size > filed.get(name, 0):
                    full.append(request)
            else:
                others.append(request)
        if not (plain or steady) or self._manager.block_pool.get_num_free_blocks() < len(others) + len(growing):
            return None
        if growing and others:
            # Blocks are given in the order of the samples, so vLLM gives all of this step.
            names = {request.request_id for request in growing}
            apart = names.union([request.request_id for request in others])
            plain = [request for request in plain if request.request_id not in names]
            full = [request for request in full if request.request_id not in names]
            others, growing = [request for request in own if request.request_id in apart], []
        if len(plain) + len(others) + steady > scheduler.max_num_scheduled_tokens:
            return None
        return plain, others, growing, full

    def _grow(self, growing: list[Any]) -> dict[str, Any]:
        """Give each sample the block that its next token needs, and return their numbers in the form of vLLM's."""
        new_blocks, grown = self._new_blocks, {}
        for request in growing:
            needed = request.num_computed_tokens + 1
            grown[request.request_id] = ([block.block_id for block in new_blocks(request.request_id, needed, needed)],)
        return grown

    def _file(self, full: list[Any]) -> None:
        """File the blocks that each sample has filled, so that other samples may begin with them."""
        file, blocks, filed, size, group = self._file_blocks, self._blocks, self._filed, self._size, self._group
        for request in full:
            name, count = request.request_id, len(request._all_token_ids) // size
            file(
                request=request,
                blocks=blocks[name],
                num_cached_blocks=filed.get(name, 0),
                num_full_blocks=count,
                block_size=size,
                kv_cache_group_id=group,
            )
            filed[name] = count

    def _add(self, output: Any, plain: list[Any], running: list[Any], grown: Mapping[str, Any]) -> None:
        """Put the plain samples into what vLLM scheduled, in the order of the running ones."""
        scheduled, samples, steps = output.num_scheduled_tokens, self._steady.samples, self._steady.scheduled
        # Samples are rows of the batch in this order, so it is kept.
        counts = dict.fromkeys([request.request_id for request in running], 1)
        names = [request.request_id for request in plain]
        if len(names) + len(samples) < len(running):
            for name in counts.keys() - scheduled.keys() - samples.keys() - set(names):
                del counts[name]
        counts.update(scheduled)
        output.num_scheduled_tokens = counts
        output.total_num_scheduled_tokens += len(plain) + len(samples)
        cached = output.scheduled_cached_reqs
        cached.req_ids.extend(samples)
        cached.new_block_ids.extend([None] * len(samples))
        cached.num_computed_tokens.extend([one.computed + steps for one in samples.values()])
        cached.num_output_tokens.extend([one.outputs + steps for one in samples.values()])
        cached.req_ids.extend(names)
        cached.new_block_ids.extend(map(grown.get, names))
        cached.num_computed_tokens.extend([request.num_computed_tokens for request in plain])
        cached.num_output_tokens.extend(
            [len(request._output_token_ids) + request.num_output_placeholders for request in plain]
        )
        # Empty where the version does not ask for it.
        if getattr(output, "num_common_prefix_blocks", None):
            common = self._manager.get_num_common_prefix_blocks
            output.num_common_prefix_blocks = common(running[0].request_id)

    def _advance(self, plain: list[Any], scheduler: Any) -> None:
        """Count the scheduled token of each plain sample, as ``_update_after_schedule`` does."""
        if not self._ahead:
            for request in plain:
                request.num_computed_tokens += 1
                request.num_in_flight_tokens += 1
            return
        following = scheduler.current_step + 1
        staggered = scheduler.use_v2_model_runner
        for request in plain:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
            if staggered:
                request.next_decode_eligible_step = following

    def _become_steady(self, plain: list[Any]) -> None:
        """Find out for how many steps each plain sample will need nothing, now that its step is scheduled."""
        steady, running, files = self._steady, self._running or {}, self._files
        size, blocks, filed, under_way = self._size, self._blocks, self._filed, self._steady.under_way
        last = self._scheduler.max_model_len - 1
        for request in plain:
            name, computed = request.request_id, request.num_computed_tokens
            tokens = running.get(name)
            # It must be part of every step that is under way, and vLLM must have nothing else to look for.
            if (
                tokens is None
                or request.num_in_flight_tokens != under_way + 1
                or request.num_preemptions
                or not request._output_token_ids
                or request.sampling_params.repetition_detection is not None
            ):
                continue
            # The tokens that the cache holds with the step after so many others: `computed + 1 + steps`.
            steps = min(
                len(blocks[name]) * size - computed,
                request.num_prompt_tokens + request.max_tokens - computed - 2,
                last - computed - 1,
            )
            # Those of them that are known then fill a block.
            if files:
                steps = min(steps, (filed.get(name, 0) + 1) * size + under_way - computed - 1)
            if steps > 0:
                steady.add(request, tokens, steps)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Give each running sample its token, and return what vLLM's own method returns for those that end."""
        sampled, logprobs, steady = model_runner_output.sampled_token_ids, model_runner_output.logprobs, self._steady
        if (
            not sampled
            or logprobs is None
            or logprobs.cu_num_generated_tokens is not None
            or model_runner_output.pooler_output
            or model_runner_output.num_nans_in_logits
            or scheduler_output.scheduled_spec_decode_tokens
        ):
            steady.write_all()
            steady.updated += 1
            return self._update(scheduler_output, model_runner_output)
        # Where the tokens of several steps come with none scheduled in between, blocks fill up earlier.
        if steady.scheduled - steady.updated != steady.under_way + 1:
            steady.write_all()
        requests, decoding = self._scheduler.requests, self._decoding
        running = self._running or {}
        size, filed, files, ahead = self._size, self._filed, self._files, self._ahead
        longest = self._scheduler.max_model_len
        rows = model_runner_output.req_id_to_index
        values = logprobs.logprobs[:, 0].tolist()
        samples, own = steady.samples, []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            one = samples.get(name)
            if one is None:
                own.append((name, count))
                continue
            new = sampled[row := rows[name]]
            if len(new) != 1 or (token := new[0]) in one.ends:
                steady.write(name)
                own.append((name, count))
                continue
            one.add_id(token)
            one.add_to_all(token)
            one.add_taken_id(token)
            one.add_taken_logprob(values[row])
        steady.updated += 1
        left: dict[str, int] = {}
        for name, count in own:
            request, tokens = requests.get(name), running.get(name)
            # One that was taken off may still get tokens from before; vLLM knows which.
            if (
                request is None
                or tokens is None
                or count != 1
                or request.status is not decoding
                or request.num_preemptions
                or not request._output_token_ids
                or len(new := sampled[row := rows[name]]) != 1
            ):
                left[name] = count
                continue
            token, params = new[0], request.sampling_params
            ids, every = request._output_token_ids, request._all_token_ids
            if (
                token == params.eos_token_id
                or token in params.stop_token_ids
                or len(ids) + 1 >= request.max_tokens
                or len(every) + 1 >= longest
                or params.repetition_detection is not None
            ):
                left[name] = count
                continue
            request.num_in_flight_tokens -= 1
            ids.append(token)
            every.append(token)
            if len(every) % size == 0:
                request.update_block_hashes()
            if ahead:
                request.num_output_placeholders -= 1
                if files:
                    known = request.num_computed_tokens - request.num_output_placeholders
                    if known // size > filed.get(name, 0):
                        self._manager.cache_blocks(request, known)
            tokens.ids.append(token)
            tokens.logprobs.append(values[row])
        if len(left) < len(scheduler_output.num_scheduled_tokens):
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = left
        return self._update(scheduler_output, model_runner_output)


def scheduler_digest(scheduler: type[Any]) -> str:
    """Return eight hexadecimal digits of the code that :class:`PlainDecoding` spares, or counts on.

    Raises:
        OSError: the code is not there.
    """
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import output, utils
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
    from vllm.v1.request import Request

    methods = (
        "schedule",
        "_make_cached_request_data",
        "_update_after_schedule",
        "_preempt_request",
        "update_from_output",
        "_update_request_with_output",
    )
    parts: list[Any] = [vars(base)[name] for base in scheduler.__mro__ for name in methods if name in vars(base)]
    parts += [KVCacheManager.allocate_slots, KVCacheManager.cache_blocks, utils.check_stop]
    parts += [FullAttentionManager.allocate_new_blocks, FullAttentionManager.get_num_skipped_tokens]
    parts += [FullAttentionManager.cache_blocks, SingleTypeKVCacheManager.cache_blocks, BlockPool.cache_full_blocks]
    parts += [KVCacheCoordinator.cache_blocks]
    parts += [Request.append_output_token_ids, Request.update_block_hashes]
    parts += [output.CachedRequestData, output.SchedulerOutput]
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:8]


def _is_plain(scheduler: Any, manager: Any) -> bool:
    """Return whether samples need one token a step, in one kind of cache, and nobody else looks on."""
    config, kinds = scheduler.scheduler_config, manager.coordinator.single_type_managers
    return (
        type(scheduler).__name__ in ("Scheduler", "AsyncScheduler")
        and all(getattr(scheduler, name, value) == value for name, value in _WITHOUT.items())
        and [type(kind).__name__ for kind in kinds] == ["FullAttentionManager"]
        and manager.block_pool.hash_block_size == kinds[0].block_size
        and manager.watermark_blocks == 0
        # Otherwise the last tokens are not filed.
        and not getattr(manager.coordinator, "num_reprefillable_tokens", 0)
        and config.long_prefill_token_threshold == 0
        and scheduler.max_num_scheduled_tokens <= config.max_num_batched_tokens
    )
