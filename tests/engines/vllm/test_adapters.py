"""Adapters come to vLLM by themselves, beside weights that came once; what cannot be had that way is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_grpo.engines import EngineConfig, EngineContext, check_engine, make_engine
from lit_grpo.engines.base import AdapterEngine, EngineError, weights_for
from lit_grpo.errors import UserError
from lit_grpo.policy import LoraConfig, Policy, PolicyConfig, TinyModel
from lit_grpo.policy.model.load import load_model
from lit_grpo.types import Sampling
from tests.engines.vllm.vllm_fixtures import ON_GPU, largest_gap, requests, sampled

ROUNDING = 0.3 if ON_GPU else 5e-4
"""Nats. Adapters as large as these make a badly conditioned model."""
WRONG = 1.0 if ON_GPU else 0.2
PROMPTS = [tuple((5 * i + j * j) % 12 for j in range(40 + 5 * i)) for i in range(4)]
SAMPLING = Sampling(temperature=1.3, max_new_tokens=16)
LORA = LoraConfig(rank=4, alpha=10.0)


def make_policy() -> Policy:
    policy = Policy(load_model(PolicyConfig(tiny=TinyModel(width=64, heads=2, max_position=256), lora=LORA)))
    policy.model.get_input_embeddings().weight.data.mul_(10)  # far from uniform distributions
    return policy


def make(policy: Policy, **settings: Any) -> Any:
    return make_engine(
        EngineConfig(name="vllm", max_num_seqs=32, adapters="hot", args={"kv_cache_memory_bytes": 2**26}, **settings),
        EngineContext(
            policy=policy,
            policy_config=PolicyConfig(lora=LORA),
            tokenizer=None,
            end_token_ids=(),
            max_model_len=128,
            seed=0,
        ),
    )


def train(policy: Policy, seed: int) -> None:
    """Change the adapters, and nothing below them."""
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)


def gap(engine: Any, policy: Policy) -> float:
    asked = requests(4, prompts=PROMPTS)
    return largest_gap(policy.model, asked, sampled(engine, asked, SAMPLING), SAMPLING.temperature)


# -------------------------------------------------------------------------------------------------- forms of weights


def test_the_forms_of_a_policys_weights_are_the_same_model() -> None:
    pytest.importorskip("peft")
    policy = make_policy()
    train(policy, 1)
    merged, apart, alone = (dict(policy.named_weights(form)) for form in ("merged", "apart", "adapters"))
    assert list(apart)[-len(alone) :] == list(alone), "the adapters come last"
    assert {name for name in apart if name not in alone} == merged.keys()
    changed = 0
    for name, weight in merged.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in alone:
            product = alone[f"{layer}.lora_B.weight"] @ alone[f"{layer}.lora_A.weight"]
            torch.testing.assert_close(weight, apart[name] + product)
            changed += 1
        else:
            assert torch.equal(weight, apart[name])
    assert changed == 14


def test_a_policy_without_adapters_has_none_to_give() -> None:
    policy = Policy(load_model(PolicyConfig(tiny=TinyModel())))
    with pytest.raises(ValueError, match="has no adapters"):
        list(policy.named_weights("adapters"))


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "lora", "words", "remedy"),
    [
        ({}, None, "has no adapters", "model.policy.lora"),
        ({}, LoraConfig(rank=600), "rank 512 at most", "adapters: merged"),
        ({"sleep": 2}, LORA, "drops the engine's weights", "sleep: 1"),
    ],
)
def test_what_cannot_be_had_is_refused_before_a_model_is_loaded(
    settings: Any, lora: Any, words: str, remedy: str
) -> None:
    with pytest.raises(UserError, match=words) as found:
        check_engine(EngineConfig(name="vllm", adapters="hot", **settings), lora=lora)
    assert found.value.where == "data.engine.adapters"
    assert remedy in str(found.value.remedy)


@pytest.mark.vllm
def test_an_adapter_for_which_vllm_has_no_place_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    policy = make_policy()
    monkeypatch.setattr(
        "lit_grpo.engines.vllm.settings.adapted_layers", lambda context: ("model.layers.0.mlp.up_proj", "model.mixer")
    )
    with pytest.raises(UserError, match=r"no place for adapters of 1 of 2 layers.*model\.mixer") as found:
        make(policy)
    assert "adapters: merged" in str(found.value.remedy)


# vLLM makes the groups of experts for the first model of a process: no other engine may be open.
@pytest.mark.vllm
def test_a_mixture_of_experts_is_refused_at_the_start() -> None:
    pytest.importorskip("peft")
    tiny = TinyModel(width=64, heads=2, max_position=256, experts=4)
    with pytest.raises(UserError, match=r"around the experts of a mixture.*mlp\.experts") as found:
        make(Policy(load_model(PolicyConfig(tiny=tiny, lora=LORA))))
    assert "adapters: merged" in str(found.value.remedy)


# -------------------------------------------------------------------------------------------------- vLLM


@pytest.fixture(scope="module")
def policy() -> Policy:
    pytest.importorskip("peft")
    return make_policy()


@pytest.fixture(scope="module")
def engines(policy: Policy) -> Iterator[Any]:
    engine = make(policy)
    yield engine
    engine.close()


@pytest.fixture
def engine(engines: Any, policy: Policy) -> Any:
    """The engine with the policy's weights as version 0, the weights below the adapters among them."""
    if engines.policy_version != 0:
        engines.sync(weights_for(engines, policy), 0)
    return engines


