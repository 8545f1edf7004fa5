"""After a sync vLLM samples with the new weights, all of them, and with nothing computed from older ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm import prefixes
from lit_grpo.engines.vllm import weights as vllm_weights
from lit_grpo.engines.vllm.load_plan import LoadPlan
from lit_grpo.engines.vllm.prefixes import _known_pool
from lit_grpo.errors import UserError
from lit_grpo.types import Sampling
from tests.engines.vllm.vllm_fixtures import (
    EOS,
    GAP,
    ON_GPU,
    WRONG_WEIGHTS,
    greedy,
    largest_gap,
    make_model,
    requests,
    sampled,
    start_engine,
)

pytestmark = pytest.mark.vllm


def leave_unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class Case:
    """An engine that starts from one model, and what fresh engines of two others say.

    Args:
        tied: whether the models' heads are their embeddings.
        in_place: whether weights are loaded into the tensors that the kernels read, as on a GPU, or layer by layer, as
            on a CPU. Either can be had on the other: a CPU engine need not pack its weights.
    """

    fresh_ones: ClassVar[dict[bool, dict[int, list[tuple[int, ...]]]]] = {}

    def __init__(self, tmp: Any, tied: bool, in_place: bool, patch: pytest.MonkeyPatch) -> None:
        self.tied, self.in_place = tied, in_place
        self.models = [make_model(tied, seed) for seed in range(3)]
        if tied not in self.fresh_ones:
            self.fresh_ones[tied] = {}
            for seed in (1, 2):
                fresh = start_engine(tmp / f"fresh{seed}", self.models[seed])
                self.fresh_ones[tied][seed] = greedy(fresh)
                fresh.close()
        self.fresh = self.fresh_ones[tied]
        if in_place and not ON_GPU:
            patch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", leave_unpacked)
            patch.setattr(vllm_weights, "_on_cuda", lambda: True)
        elif ON_GPU and not in_place:
            patch.setattr(vllm_weights, "_on_cuda", lambda: False)
        self.engine = start_engine(tmp / "start", self.models[0])
        self.initial = greedy(self.engine)
        assert self.decision() == in_place

    def decision(self, **changed: Any) -> bool:
        """Whether weights would be loaded in place, if vLLM's configuration were ``changed``."""
        config = self.engine._engine.vllm_config
        names = ("model_config", "lora_config", "cache_config", "device_config")
        told = SimpleNamespace(**{name: getattr(config, name) for name in names} | changed)
        return bool(self.engine._llm.apply_model(lambda m: vllm_weights.weights_stay_as_loaded(m, told))[0])


CASES = [(tied, in_place) for tied in (True, False) for in_place in (False, True)]
NAMES = ["tied, layerwise", "tied, in place", "untied, layerwise", "untied, in place"]


@pytest.fixture(scope="module", params=CASES, ids=NAMES)
def case(request: Any, tmp_path_factory: Any) -> Iterator[Case]:
    tied, in_place = request.param
    with pytest.MonkeyPatch.context() as patch:
        case = Case(tmp_path_factory.mktemp("sync"), tied, in_place, patch)
        yield case
        case.engine.close()


def weights(model: Any, without: str = "\0") -> Iterator[tuple[str, Tensor]]:
    """As a learner gives them: each parameter once, a tied head not at all."""
    return ((name, p) for name, p in model.named_parameters() if not name.endswith(without))


def test_greedy_after_sync_equals_a_fresh_engine(case: Case) -> None:
    # Twice, and back: the second reload starts from packed weights that the first one wrote.
    for version, seed in enumerate([1, 2, 1]):
        case.engine.sync(weights(case.models[seed]), version)
        assert case.engine.policy_version == version
        assert greedy(case.engine) == case.fresh[seed]
    assert case.fresh[1] != case.fresh[2] != case.initial


def test_a_repeated_load_leaves_the_tensors_that_vllm_leaves(case: Case) -> None:
    def held() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in case.engine.tensors()}

    engine = case.engine
    engine._load_plan = LoadPlan()
    engine.sync(weights(case.models[2]), 0)
    by_vllm = held()
    assert engine._load_plan.holds() == case.in_place
    assert not engine._load_plan.useless
    # The order in which a learner gives its weights is its own.
    others: list[Any] = [list(weights(case.models[1])), list(weights(case.models[1]))[::-1]]
    for stream in others:
        engine.sync(iter(stream), 1)
        assert greedy(engine) == case.fresh[1]
    engine.sync(weights(case.models[2]), 2)
    assert engine._load_plan.holds() == case.in_place
    again = held()
    assert by_vllm.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in by_vllm.items())
    engine._load_plan.useless, engine._load_plan._held = True, []
    engine.sync(weights(case.models[1]), 2)
    assert not engine._load_plan.holds(), "what cannot be repeated is not noted again"
    engine._load_plan = LoadPlan()
    engine.sync(weights(case.models[2]), 2)
    # Another format, which the plan does not know: vLLM loads it, and that load is noted in its place.
    engine.sync(((name, p.double()) for name, p in weights(case.models[1])), 3)
    assert greedy(engine) == case.fresh[1]
    assert engine._load_plan.holds() == case.in_place


