"""Adapters over a base of 4 bits: what learner, engine, checkpoint and exported folder make of it, on CPU and CUDA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.commands.export import export
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, Layout, LoraConfig, Policy, PolicyConfig, QuantizationConfig, TinyModel
from lit_grpo.policy.critic import model_settings
from lit_grpo.policy.model import quantization as q
from lit_grpo.policy.model.load import load_model, load_tokenizer
from lit_grpo.types import Request, Sampling
from tests import tiny

for package in ("bitsandbytes", "accelerate", "peft"):
    pytest.importorskip(package, reason="extra `quantized` is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WHERE: dict[str, Any] = {"accelerator": "auto", "devices": 1}
SHAPE = TinyModel(width=64, layers=2, heads=2)


def base(folder: Path, seed: int = 0) -> str:
    shape = replace(SHAPE, seed=seed)
    model = load_model(PolicyConfig(tiny=shape))
    model.save_pretrained(folder)
    load_tokenizer(PolicyConfig(tiny=shape)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return base(tmp_path_factory.mktemp("base"))


def config(folder: str, **changes: Any) -> PolicyConfig:
    usual: dict[str, Any] = {
        "path": folder,
        "lora": LoraConfig(rank=4, alpha=8.0),
        "quantization": QuantizationConfig(),
    }
    return PolicyConfig(**(usual | changes))


def trained(settings: PolicyConfig) -> Policy:
    """A policy whose adapters are far from zero."""
    policy = Policy(load_model(settings)).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def plain(settings: PolicyConfig) -> Any:
    model: Any = load_model(replace(settings, lora=None, quantization=None))
    return model.to(DEVICE)


def logprobs(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 12, (4, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=ids).logits.float().log_softmax(-1)
    return out


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.15)])
@pytest.mark.parametrize("kind", [QuantizationConfig(), QuantizationConfig("fp4", double=False)])
def test_engines_are_given_the_model_that_the_learner_computes(path: str, dtype: Any, most: float, kind: Any) -> None:
    settings = config(path, dtype=dtype, quantization=kind)
    policy, target = trained(settings), plain(settings)
    original = {name: tensor.clone() for name, tensor in target.named_parameters()}
    given = dict(policy.named_weights())
    assert given.keys() == original.keys()
    assert all(given[n].dtype == t.dtype and given[n].shape == t.shape for n, t in original.items())
    assert sum(q.is_quantized(p) for p in policy.parameters()) == 7 * SHAPE.layers
    assert torch.equal(given["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    target.load_state_dict(given, strict=False)
    gap = (logprobs(policy.model) - logprobs(target)).abs().max()
    assert float(gap) < most
    copied = policy.without_adapters()
    assert torch.equal(logprobs(copied.load_state_dict(given, strict=False) and copied), logprobs(target))
    assert not hasattr(policy.model.config, "quantization_config"), "an engine would quantize by it"


def test_four_bits_are_near_the_original_and_not_equal(path: str) -> None:
    policy, original = Policy(load_model(config(path))), plain(config(path))
    name = "model.layers.0.mlp.up_proj.weight"
    given, exact = dict(policy.named_weights())[name].cpu(), dict(original.named_parameters())[name].cpu()
    error = float((given - exact).norm() / exact.norm())
    assert 0.02 < error < 0.15
    held = dict(policy.model.named_parameters())["model.layers.0.mlp.up_proj.base_layer.weight"]
    assert held.numel() * held.element_size() == exact.numel() // 2


@pytest.mark.parametrize("layout", [Layout(), Layout(pack=False, share=False)])
def test_the_policy_passes_its_check(path: str, layout: Layout) -> None:
    trained(config(path)).verify_against_model_forward(layout)


def greedy(model: Any, *, own: bool = False, weights: Any = ()) -> list[tuple[int, ...]]:
    engine = TransformersEngine(model, end_token_ids=(), own_weights=own)
    engine.sync(iter(weights), 0)
    asked = [Request(i, (1 + i, 4, 2), (0,)) for i in range(6)]
    found = engine.generate(asked, Sampling(temperature=0.0, max_new_tokens=12))
    return [c.token_ids for c in sorted(found, key=lambda c: c.request)]


def test_an_engine_with_its_own_weights_samples_the_same(path: str) -> None:
    policy = trained(config(path))
    beside = greedy(policy.without_adapters(), own=True, weights=policy.named_weights())
    assert beside == greedy(policy.model)
    assert beside != greedy(plain(config(path)))


def test_adapters_are_trained_against_the_quantized_base_as_reference(path: str) -> None:
    recorder = tiny.Recorder()
    made = tiny.module(policy=config(path), objective=ObjectiveConfig(kl_coef=0.1))
    made.configure_model()
    assert made.policy is not None
    before = {name: p.detach().cpu().clone() for name, p in made.policy.named_parameters()}
    tiny.trainer(callbacks=[recorder], **WHERE).fit(made, datamodule=tiny.data())
    for name, p in made.policy.named_parameters():
        assert torch.equal(before[name], p.detach().cpu()) == (".lora_" not in name), name
    kl = [metrics["policy/kl_ref_k3"] for metrics in recorder.metrics]
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[2] > 1e-6
    assert all(metrics["sampler_mismatch/kl_k3"] < 1e-6 for metrics in recorder.metrics)


def test_a_cut_run_goes_on_over_the_same_base_and_is_exported_whole(path: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def part(rollouts: int, resume: Any = None, policy: Any = None, folder: str = "c") -> tuple[Any, Any]:
        made = tiny.module(
            policy=policy or config(path),
            objective=ObjectiveConfig(recipe="ppo"),
            critic=CriticConfig(warmup_rollouts=1),
        )
        saver = RolloutCheckpoint(dirpath=str(tmp_path / folder))
        trainer = tiny.trainer(callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path, **WHERE)
        trainer.fit(made, datamodule=tiny.data(rollouts=rollouts), ckpt_path=resume)
        return made, saver.last_path

    whole, _ = part(4, folder="whole")
    _, last = part(2)
    content = torch.load(last, weights_only=True)["state_dict"]
    assert not any("base_layer.weight" in key for key in content)
    assert {f"policy.{q.FINGERPRINT}", f"critic.{q.FINGERPRINT}"} <= content.keys()
    again, last = part(4, last)
    assert torch.equal(tiny.weights(again), tiny.weights(whole))

    export(last, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "quantization_config" not in model.config.to_dict()
    loaded, given = dict(model.named_parameters()), dict(whole.named_weights())
    assert loaded.keys() == given.keys()
    assert all(torch.equal(loaded[name], given[name].cpu()) for name in given)

    other = base(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="trained over other base weights"):
        part(5, last, config(other))
    with pytest.raises(UserError, match="trained over other base weights"):
        export(last, tmp_path / "out2", base=other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": None}, r"only adapters(.|\n)*add model.policy.lora"),
        ({"path": None, "tiny": SHAPE}, "tiny model is made on the spot"),
        ({"model_args": {"quantization_config": {}}}, "decided elsewhere"),
    ],
)
def test_wrong_settings_are_named(path: str, changes: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny.module(policy=config(path, **changes))


def test_shards_are_refused_before_a_model_is_loaded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.learner.models.load_model", lambda *_: pytest.fail("loaded"))
    trainer = tiny.trainer(strategy=FSDP2Strategy(), devices=1)
    with pytest.raises(UserError, match="not split into shards"):
        trainer.fit(tiny.module(policy=config(path)), datamodule=tiny.data())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_missing_packages_are_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(q, "find_spec", lambda name: None if name == "bitsandbytes" else True)
    with pytest.raises(UserError, match=r"need bitsandbytes(.|\n)*lit-grpo\[quantized\]"):
        tiny.module(policy=config(path))


def test_a_tiny_critic_beside_a_quantized_policy_is_not_quantized(path: str) -> None:
    assert model_settings(config(path), CriticConfig(tiny=SHAPE)).quantization is None
    assert model_settings(config(path), CriticConfig()).quantization == QuantizationConfig()
