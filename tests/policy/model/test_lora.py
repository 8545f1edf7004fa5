"""Adapters: what is trained, what engines and exports see, and that a run with them can be cut and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_grpo import LitGRPO
from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.commands.export import export
from lit_grpo.engines import EngineConfig, EngineContext, make_engine
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import Layout, LoraConfig, OptimizerConfig, Policy, PolicyConfig
from lit_grpo.policy.model import lora as adapters
from lit_grpo.policy.model.load import load_model, load_tokenizer
from lit_grpo.types import Request, Sampling
from tests import tiny

pytest.importorskip("peft")
LORA = LoraConfig(rank=4, alpha=8.0)
CONFIG = PolicyConfig(tiny=tiny.TINY, lora=LORA)


def trained_adapters(seed: int = 0, config: PolicyConfig = CONFIG) -> Policy:
    """A policy whose adapters are far from zero."""
    policy = Policy(load_model(config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def greedy(model: Any) -> list[tuple[int, ...]]:
    engine = TransformersEngine(model, end_token_ids=())
    engine.sync(iter(()), 0)
    asked = [Request(i, (1 + i, 4, 2), (0,)) for i in range(6)]
    found = engine.generate(asked, Sampling(temperature=0.0, max_new_tokens=12))
    return [c.token_ids for c in sorted(found, key=lambda c: c.request)]


def plain_model(weights: Any) -> Any:
    """A model without adapters that holds these weights."""
    model = load_model(PolicyConfig(tiny=tiny.TINY))
    missing = model.load_state_dict(dict(weights), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    return model


def test_adapters_beside_the_weights_below_them_are_the_merged_weights() -> None:
    policy = trained_adapters()
    merged, apart = dict(policy.named_weights()), dict(policy.named_weights("apart"))
    alone = dict(policy.named_weights("adapters"))
    # Those of a model with adapters everywhere: none is forgotten, and the rest is as it was.
    assert {name for name in apart if ".lora_" in name} == alone.keys()
    assert {name for name in apart if ".lora_" not in name} == merged.keys()
    layers = {name.removesuffix(".lora_A.weight") for name in alone if name.endswith(".lora_A.weight")}
    assert len(alone) == 2 * len(layers)
    for name, weight in merged.items():
        layer = name.removesuffix(".weight")
        added = alone[f"{layer}.lora_B.weight"] @ alone[f"{layer}.lora_A.weight"] if layer in layers else 0.0
        torch.testing.assert_close(apart[name] + added, weight, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(apart[name], weight) for name, weight in merged.items())


def test_new_adapters_change_nothing_and_draw_no_global_random_numbers() -> None:
    before = torch.get_rng_state()
    policy = Policy(load_model(CONFIG))
    assert torch.equal(torch.get_rng_state(), before)
    base = load_model(PolicyConfig(tiny=tiny.TINY))
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(policy.model(ids).logits, base(ids).logits)
    again = Policy(load_model(CONFIG))
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    policy.verify_against_model_forward(Layout())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_peft_s(dtype: Any) -> None:
    import peft

    policy = trained_adapters(config=PolicyConfig(tiny=tiny.TINY, lora=LORA, dtype=dtype))
    own = {name: tensor.clone() for name, tensor in policy.named_weights()}
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0)
    theirs = peft.get_peft_model(load_model(PolicyConfig(tiny=tiny.TINY, dtype=dtype)), settings)
    values = dict(policy.model.named_parameters())
    for name, parameter in theirs.get_base_model().named_parameters():
        parameter.data.copy_(values[name])
    reference = dict(theirs.merge_and_unload().named_parameters())
    assert list(own) == list(reference)
    for name, tensor in reference.items():
        assert own[name].dtype == tensor.dtype
        torch.testing.assert_close(own[name], tensor, rtol=0.01 if dtype == "bfloat16" else 1e-6, atol=1e-6)
    assert any(not torch.equal(own[n], t) for n, t in load_model(PolicyConfig(tiny=tiny.TINY)).named_parameters())


def test_giving_weights_leaves_the_training_weights_alone() -> None:
    policy = trained_adapters()
    before = [p.clone() for p in policy.parameters()]
    given = dict(policy.named_weights())
    for tensor in given.values():
        tensor = tensor.clone().zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert not any(".lora_" in name or ".base_layer." in name for name in given)


def test_the_transformers_engine_samples_with_the_adapters() -> None:
    policy = trained_adapters()
    with_adapters = greedy(policy.model)
    assert with_adapters == greedy(plain_model(policy.named_weights()))
    assert with_adapters == greedy(adapters.without_adapters(policy.model))
    assert with_adapters != greedy(load_model(PolicyConfig(tiny=tiny.TINY)))


def test_an_engine_beside_the_learner_follows_the_adapters() -> None:
    policy = trained_adapters()
    engine = make_engine(
        EngineConfig(),
        EngineContext(
            policy=policy,
            policy_config=CONFIG,
            tokenizer=None,
            end_token_ids=(),
            max_model_len=64,
            seed=0,
            beside_learner=True,
        ),
    )
    asked = [Request(i, (1 + i, 4, 2), (0,)) for i in range(6)]
    for seed in (0, 1):
        policy.load_state_dict(trained_adapters(seed).state_dict())
        engine.sync(policy.named_weights(), seed)
        found = engine.generate(asked, Sampling(temperature=0.0, max_new_tokens=12))
        assert [c.token_ids for c in sorted(found, key=lambda c: c.request)] == greedy(policy.model)
    assert greedy(policy.model) != greedy(trained_adapters(0).model)


def lora_module(**changes: Any) -> LitGRPO:
    return tiny.module(policy=CONFIG, **changes)


def frozen_and_trained(module: LitGRPO) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    assert module.policy is not None
    named = {name: p.detach().clone() for name, p in module.policy.named_parameters()}
    return ({n: p for n, p in named.items() if ".lora_" not in n}, {n: p for n, p in named.items() if ".lora_" in n})


def test_only_adapters_are_trained_and_the_reference_is_the_base_model() -> None:
    module, recorder = lora_module(objective=ObjectiveConfig(kl_coef=0.1)), tiny.Recorder()
    module.configure_model()
    frozen, trained = frozen_and_trained(module)
    tiny.trainer(callbacks=[recorder]).fit(module, datamodule=tiny.data())
    frozen_after, trained_after = frozen_and_trained(module)
    assert all(torch.equal(frozen[name], frozen_after[name]) for name in frozen)
    assert all(not torch.equal(trained[name], trained_after[name]) for name in trained)
    (optimizer,) = module.trainer.optimizers
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert held == sum(p.numel() for p in trained.values())
    kl = [metrics["policy/kl_ref_k3"] for metrics in recorder.metrics]
    assert kl[0] == pytest.approx(0, abs=1e-7), "the policy begins as its reference"
    assert kl[2] > 1e-6, "and leaves it"


def test_adapters_learn(tmp_path: Path) -> None:
    # The tiny model's head is frozen now, and its weights are too small for any but nearly uniform answers.
    base = load_model(PolicyConfig(tiny=tiny.TINY))
    base.get_input_embeddings().weight.data.mul_(10)  # type: ignore[operator]
    base.save_pretrained(tmp_path)
    load_tokenizer(PolicyConfig(tiny=tiny.TINY)).save_pretrained(tmp_path)
    recorder = tiny.Recorder()
    policy = PolicyConfig(path=str(tmp_path), lora=LoraConfig(rank=8, alpha=16))
    module = tiny.module(policy=policy, optimizer=OptimizerConfig(lr=1e-2))
    data = tiny.data(rollouts=25, prompts_per_rollout=8, sampling=Sampling(max_new_tokens=3))
    tiny.trainer(callbacks=[recorder]).fit(module, datamodule=data)
    rewards = [metrics["reward"] for metrics in recorder.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25


def test_a_cut_run_goes_on_to_the_same_bits_and_is_exported_merged(tmp_path: Path) -> None:
    whole = lora_module()
    tiny.trainer().fit(whole, datamodule=tiny.data(rollouts=4))
    first = lora_module()
    saver = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path / "c"))
    tiny.trainer(callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path).fit(
        first, datamodule=tiny.data(rollouts=2)
    )
    assert saver.last_path is not None
    second = lora_module()
    saver2 = RolloutCheckpoint(every_n_rollouts=4, dirpath=str(tmp_path / "c"))
    tiny.trainer(callbacks=[saver2], enable_checkpointing=True, default_root_dir=tmp_path).fit(
        second, datamodule=tiny.data(rollouts=4), ckpt_path=str(saver.last_path)
    )
    assert torch.equal(tiny.weights(second), tiny.weights(whole))
    for a, b in zip(frozen_and_trained(second), frozen_and_trained(whole), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)

    from transformers import AutoModelForCausalLM

    assert saver2.last_path is not None
    done = export(saver2.last_path, tmp_path / "out")
    assert done.architecture == "Qwen2ForCausalLM"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = dict(model.named_parameters())
    given = dict(whole.named_weights())
    assert loaded.keys() == given.keys()
    assert all(torch.equal(loaded[name], given[name]) for name in given)
    assert whole.policy is not None
    assert greedy(model) == greedy(whole.policy.model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": 0.0}, "alpha is 0"),
        ({"dropout": 0.1}, r"dropout is 0.1(.|\n)*leave it at 0"),
        ({"target_modules": ["q_porj"]}, r"no adapters can be put(.|\n)*q_proj"),
        ({"target_modules": ["lm_head"]}, "lm_head cannot have an adapter"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens cannot have an adapter"),
    ],
)
def test_wrong_settings_are_named(changes: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_model(PolicyConfig(tiny=tiny.TINY, lora=LoraConfig(**changes)))


def test_without_peft_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lit-grpo\[lora\]"):
        lora_module()


def test_layers_can_be_chosen() -> None:
    policy = Policy(
        load_model(PolicyConfig(tiny=tiny.TINY, lora=LoraConfig(rank=2, target_modules=["q_proj", "v_proj"])))
    )
    layers = {name.split(".")[-4] for name, p in policy.named_parameters() if p.requires_grad}
    assert layers == {"q_proj", "v_proj"}


def test_shared_experts_and_dense_layers_of_a_mixture_have_adapters_and_its_experts_have_none() -> None:
    """By their names peft takes them for experts, which earlier versions of transformers kept as single layers."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=32, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16,
            first_k_dense_replace=1,
        )
    )  # fmt: skip
    config = model.config
    adapters.add_adapters(model, LORA)
    assert model.config is config
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.down_proj"} <= adapted
    assert not any(".experts" in name for name in adapted)


