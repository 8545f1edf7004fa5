"""Plain decoding beside vLLM's own scheduler: the same batches, and the same state of every sample after every step."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lit_grpo.engines.vllm.decoding import KNOWN_SCHEDULERS, PlainDecoding, scheduler_digest
from lit_grpo.engines.vllm.steady import SteadySamples
from lit_grpo.engines.vllm.tokens import LogprobCollector, SampledTokens
from lit_grpo.types import Sampling
from tests.engines.vllm.vllm_fixtures import GAP, make_model, requests, sampled, start_engine

pytestmark = pytest.mark.vllm

SIZE = 16
"""Tokens of a block."""
END, OTHER_END = 1, 2
LONGEST = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm.v1.core.kv_cache_utils import init_none_hash

    # Random in some versions: once, for both schedulers.
    init_none_hash(_hash)
    path = tmp_path_factory.mktemp("model")
    make_model(tied=True, seed=0).save_pretrained(path)
    return path


class Twin:
    """A scheduler of vLLM's without a model: tokens are a hash of the request and of the position."""

    def __init__(self, folder: Path, ahead: bool, second_runner: bool, blocks: int, seats: int, caching: bool) -> None:
        import torch
        from vllm import EngineArgs
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(folder), max_model_len=LONGEST, max_num_seqs=seats, max_num_batched_tokens=LONGEST,
            dtype="float32", block_size=SIZE, enable_prefix_caching=caching, enable_chunked_prefill=True,
            skip_tokenizer_init=True,
        ).create_engine_config()  # fmt: skip
        # The platform may have changed them: no model runs here.
        config.cache_config.block_size, config.cache_config.num_gpu_blocks = SIZE, blocks
        config.cache_config.enable_prefix_caching = caching
        config.scheduler_config.async_scheduling = ahead
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        made: Any = (AsyncScheduler if ahead else Scheduler)(
            config, cache, StructuredOutputManager(config), block_size=SIZE, hash_block_size=SIZE
        )
        made.use_v2_model_runner = second_runner
        self.scheduler, self.ahead, self.caching = made, ahead, caching
        self.steps: deque[tuple[Any, Any]] = deque()
        self.tokens: dict[str, list[tuple[int, float]]] = {}
        client = SimpleNamespace(engine_core=SimpleNamespace(scheduler=made), get_output=None)
        self.engine = SimpleNamespace(engine_core=client, log_stats=False)

    def add(self, name: str, prompt: list[int], limit: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=limit, ignore_eos=True, stop_token_ids=[END, OTHER_END], logprobs=0)
        hasher = get_request_block_hasher(SIZE, _hash) if self.caching else None
        request = Request(name, list(prompt), params, None, arrival_time=0.0, block_hasher=hasher)
        self.tokens[name] = []
        self.scheduler.add_request(request)

    def drop(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if name in self.scheduler.requests:
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        """Return what was scheduled, in a form that can be compared."""
        requests = self.scheduler.requests
        output = self.scheduler.schedule()
        # What the model would sample: a token for each request that is read to its end.
        sampled, cached = [], output.scheduled_cached_reqs
        # By what the model is told: the records of samples may lag behind.
        told = dict(
            zip(cached.req_ids, zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True), strict=True)
        )
        for name, count in output.num_scheduled_tokens.items():
            request = requests[name]
            computed, outputs = told.get(name, (request.num_computed_tokens - count, request.num_output_tokens))
            position = computed + count
            whole = position >= request.num_prompt_tokens + outputs
            sampled.append([_token(name, position)] if whole else [])
        self.steps.append((output, self._result(output, sampled)))
        return (
            list(output.num_scheduled_tokens.items()),
            output.total_num_scheduled_tokens,
            [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
            sorted(
                zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens,
                    strict=True),
                key=lambda row: row[0],
            ),
            sorted(cached.resumed_req_ids), cached.all_token_ids, output.finished_req_ids, output.preempted_req_ids,
            getattr(output, "num_common_prefix_blocks", None),
        )  # fmt: skip

    @staticmethod
    def _result(output: Any, sampled: list[list[int]]) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        rows = np.array([[(ids or [0])[0]] for ids in sampled]).reshape(len(names), 1)
        logprobs = LogprobsLists(rows, -rows / 7.0, np.zeros(len(names)))
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled, logprobs)

    def update(self) -> list[Any]:
        """File the tokens of the oldest step, and return what vLLM says of requests that ended."""
        output, result = self.steps.popleft()
        if not output.num_scheduled_tokens:
            result.logprobs = None
        found = self.scheduler.update_from_output(output, result)
        ends = []
        for one in found[0].outputs if 0 in found else ():
            self.tokens[one.request_id] += [
                (token, float(lp)) for token, lp in zip(one.new_token_ids, one.new_logprobs.logprobs[:, 0], strict=True)
            ]
            if one.finish_reason is not None:
                ends.append((one.request_id, one.finish_reason, one.stop_reason))
        return sorted(ends)

    def state(self) -> Any:
        """Return all that the scheduler keeps."""
        made, manager = self.scheduler, self.scheduler.kv_cache_manager
        (kind,) = manager.coordinator.single_type_managers
        each = {
            name: (
                request.status, request.num_computed_tokens, request.num_output_placeholders,
                request.num_in_flight_tokens, list(request.output_token_ids), list(request.all_token_ids),
                list(request.block_hashes), request.num_preemptions, request.is_prefill_chunk,
                [block.block_id for block in kind.req_to_blocks.get(name, ())], kind.num_cached_block.get(name),
                getattr(request, "num_stale_output_tokens", 0), getattr(request, "async_tokens_to_discard", 0),
            )
            for name, request in made.requests.items()
        }  # fmt: skip
        free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
        hashed = [block.block_hash for block in manager.block_pool.blocks]
        running = [request.request_id for request in made.running]
        budgets = [
            getattr(made, name, None)
            for name in ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens", "current_step")
        ]
        return each, free, hashed, running, len(made.waiting), made.prev_step_scheduled_req_ids, budgets