def test_logprobs_after_sync_are_the_new_models(case: Case) -> None:
    case.engine.sync(weights(case.models[2]), 7)
    asked = requests(4)
    completions = sampled(case.engine, asked, Sampling(temperature=0.7, max_new_tokens=24))
    assert {c.policy_version for c in completions} == {7}
    assert largest_gap(case.models[2], asked, completions, 0.7) < GAP
    assert largest_gap(case.models[1], asked, completions, 0.7) > WRONG_WEIGHTS


def test_state_dict_with_the_head_in_it_is_accepted(case: Case) -> None:
    state = case.models[1].state_dict()
    assert "lm_head.weight" in state
    case.engine.sync(iter(state.items()), 3)
    assert greedy(case.engine) == case.fresh[1]


def test_cached_prefixes_of_old_weights_do_not_leak(case: Case) -> None:
    case.engine.sync(weights(case.models[1]), 0)
    assert greedy(case.engine) == greedy(case.engine) == case.fresh[1]  # the prompts' blocks are cached now
    case.engine.sync(weights(case.models[2]), 1)
    asked = requests(4)
    completions = sampled(case.engine, asked, Sampling(max_new_tokens=24))
    assert largest_gap(case.models[2], asked, completions, 1.0) < GAP


def test_every_name_of_a_block_is_forgotten_and_no_block_is_lost(case: Case) -> None:
    pool = case.engine._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert _known_pool(case.engine._llm) is pool, "of the versions of vLLM that are tested the code is known"
    blocks = pool.blocks
    for temperature in (1.0, 0.0):
        sampled(case.engine, requests(4), Sampling(temperature=temperature, max_new_tokens=70))
        assert any(block.block_hash is not None for block in blocks)
        # Greedily all samples of a prompt are the same, so that several blocks have one name.
        several = [held for held in pool.cached_block_hash_to_block._cache.values() if isinstance(held, dict)]
        assert bool(several) == (temperature == 0)
        case.engine.sync(weights(case.models[1]), 0)
        assert pool.blocks is blocks
        assert len(pool.cached_block_hash_to_block) == 0
        assert all(block.block_hash is None for block in blocks)


