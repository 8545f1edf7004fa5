"""What comes out of vLLM is what was asked for: ids, log-probabilities, seeds, ends, and nothing of earlier calls."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_grpo.engines.base import EngineError, RolloutEngine
from lit_grpo.errors import UserError
from lit_grpo.types import Request, Sampling
from tests.engines.vllm.vllm_fixtures import (
    EOS,
    GAP,
    MAX_MODEL_LEN,
    ON_GPU,
    PROMPTS,
    VOCABULARY,
    check_stop_strings,
    largest_gap,
    make_model,
    requests,
    sampled,
    start_engine,
    stop_tokenizer,
)

pytestmark = pytest.mark.vllm
MODEL_SEED = 0


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(tied=True, seed=MODEL_SEED)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: Any, model: Any) -> Any:
    engine = start_engine(tmp_path_factory.mktemp("model"), model, policy_tokenizer=stop_tokenizer())
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["in this process", "two processes"])
def any_engine(request: Any, tmp_path_factory: Any, model: Any) -> Any:
    if request.param == 1:
        yield request.getfixturevalue("engine")
        return
    engine = start_engine(tmp_path_factory.mktemp("model"), model, request.param, policy_tokenizer=stop_tokenizer())
    yield engine
    engine.close()


def test_starting_leaves_the_process_as_it_was(tmp_path: Any, engine: Any) -> None:
    # A second engine in the process: everything that vLLM imports once has been imported.
    def states() -> tuple[Any, ...]:
        return random.getstate(), torch.get_rng_state().tolist(), torch.set_num_threads, gc.get_freeze_count()

    random.seed(5)
    torch.manual_seed(5)
    before = states()
    second = start_engine(tmp_path, make_model(tied=True, seed=1), seed=123)
    try:
        assert states() == before
        assert isinstance(second, RolloutEngine)
        assert second.policy_version == -1
    finally:
        second.close()
        second.close()
    with pytest.raises(EngineError, match="closed"):
        second.generate(requests(1), Sampling())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_the_models_at_the_sampling_temperature(any_engine: Any, model: Any, temperature: float) -> None:
    asked = requests(4)
    completions = sampled(any_engine, asked, Sampling(temperature=temperature, max_new_tokens=32))
    assert largest_gap(model, asked, completions, temperature) < GAP
    # The bound is tight enough to tell temperatures apart.
    assert largest_gap(model, asked, completions, temperature * (1.2 if ON_GPU else 1.001)) > GAP


def test_more_prompt_tokens_than_one_step_takes(any_engine: Any, model: Any) -> None:
    """On CPU vLLM dies of a prompt that it splits over two steps if the request has a seed."""
    prompts = [tuple((i * 31 + j * (i + 3)) % 125 + 3 for j in range(170)) for i in range(60)]
    asked = requests(1, prompts=prompts)
    completions = sampled(any_engine, asked, Sampling(max_new_tokens=2))
    assert largest_gap(model, asked, completions, 1.0) < GAP


def test_sampling_follows_the_distribution(any_engine: Any, model: Any) -> None:
    # 2,000 first tokens of one prompt against the model's own probabilities, by a chi-square statistic.
    count, temperature = 2000, 1.3
    request = Request(0, PROMPTS[0], tuple(range(count)))
    drawn = [
        c.token_ids[0] for c in any_engine.generate([request], Sampling(temperature=temperature, max_new_tokens=1))
    ]
    with torch.no_grad():
        probs = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature).softmax(-1)
    observed = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY).float()
    order = probs.argsort(descending=True)
    kept = int((probs[order] * count >= 5).sum())  # the usual rule; the rest is one class
    classes = [*order[:kept].tolist()]
    expected = torch.cat([probs[classes], (1 - probs[classes].sum())[None]]) * count
    seen = torch.cat([observed[classes], (count - observed[classes].sum())[None]])
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1e-3)).sum())
    assert kept >= 8, "the distribution is too narrow for this test"
    assert statistic < kept + 5 * (2 * kept) ** 0.5  # five standard deviations of chi-square with `kept` degrees


def test_equal_seeds_give_equal_completions_and_others_differ(any_engine: Any) -> None:
    sampling = Sampling(temperature=1.3, max_new_tokens=24)
    first = sampled(any_engine, requests(6), sampling)
    assert sampled(any_engine, requests(6), sampling) == first, "the same call twice"
    other = sampled(any_engine, requests(6, first_seed=500), sampling)
    assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))
    assert len({c.token_ids for c in first}) == len(first)


def test_sampling_draws_no_global_random_numbers(any_engine: Any) -> None:
    before = torch.get_rng_state()
    sampled(any_engine, requests(2), Sampling(max_new_tokens=8))
    assert torch.equal(torch.get_rng_state(), before)


def test_large_seeds_are_accepted(any_engine: Any) -> None:
    request = Request(3, PROMPTS[0], (2**63 - 1, 2**63 - 2))
    a, b = sampled(any_engine, [request], Sampling(temperature=1.3, max_new_tokens=16))
    assert a.request == 3
    assert a.token_ids != b.token_ids


def test_an_end_token_is_kept_once_and_last(any_engine: Any) -> None:
    extra = 77
    sampling = Sampling(temperature=2.0, max_new_tokens=24, stop_token_ids=(extra,))
    completions = sampled(any_engine, requests(32), sampling)
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, "the test needs both endings"
    assert {c.token_ids[-1] for c in completions if not c.truncated} == {EOS, extra}
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs)
        assert not {EOS, extra} & set(c.token_ids[:-1])
        assert c.truncated == (c.token_ids[-1] not in (EOS, extra))
        assert len(c.token_ids) == 24 or not c.truncated


def test_an_end_token_at_the_length_limit_is_a_stop(any_engine: Any) -> None:
    sampling = Sampling(max_new_tokens=1, stop_token_ids=tuple(range(VOCABULARY)))
    completions = sampled(any_engine, requests(2), sampling)
    assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(1, "stop")}


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(engine: Any) -> None:
    check_stop_strings(engine)
    assert not engine._running_samples
    assert not engine._engine.has_unfinished_requests()


id_sequences = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=100).map(tuple)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(prompts=st.lists(id_sequences, min_size=1, max_size=6), seed=st.integers(0, 2**63 - 1))
def test_ids_go_in_and_come_out_unchanged(engine: Any, model: Any, prompts: list[tuple[int, ...]], seed: int) -> None:
    seen: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    step = engine._engine.step

    def recording_step() -> Any:
        outputs = step()
        for output in outputs:
            _, position, sample = output.request_id.split("-")
            result = output.outputs[0]
            whole = tuple(output.prompt_token_ids), tuple(result.token_ids), tuple(result.logprobs.logprobs)
            seen[int(position), int(sample)] = whole
        return outputs

    asked = [Request(i, prompt, (seed, seed ^ 1)) for i, prompt in enumerate(prompts)]
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's own scheduler and output processor are shown every step, for once, and must come to the same.
        patch.setattr(engine._collector, "_all_wanted", True)
        leave_to_vllm(engine, patch)
        patch.setattr(engine._engine, "step", recording_step)
        completions = sampled(engine, asked, Sampling(temperature=1.0, max_new_tokens=6))
    for c in completions:
        assert seen[c.request, c.sample] == (prompts[c.request], c.token_ids, c.logprobs)
        assert all(0 <= token < VOCABULARY for token in c.token_ids)
    assert sampled(engine, asked, Sampling(temperature=1.0, max_new_tokens=6)) == completions
    assert engine._decoding.active
    # vLLM could echo ids and still compute with others: the log-probabilities say that it did not.
    assert largest_gap(model, asked, completions, 1.0) < 2 * GAP


def test_an_abandoned_generation_leaves_nothing_behind(engine: Any) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=24)
    expected = sampled(engine, requests(4), sampling)
    abandoned = engine.generate(requests(16, first_seed=9), Sampling(temperature=2.0, max_new_tokens=100))
    next(abandoned)
    assert engine._engine.has_unfinished_requests()
    abandoned.close()
    assert not engine._engine.has_unfinished_requests()
    engine.generate(requests(4), sampling)  # never started
    assert not engine._running_samples
    assert not engine._collector._running
    assert sampled(engine, requests(4), sampling) == expected


def test_completions_come_as_they_finish(engine: Any) -> None:
    lengths = []
    for c in engine.generate(requests(16), Sampling(temperature=2.0, max_new_tokens=60)):
        lengths.append(len(c.token_ids))
        if len(lengths) == 1:
            assert engine._engine.has_unfinished_requests()
    assert lengths == sorted(lengths), "all start together, so short ones come first"


def test_open_generations_share_the_engine(engine: Any, model: Any) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=24)
    asked = requests(2), requests(3, first_seed=40)
    open_ones = [engine.generate(a, sampling) for a in asked]
    found: list[list[Any]] = [[next(open_ones[0])], [next(open_ones[1])]]
    for result, generation in zip(found, open_ones, strict=True):
        result.extend(generation)
    for result, a in zip(found, asked, strict=True):
        assert len({(c.request, c.sample) for c in result}) == len(result) == sum(len(r.seeds) for r in a)
        assert largest_gap(model, a, result, 1.0) < GAP


def test_samples_that_are_set_back_lose_and_repeat_nothing(engine: Any, model: Any, tmp_path: Any) -> None:
    """With too few cache blocks for all, vLLM throws some out half-way and computes them again later."""
    asked, sampling = requests(8), Sampling(temperature=1.0, max_new_tokens=60, stop_token_ids=(77,))
    expected = sampled(engine, asked, sampling)
    crowded = start_engine(tmp_path, model, num_gpu_blocks_override=48)
    set_back = []
    with pytest.MonkeyPatch.context() as patch:
        scheduler = crowded._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counting_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            set_back.append(request.request_id)
            preempt(request, *args, **kwargs)

        patch.setattr(scheduler, "_preempt_request", counting_preempt)
        found = sampled(crowded, asked, sampling)
    crowded.close()
    assert set_back, "the test needs a request that is thrown out"
    assert largest_gap(model, asked, found, 1.0) < GAP
    if not ON_GPU:  # bfloat16 in batches of other sizes may draw other tokens
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_lost_tokens_are_an_engine_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take = engine._collector._get_output
    steps = iter(range(100))

    def third_step_lost() -> Any:
        step = take()
        if next(steps) == 3:
            for tokens in engine._collector._running.values():
                del tokens.ids[-1], tokens.logprobs[-1]
        return step

    monkeypatch.setattr(engine._collector, "_get_output", third_step_lost)
    with pytest.raises(EngineError, match="'length', 7 ids and 7 log-probabilities"):
        list(engine.generate(requests(2), Sampling(max_new_tokens=8, temperature=0.0)))
    monkeypatch.undo()
    assert not engine._engine.has_unfinished_requests()
    assert not engine._collector._running


def test_a_failure_inside_vllm_is_an_engine_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._engine, "step", broken)
    with pytest.raises(EngineError, match="out of memory"):
        list(engine.generate(requests(2), Sampling(max_new_tokens=4)))
    monkeypatch.undo()
    assert not engine._engine.has_unfinished_requests()
    assert len(sampled(engine, requests(2), Sampling(max_new_tokens=4))) == 8


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ((), Sampling(max_new_tokens=8), "prompt 5 is empty"),
        (tuple([3] * 100), Sampling(max_new_tokens=100), f"max_model_len {MAX_MODEL_LEN}"),
        ((3, VOCABULARY), Sampling(max_new_tokens=8), "vocabulary of 128"),
        ((3, -1), Sampling(max_new_tokens=8), "vocabulary of 128"),
        ((3,), Sampling(max_new_tokens=0), "max_new_tokens is 0"),
        ((3,), Sampling(max_new_tokens=8, temperature=0.005), "temperature 0.005"),
        ((3,), Sampling(max_new_tokens=8, temperature=-1.0), "temperature -1"),
    ],
)
def test_bad_requests_are_refused_at_the_call(engine: Any, prompt: Any, sampling: Sampling, words: str) -> None:
    good = Request(0, PROMPTS[0], (1,))
    with pytest.raises(UserError, match=words):
        engine.generate([good, Request(5, prompt, (1,))], sampling)
    assert not engine._engine.has_unfinished_requests()


def test_the_longest_allowed_prompt_is_answered(any_engine: Any) -> None:
    prompt = tuple(3 + i % 120 for i in range(MAX_MODEL_LEN - 8))
    (c,) = sampled(any_engine, [Request(0, prompt, (1,))], Sampling(temperature=0.0, max_new_tokens=8))
    assert len(c.token_ids) == 8 or not c.truncated


def test_top_p_and_top_k_are_passed_on(any_engine: Any, model: Any) -> None:
    with torch.no_grad():
        best = model(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(3).indices.tolist()
    request = Request(0, PROMPTS[0], tuple(range(64)))
    first = {c.token_ids[0] for c in any_engine.generate([request], Sampling(2.0, max_new_tokens=1, top_k=3))}
    assert first == set(best)
    first = {c.token_ids[0] for c in any_engine.generate([request], Sampling(2.0, max_new_tokens=1, top_p=1e-6))}
    assert first == {best[0]}


class CheckedSlots:
    """Asks vLLM's own methods too, wherever the shortcut says that there is nothing to do."""

    def __init__(self, engine: Any) -> None:
        self.shortcut, self.manager = engine._slots, engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
        self.answered = self.asked = 0

    def __enter__(self) -> CheckedSlots:
        self.manager.allocate_slots, self.manager.cache_blocks = self.allocate_slots, self.cache_blocks
        return self

    def __exit__(self, *_: Any) -> None:
        self.manager.allocate_slots = self.shortcut.allocate_slots
        self.manager.cache_blocks = self.shortcut.cache_blocks

    def state(self, request: Any) -> tuple[Any, ...]:
        (kind,) = self.manager.coordinator.single_type_managers
        blocks = [block.block_id for block in kind.req_to_blocks.get(request.request_id, ())]
        pool = self.manager.block_pool
        filed = [block_id for block_id in blocks if pool.blocks[block_id].block_hash is not None]
        return blocks, filed, kind.num_cached_block.get(request.request_id), pool.get_num_free_blocks()

    def allocate_slots(self, request: Any, num_new_tokens: int, **more: Any) -> Any:
        self.asked += 1
        before = self.state(request)
        found = self.shortcut.allocate_slots(request, num_new_tokens, **more)
        if found is self.manager.empty_kv_cache_blocks and self.state(request) == before:
            self.answered += 1
            assert self.shortcut._allocate(request, num_new_tokens, **more) is found
            assert self.state(request) == before
        return found

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        self.shortcut.cache_blocks(request, num_computed_tokens)
        after = self.state(request)
        self.shortcut._cache(request, num_computed_tokens)
        assert self.state(request) == after