def test_layers_that_share_their_weights_have_no_adapter() -> None:
    """Each would have one of its own, and the one weight that an engine gets cannot hold both."""

    def shared() -> Any:
        model = load_model(PolicyConfig(tiny=tiny.TINY))
        first, second = (layer.mlp for layer in model.model.layers[:2])
        second.up_proj.weight = first.up_proj.weight
        return model

    model = shared()
    adapters.add_adapters(model, LORA)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert not any("up_proj" in name for name in adapted)
    assert "model.layers.0.mlp.down_proj" in adapted
    with pytest.raises(UserError, match="another layer has the same weights"):
        adapters.add_adapters(shared(), LoraConfig(rank=4, alpha=8.0, target_modules=["up_proj"]))


def test_on_a_mesh_of_one_rank_the_shard_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    def gathered(self: DTensor) -> Tensor:
        raise AssertionError("a collective of one")

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(3, 5)
        weight = layer.weight.detach().clone()
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        sharded: Any = layer.weight
        assert torch.equal(sharded.full_tensor(), weight)
        monkeypatch.setattr(DTensor, "full_tensor", gathered)
        whole = adapters.full(layer.weight)
        assert type(whole) is Tensor
        assert torch.equal(whole, weight)
        assert not whole.requires_grad
    finally:
        torch.distributed.destroy_process_group()