def test_the_cache_is_emptied_by_vllm_alone_where_its_code_is_not_known(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = case.engine._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    monkeypatch.setattr(prefixes, "KNOWN_POOLS", {})
    seen, own = [], case.engine._llm.reset_prefix_cache

    def reset() -> bool:
        seen.append(len(pool.blocks))
        return bool(own())

    monkeypatch.setattr(case.engine._llm, "reset_prefix_cache", reset)
    sampled(case.engine, requests(4), Sampling(max_new_tokens=40))
    case.engine.sync(weights(case.models[1]), 0)
    assert seen[-1] == pool.num_gpu_blocks
    assert all(block.block_hash is None for block in pool.blocks)


def test_sync_insists_that_the_prefix_cache_was_emptied(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy(case.engine)
    answers = [True, False]
    monkeypatch.setattr(case.engine._llm, "reset_prefix_cache", lambda: answers.pop(0))
    case.engine.sync(weights(case.models[1]), 0)
    assert answers == [False]
    case.engine.sync(weights(case.models[1]), 1)  # nothing was sampled, so nothing is cached
    greedy(case.engine)
    assert answers == [False], "a generation after a sync finds the cache empty"
    with pytest.raises(EngineError, match="prefix cache"):
        case.engine.sync(weights(case.models[1]), 1)
    assert case.engine.policy_version == -1
    monkeypatch.undo()
    case.engine.sync(weights(case.models[1]), 2)


def test_the_engine_keeps_a_copy_not_a_view(case: Case) -> None:
    learner = make_model(case.tied, seed=1)
    case.engine.sync(weights(learner), 0)
    with torch.no_grad():
        for p in learner.parameters():
            p.zero_()
    assert greedy(case.engine) == case.fresh[1]


def test_sync_waits_for_running_samples(case: Case) -> None:
    case.engine.sync(weights(case.models[1]), 4)
    running = case.engine.generate(requests(2), Sampling(temperature=2.0, max_new_tokens=60))
    next(running)
    with pytest.raises(EngineError, match="running"):
        case.engine.sync(weights(case.models[2]), 5)
    assert case.engine.policy_version == 4
    assert {c.policy_version for c in running} == {4}
    case.engine.sync(weights(case.models[2]), 5)
    assert greedy(case.engine) == case.fresh[2]


def wrong_shape(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((n, p[:, :-1] if n.endswith("layers.1.mlp.up_proj.weight") else p) for n, p in weights(model))


def too_tall(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((n, torch.cat([p, p]) if n.endswith("layers.1.mlp.up_proj.weight") else p) for n, p in weights(model))


def too_wide(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((n, torch.cat([p, p], 1) if n.endswith("layers.1.mlp.down_proj.weight") else p) for n, p in weights(model))


def unknown_name(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from weights(model)
    yield "model.layers.9.mlp.up_proj.weight", torch.zeros(128, 64)


def broken_off(model: Any) -> Iterator[tuple[str, Tensor]]:
    for i, item in enumerate(weights(model)):
        if i == 12:
            raise RuntimeError("the gather failed")
        yield item


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (lambda m: weights(m, "layers.0.self_attn.k_proj.weight"), "lack .*layers.0.self_attn.k_proj.weight"),
        (lambda m: weights(m, "layers.1.self_attn.v_proj.bias"), "lack .*layers.1.self_attn.v_proj.bias"),
        (lambda m: weights(m, "layers.0.mlp.down_proj.weight"), "lack .*layers.0.mlp.down_proj.weight"),
        (lambda m: weights(m, "model.norm.weight"), "lack model.norm.weight"),
        (wrong_shape, ""),
        (too_tall, "layers.1.mlp.up_proj.weight.* elements"),
        (too_wide, "layers.1.mlp.down_proj.weight.* elements"),
        (unknown_name, "layers.9"),
        (broken_off, "the gather failed"),
    ],
    ids=[
        "part of a fused weight",
        "part of a fused bias",
        "layer",
        "norm",
        "shape",
        "tall",
        "wide",
        "unknown",
        "broken off",
    ],
)
def test_weights_that_do_not_fit_stop_sampling_until_a_good_sync(case: Case, stream: Any, words: str) -> None:
    case.engine.sync(weights(case.models[1]), 0)
    late = case.engine.generate(requests(1), Sampling(max_new_tokens=4))
    with pytest.raises(EngineError, match=f"version 1 cannot be loaded.*{words}"):
        case.engine.sync(stream(case.models[2]), 1)
    assert case.engine.policy_version == -1
    with pytest.raises(EngineError, match="must be given weights"):
        case.engine.generate(requests(1), Sampling())
    # Made while there were weights, and begun when there are none.
    with pytest.raises(EngineError, match="must be given weights"):
        next(late)
    case.engine.sync(weights(case.models[2]), 2)
    assert greedy(case.engine) == case.fresh[2]


def test_a_head_that_is_no_longer_tied_is_refused(case: Case) -> None:
    state = dict(case.models[1].state_dict())
    state["lm_head.weight"] = state["lm_head.weight"].roll(1, 0)
    if case.tied:
        with pytest.raises(EngineError, match="ties the two"):
            case.engine.sync(iter(state.items()), 0)
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    case.engine.sync(iter(state.items()), 1)
    assert (greedy(case.engine) == case.fresh[1]) == case.tied


def test_anything_that_might_change_weights_after_loading_rules_out_loading_in_place(case: Case) -> None:
    if not case.in_place:
        assert not case.decision()
        return
    model = case.engine._llm.apply_model(lambda m: m)[0]
    layer = model.model.layers[1]
    projection, attention = layer.mlp.down_proj, layer.self_attn.attn
    weight = projection.weight
    method, backend = type(projection.quant_method), type(attention.impl)
    other_backend = type("Own", (backend,), {"process_weights_after_loading": lambda self, act_dtype: None})
    turned = torch.nn.Parameter(weight.data.T.contiguous().T, requires_grad=False)
    turned.__class__ = type(weight)
    for owner, name, value in [
        (projection, "quant_method", object.__new__(type("Packing", (method,), {}))),
        (attention, "impl", object.__new__(other_backend)),
        (layer.input_layernorm, "process_weights_after_loading", lambda: None),
        (projection._parameters, "scale", torch.nn.Parameter(torch.ones(1))),
        (projection._parameters, "weight", torch.nn.Parameter(weight.data, requires_grad=False)),
        (projection._parameters, "weight", turned),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(owner, dict):
                patch.setitem(owner, name, value)
            else:
                patch.setattr(owner, name, value, raising=False)
            assert not case.decision(), name
        assert case.decision(), name
    quantized = SimpleNamespace(quantization="fp8")
    assert not case.decision(model_config=quantized)
    assert not case.decision(cache_config=SimpleNamespace(cache_dtype="fp8"))
    assert not case.decision(lora_config=object())
    assert not case.decision(device_config=SimpleNamespace(device_type="elsewhere"))  # offloaded weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_weights, "_on_cuda", lambda: False)
        assert not case.decision()
    assert case.decision()


def test_a_bfloat16_engine_follows_a_float32_learner(tmp_path: Any) -> None:
    engine = start_engine(tmp_path, make_model(tied=True, seed=0), dtype="bfloat16")
    try:
        learner = make_model(tied=True, seed=1)
        engine.sync(weights(learner), 0)
        asked = requests(4)
        completions = sampled(engine, asked, Sampling(temperature=1.0, max_new_tokens=16))
        assert largest_gap(learner, asked, completions, 1.0) < 0.3  # bfloat16 keeps 8 bits
        assert largest_gap(make_model(tied=True, seed=0), asked, completions, 1.0) > WRONG_WEIGHTS
    finally:
        engine.close()


def test_sleep_frees_memory_and_sync_brings_the_weights(tmp_path: Any) -> None:
    models = [make_model(tied=True, seed=seed) for seed in (1, 2)]
    # On CPU there is no sleep mode: sleeping and waking do nothing.
    options = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 2**32} if ON_GPU else {}
    engine = start_engine(tmp_path, models[0], **options)
    try:
        for level in (1, 2):
            engine.sync(weights(models[0]), 0)
            before = greedy(engine)
            free = torch.cuda.mem_get_info()[0] if ON_GPU else 0
            engine.sleep(level)
            if ON_GPU:
                assert torch.cuda.mem_get_info()[0] - free > 0.9 * 2**32
                if level == 2:
                    with pytest.raises(EngineError, match="dropped the weights"):
                        engine.generate(requests(1), Sampling(max_new_tokens=8))
                    engine.sync(weights(models[0]), 1)
            assert greedy(engine) == before
            engine.sleep(level)
            engine.sync(weights(models[1]), 2)
            asked = requests(4)
            completions = sampled(engine, asked, Sampling(max_new_tokens=24))
            assert {c.policy_version for c in completions} == {2}
            assert largest_gap(models[1], asked, completions, 1.0) < GAP
    finally:
        engine.close()


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_made_for_a_policy_waits_for_its_weights(tied: bool) -> None:
    from lit_grpo.engines import EngineConfig, EngineContext, make_engine

    model = make_model(tied, seed=1)
    engine = make_engine(
        EngineConfig(name="vllm", max_num_seqs=32, args={"kv_cache_memory_bytes": 2**26}),
        EngineContext(
            policy=cast(Any, SimpleNamespace(model=model)),
            policy_config=SimpleNamespace(dtype="float32", model_args={}),
            tokenizer=None,
            end_token_ids=(EOS,),
            max_model_len=128,
            seed=0,
        ),
    )
    try:
        with pytest.raises(EngineError, match="without weights"):
            engine.generate(requests(1), Sampling(max_new_tokens=8))
        engine.sync(weights(model), 0)
        asked = requests(4)
        completions = sampled(engine, asked, Sampling(max_new_tokens=24))
        assert largest_gap(model, asked, completions, 1.0) < GAP
        assert any(c.token_ids[-1] == EOS for c in completions)
        begun, late = (engine.generate(asked, Sampling(max_new_tokens=24)) for _ in range(2))
        next(begun)
    finally:
        engine.close()
    for one in (begun, late):
        with pytest.raises(EngineError, match="the engine is closed"):
            list(one)


def test_wrong_settings_are_named(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"no engine argument enforce_eagr(.|\n)*did you mean enforce_eager"):
        start_engine(tmp_path, make_model(True, 0), enforce_eagr=True)
    with pytest.raises(UserError, match="does not start with these settings"):
        start_engine(tmp_path, make_model(True, 0), max_model_len=100_000)