def _hash(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _token(name: str, position: int) -> int:
    number = int.from_bytes(hashlib.sha256(f"{name.split('-')[0]} {position}".encode()).digest()[:4], "big")
    # One of thirty ends a sample.
    return number % 60 + 1


def counters(request: Any) -> Any:
    """Return what vLLM has counted of a request, None of none."""
    if request is None:
        return None
    return request.num_computed_tokens, request.num_output_placeholders, request.num_in_flight_tokens


class Spared:
    """Counts the tokens that took vLLM's own way in the scheduler with plain decoding."""

    def __init__(self, decoding: PlainDecoding) -> None:
        self.all = self.scheduled = self.filed = 0
        schedule, update = decoding._schedule, decoding._update

        def scheduled(*args: Any) -> Any:
            output = schedule(*args)
            self.scheduled += len(output.num_scheduled_tokens)
            return output

        def updated(output: Any, result: Any) -> Any:
            self.all += len(result.req_ids)
            self.filed += len(output.num_scheduled_tokens)
            return update(output, result)

        decoding._schedule, decoding._update = scheduled, updated


def pair(folder: Path, **options: Any) -> tuple[Twin, Twin, LogprobCollector, PlainDecoding]:
    own, ours = Twin(folder, **options), Twin(folder, **options)
    collector = LogprobCollector(ours.engine)
    decoding = PlainDecoding(ours.engine, collector.running)
    assert decoding.active, "the installed vLLM is none that was read"
    return own, ours, collector, decoding


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("second_runner", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("blocks", "seats"), [(400, 16), (28, 16), (16, 6)])
def test_every_step_is_that_of_vllm(
    folder: Path, ahead: bool, second_runner: bool, caching: bool, blocks: int, seats: int
) -> None:
    own, ours, collector, decoding = pair(
        folder, ahead=ahead, second_runner=second_runner, blocks=blocks, seats=seats, caching=caching
    )
    spared, chance, preempted = Spared(decoding), random.Random(blocks + seats), 0
    looks, steady = random.Random(seats), []
    names: list[str] = []
    pieces = {}
    for step in range(160):
        for _ in range(chance.choice([0, 0, 0, 1, 3]) if step < 120 else 0):
            # Of one group: the same prompt, and sometimes the same tokens.
            group, name = chance.randrange(6), f"{len(names)}-{step}"
            # Of those with 17 and 33 a single token is read in, where the blocks before are known.
            prompt = [3 + (group * 7 + i) % 90 for i in range((5, 14, 17, 33, 41, 50)[group])]
            # Of 90 with a long prompt the model's length is the end.
            limit = chance.choice([1, 3, 30, 40, 90])
            names.append(name)
            for twin in (own, ours):
                twin.add(name, prompt, limit)
            pieces[name] = collector.open(name)
        if names and chance.random() < 0.1:
            gone = chance.choice(names)
            dropped = [twin.scheduler.requests.get(gone) for twin in (own, ours)]
            own.drop(gone)
            ours.drop(gone)
            assert counters(dropped[0]) == counters(dropped[1])
            collector.drop(gone)
        assert ours.schedule() == own.schedule()
        if looks.random() < 0.05:
            # As where a number is found that is none: the step is vLLM's.
            for twin in (own, ours):
                twin.steps[-1][1].num_nans_in_logits = {"nobody": 1}
        # Now and then all that is under way comes in before anything else is scheduled.
        while own.steps and (not ahead or len(own.steps) == 2 or looks.random() < 0.15):
            assert ours.update() == own.update()
        steady.append(len(decoding._steady.samples) / max(1, len(ours.scheduler.running)))
        # What is looked at is counted: not in every step, so that there are samples that are not.
        if looks.random() < 0.25:
            decoding.write()
            assert ours.state() == own.state()
        preempted += sum(request.num_preemptions > 0 for request in own.scheduler.requests.values())
    decoding.write()
    assert ours.state() == own.state()
    for name in names:
        taken = list(zip(pieces[name].ids, pieces[name].logprobs, strict=True))
        # What vLLM's own way handed out comes in between, and is put among them by the collector in a run.
        assert sorted(taken + ours.tokens[name]) == sorted(own.tokens[name])
    assert (preempted > 0) == (blocks < 100), "some are taken off where the cache is small"
    if blocks == 400 and seats == 16:
        assert sum(steady) > 0.5 * len(steady)
        assert spared.filed < 0.3 * spared.all
        # With blocks that were filled left to vLLM it is 0.13 and more.
        assert spared.scheduled < (0.11 if ahead and caching else 0.2) * spared.all


class Queue:
    """A twin with more samples than places: its steps, and how many of them read samples in."""

    def __init__(self, twin: Twin, together: int = 1) -> None:
        self.twin, self.together, self.steps, self.reading, self.refused = twin, together, 0, 0, 0

    def run(self, late: list[tuple[str, list[int], int]]) -> None:
        """Step until all samples have ended; those of ``late`` come one by one."""
        made = self.twin.scheduler
        while made.requests or late:
            if late and self.steps % 3 == 0:
                self.twin.add(*late.pop())
            waiting, free = len(made.waiting), made.max_num_running_reqs - len(made.running)
            scheduled = self.twin.schedule()
            self.steps += 1
            self.reading += bool(scheduled[2])
            # Nobody waits once there is room for as many as are to come together.
            self.refused += bool(waiting and free >= min(self.together, waiting) and not scheduled[2])
            while len(self.twin.steps) > self.twin.ahead or (self.twin.steps and not made.requests):
                self.twin.update()
            assert self.steps < 5000, "some samples wait for ever"


@pytest.mark.parametrize("blocks", [400, 40])
@pytest.mark.parametrize("second_runner", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_samples_that_wait_take_places_together(folder: Path, ahead: bool, second_runner: bool, blocks: int) -> None:
    own, ours = (Twin(folder, ahead, second_runner, blocks, seats=16, caching=True) for _ in range(2))
    collector = LogprobCollector(ours.engine)
    assert PlainDecoding(ours.engine, collector.running, together=8).active
    asked = [(f"{number}-0", [3 + number // 8 % 90] * 20, 60) for number in range(120)]
    pieces = {name: collector.open(name) for name, _, _ in asked}
    for name, prompt, limit in asked[:100]:
        for twin in (own, ours):
            twin.add(name, prompt, limit)
    alone, together = Queue(own), Queue(ours, 8)
    alone.run(list(asked[100:]))
    together.run(list(asked[100:]))
    for name, _, _ in asked:
        taken = list(zip(pieces[name].ids, pieces[name].logprobs, strict=True))
        assert sorted(taken + ours.tokens[name]) == sorted(own.tokens[name]), "nobody's tokens depend on the others"
    if blocks == 400:
        assert together.reading < 0.35 * alone.reading
        assert together.refused == alone.refused == 0
        assert together.steps < 1.4 * alone.steps


def test_a_batch_that_is_nearly_full_is_filled_no_further(folder: Path) -> None:
    # While places are taken, samples end: for the last few of them each step would be one that reads samples in.
    twin = Twin(folder, True, True, 2000, seats=64, caching=True)
    collector = LogprobCollector(twin.engine)
    decoding = PlainDecoding(twin.engine, collector.running, together=16)
    for number in range(400):
        collector.open(f"{number}-0")
        twin.add(f"{number}-0", [3 + number // 8 % 90] * 20, 60)
    queue = Queue(twin, 16)
    queue.run([])
    assert decoding.active
    # Where only a full batch counts as full it is 90, and 146 where each takes a place that is free.
    assert queue.reading < 75


def test_an_engine_samples_the_same_where_samples_take_places_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reading = [], []
    for together in (1, 4):
        monkeypatch.setattr("lit_grpo.engines.vllm.engine.admitted_together", lambda config, n=together: n)
        engine = start_engine(tmp_path / str(together), make_model(tied=True, seed=0), max_num_seqs=8)
        try:
            steps: list[bool] = []
            scheduler = engine._engine.engine_core.engine_core.scheduler
            schedule = scheduler.schedule

            def counted(*args: Any, schedule: Any = schedule, steps: list[bool] = steps) -> Any:
                output = schedule(*args)
                steps.append(bool(output.scheduled_new_reqs))
                return output

            scheduler.schedule = counted
            found.append(sampled(engine, requests(12), Sampling(temperature=1.3, max_new_tokens=40)))
            reading.append(sum(steps))
        finally:
            engine.close()
    assert [c.token_ids for c in found[1]] == [c.token_ids for c in found[0]]
    for one, other in zip(*found, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=GAP)
    assert reading[1] < 0.7 * reading[0]


@pytest.mark.parametrize("state", ["PAUSED_ALL", "PAUSED_NEW"])
def test_a_pause_is_one_for_all_samples(folder: Path, state: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    own, ours, collector, decoding = pair(folder, ahead=True, second_runner=True, blocks=100, seats=8, caching=True)
    for name in ("0-0", "1-0", "2-0"):
        for twin in (own, ours):
            twin.add(name, [3, 4, 5], 40)
        collector.open(name)
    for step in range(24):
        if step in (6, 12):
            for twin in (own, ours):
                twin.scheduler.set_pause_state(PauseState[state] if step == 6 else PauseState.UNPAUSED)
        scheduled = ours.schedule()
        assert scheduled == own.schedule()
        assert (scheduled[1] == 0) == (state == "PAUSED_ALL" and 6 <= step < 12)
        if len(own.steps) == 2:
            assert ours.update() == own.update()
        if step % 5 == 0:
            decoding.write()
            assert ours.state() == own.state()


@pytest.fixture
def quiet(folder: Path) -> tuple[Twin, PlainDecoding]:
    _, ours, _, decoding = pair(folder, ahead=True, second_runner=True, blocks=60, seats=8, caching=True)
    return ours, decoding


def test_closed_it_leaves_vllm_as_it_was(quiet: tuple[Twin, PlainDecoding]) -> None:
    twin, decoding = quiet
    own = {"schedule", "update_from_output", "finish_requests"}
    assert own <= vars(twin.scheduler).keys()
    decoding.close()
    decoding.close()
    assert not own & vars(twin.scheduler).keys()
    assert not decoding.active


def test_both_schedulers_of_the_installed_version_are_known() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert scheduler_digest(Scheduler) in KNOWN_SCHEDULERS
    assert scheduler_digest(AsyncScheduler) in KNOWN_SCHEDULERS

    class Other(AsyncScheduler):
        def update_from_output(self, *args: Any) -> Any:
            return super().update_from_output(*args)

    assert scheduler_digest(Other) not in KNOWN_SCHEDULERS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_stats", True),
        ("connector", object()),
        ("num_spec_tokens", 2),
        ("num_lookahead_tokens", 1),
        ("use_pp", True),
        ("defer_block_free", True),
        ("max_num_scheduled_tokens", 10**6),
    ],
)
def test_with_anything_else_going_on_vllm_is_left_alone(folder: Path, name: str, value: Any) -> None:
    twin = Twin(folder, ahead=True, second_runner=True, blocks=60, seats=8, caching=True)
    setattr(twin.scheduler, name, value)
    assert not PlainDecoding(twin.engine, {}).active
    assert "schedule" not in vars(twin.scheduler)


def test_a_steady_sample_that_is_taken_off_from_outside_is_scheduled_no_more(folder: Path) -> None:
    _, ours, collector, decoding = pair(folder, ahead=True, second_runner=True, blocks=100, seats=8, caching=True)
    for name in ("0-0", "1-0"):
        ours.add(name, [3, 4, 5], 60)
        collector.open(name)
    for _ in range(6):
        ours.schedule()
        if len(ours.steps) == 2:
            ours.update()
    assert set(decoding._steady.samples) == {"0-0", "1-0"}
    scheduler = ours.scheduler
    scheduler.running = [request for request in scheduler.running if request.request_id != "0-0"]
    assert [name for name, _ in ours.schedule()[0]] == ["1-0"]
    assert set(decoding._steady.samples) == {"1-0"}


def record(name: str, tokens: int = 20) -> Any:
    """A request as vLLM keeps it, with as many tokens of its own."""
    params = SimpleNamespace(eos_token_id=None, stop_token_ids=[END])
    return SimpleNamespace(
        request_id=name, sampling_params=params, _output_token_ids=[5] * tokens, _all_token_ids=[4] * 8 + [5] * tokens,
        num_computed_tokens=8 + tokens, num_in_flight_tokens=1, num_output_placeholders=1, block_hashes=[b"1"],
        next_decode_eligible_step=0, is_finished=lambda: False, update_block_hashes=lambda: None,
    )  # fmt: skip


def test_what_is_kept_of_a_sample_goes_with_it() -> None:
    steady = SteadySamples(SimpleNamespace(use_v2_model_runner=True, current_step=7), ahead=True, size=SIZE)
    first, second = record("a"), record("a")
    one, other = SampledTokens([], []), SampledTokens([], [])
    steady.add(first, one, 3)
    steady.write("a")
    # Another sample under the same name.
    steady.add(second, other, 3)
    steady.samples["a"].add_id(9)
    steady.samples["a"].add_taken_id(9)
    assert (first._output_token_ids[-1], second._output_token_ids[-1]) == (5, 9)
    assert (one.ids, other.ids) == ([], [9])
    for number in range(5000):
        ended = record(f"{number}")
        steady.add(ended, SampledTokens([], []), 3)
        steady.write(f"{number}")
        ended.is_finished = lambda: True
    assert len(steady._known) < 1000, "samples that have ended are not kept"
    assert "a" in steady._known


def test_counters_are_written_as_many_steps_later_as_there_were() -> None:
    scheduler = SimpleNamespace(use_v2_model_runner=True, current_step=7)
    steady, request = SteadySamples(scheduler, ahead=True, size=SIZE), record("a")
    steady.under_way, steady.scheduled, steady.updated = 1, 11, 9
    steady.add(request, SampledTokens([], []), 4)
    steady.scheduled, steady.updated, scheduler.current_step = 14, 13, 10
    steady.begin()
    assert (request.num_computed_tokens, set(steady.samples)) == (28, {"a"})
    steady.scheduled, steady.updated, scheduler.current_step = 15, 14, 11
    steady.begin()
    assert not steady.samples
    # Four steps were scheduled, and five were filed: one of those that were under way before.
    assert (request.num_computed_tokens, request.next_decode_eligible_step) == (32, 12)
    assert (request.num_in_flight_tokens, request.num_output_placeholders) == (0, 0)