def counted(weights: Any, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        names.append(name)
        yield name, tensor


@pytest.mark.vllm
def test_the_weights_below_come_once_and_the_adapters_every_time(engine: Any, policy: Policy) -> None:
    assert isinstance(engine, AdapterEngine)
    held = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    engine.sync(policy.named_weights("apart"), 1)
    assert gap(engine, policy) < ROUNDING
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.named_parameters()), "vLLM scales in place"
    for version in (2, 3):
        train(policy, version)
        assert gap(engine, policy) > WRONG, "the adapters matter, and those of the last version are still in use"
        names: list[str] = []
        assert engine.wanted_weights == "adapters"
        engine.sync(counted(weights_for(engine, policy), names), version)
        assert len(names) == 28
        assert all(".lora_" in name for name in names)
        assert gap(engine, policy) < ROUNDING
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(1.5)
    # What the check of the first sync does: the changed weights are none of a run, and are not kept.
    engine.sync(policy.named_weights("apart"), -2)
    assert gap(engine, policy) < ROUNDING
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.div_(1.5)
    assert engine.wanted_weights == "apart"
    engine.sync(weights_for(engine, policy), 4)
    assert gap(engine, policy) < ROUNDING
    assert engine.wanted_weights == "adapters"


@pytest.mark.vllm
def test_prefixes_of_another_version_are_not_taken_for_the_adapters(engine: Any, policy: Policy) -> None:
    """Even where the cache is not emptied: vLLM keys it by the adapter, and every sync has one of its own."""
    gap(engine, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_forget_prefixes", lambda: None)
        for version in (5, 6):
            train(policy, version)
            engine.sync(weights_for(engine, policy), version)
            assert gap(engine, policy) < ROUNDING


def unknown(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    yield from policy.named_weights("adapters")
    yield "model.layers.0.mlp.other.lora_A.weight", torch.ones(4, 64)
    yield "model.layers.0.mlp.other.lora_B.weight", torch.ones(64, 4)


def beside(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    yield from policy.named_weights("adapters")
    yield "model.norm.weight", torch.ones(64)


def none(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    return (item for item in policy.named_weights("apart") if ".lora_" not in item[0])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (unknown, "no place for an adapter of model.layers.0.mlp.other"),
        (beside, "model.norm.weight came beside the adapters"),
        (none, "no adapters came"),
    ],
)
def test_adapters_that_do_not_fit_stop_sampling_until_all_comes_anew(
    engine: Any, policy: Policy, stream: Any, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        engine.sync(stream(policy), 7)
    assert engine.policy_version == -1
    with pytest.raises(EngineError, match="must be given weights"):
        engine.generate(requests(1, prompts=PROMPTS), SAMPLING)
    assert engine.wanted_weights == "apart"
    with pytest.raises(EngineError, match="without the weights below"):
        engine.sync(policy.named_weights("adapters"), 8)
    engine.sync(weights_for(engine, policy), 9)
    assert gap(engine, policy) < ROUNDING