def leave_to_vllm(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """Have vLLM's own scheduler take every step."""
    scheduler, decoding = engine._engine.engine_core.engine_core.scheduler, engine._decoding
    patch.setattr(scheduler, "schedule", decoding._schedule)
    patch.setattr(scheduler, "update_from_output", decoding._update)


def test_slots_that_are_there_are_those_that_vllm_finds(
    engine: Any, model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_new_tokens=70)
    wanted = requests(8)
    leave_to_vllm(engine, monkeypatch)
    with CheckedSlots(engine) as roomy:
        expected = sampled(engine, wanted, sampling)
    assert roomy.answered > 0.8 * roomy.asked
    # A cache that is too small for all samples: some are taken off, and begin anew.
    small = start_engine(tmp_path, model, num_gpu_blocks_override=24, policy_tokenizer=stop_tokenizer())
    leave_to_vllm(small, monkeypatch)
    try:
        with CheckedSlots(small) as tight:
            found = sampled(small, wanted, sampling)
        assert tight.asked > roomy.asked, "nothing was taken off"
        # Those that begin anew are computed in batches of other sizes.
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert [lp for c in found for lp in c.logprobs] == pytest.approx(
            [lp for c in expected for lp in c.logprobs], abs=GAP
        )
    finally:
        monkeypatch.undo()
        small.close()
    # With both shortcuts again: the same tokens and log-probabilities to the bit, in batches of the same sizes.
    assert sampled(engine, wanted, sampling) == expected
    assert "allocate_slots" in vars(engine._engine.engine_core.engine_core.scheduler.kv_cache_manager)
