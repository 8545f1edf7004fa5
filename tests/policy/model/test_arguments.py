"""Arguments of the loaders reach every loader, nothing asks on the terminal, and adapters are taken as a model."""

from __future__ import annotations

import builtins
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from lit_grpo.engines.vllm.settings import runs_own_code
from lit_grpo.errors import UserError
from lit_grpo.policy import CriticConfig, PolicyConfig, TinyModel
from lit_grpo.policy.critic import check_critic, make_critic, model_settings
from lit_grpo.policy.model.load import check_policy, end_token_ids, load_model, load_model_config, load_tokenizer
from tests.policy.model.own_code import own_code_folder, plain_folder

TRUSTED = {"trust_remote_code": True}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return own_code_folder(tmp_path_factory.mktemp("own_code"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_folder(tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    def asked(*_: Any) -> str:
        raise AssertionError("somebody was asked on the terminal")

    monkeypatch.setattr(builtins, "input", asked)


@pytest.mark.parametrize(
    "arguments", [{}, {"trust_remote_code": False}, {"trust_remote_code": None}, {"revision": "a"}]
)
@pytest.mark.parametrize("load", [load_tokenizer, load_model_config, load_model])
def test_code_of_a_model_is_refused_without_a_question(own, load, arguments):
    with pytest.raises(UserError, match="brings code of its own") as caught:
        load(PolicyConfig(path=str(own), model_args=arguments))
    assert caught.value.where == "model.policy.model_args.trust_remote_code"
    assert "model.policy.model_args.trust_remote_code: true" in (caught.value.remedy or "")


def test_code_that_is_trusted_is_loaded_everywhere(own):
    config = PolicyConfig(path=str(own), model_args=TRUSTED)
    tokenizer = load_tokenizer(config)
    assert type(tokenizer).__name__ == "OwnTokenizer"
    assert type(load_model_config(config)).__name__ == "OwnConfig"
    assert type(load_model(config)).__name__ == "OwnForCausalLM"
    assert end_token_ids(config, tokenizer)
    with torch.device("meta"):
        assert type(load_model(config)).__name__ == "OwnForCausalLM"


def test_a_critic_of_another_folder_is_reached_alike(own, plain):
    policy = PolicyConfig(path=str(plain), model_args={"revision": "a", "token": "t", "trust_remote_code": True})
    critic = CriticConfig(path=str(own), model_args={"revision": "b"})
    check_critic(policy, critic)
    settings = model_settings(policy, critic)
    assert settings.model_args == {"token": "t", "trust_remote_code": True, "revision": "b"}
    assert type(make_critic(settings, critic).base).__name__ == "Qwen2Model"
    with pytest.raises(UserError, match="without path"):
        check_critic(policy, CriticConfig(model_args={"revision": "b"}))


def test_every_loader_is_told_where_the_model_is(plain, monkeypatch):
    place = {
        "revision": "abc", "subfolder": "weights", "token": "secret", "cache_dir": "there", "local_files_only": True,
        "code_revision": "def", "proxies": {"https": "p"}, "trust_remote_code": True,
    }  # fmt: skip
    shutil.copytree(plain, plain / "weights", dirs_exist_ok=True)
    config = PolicyConfig(path=str(plain), model_args=place)
    told: dict[str, dict[str, Any]] = {}
    for name in ("AutoTokenizer", "AutoConfig", "AutoModelForCausalLM", "GenerationConfig"):
        cls = getattr(transformers, name)
        real = cls.from_pretrained

        def spy(*args: Any, _name: str = name, _real: Any = real, **given: Any) -> Any:
            told[_name] = dict(given)
            kept = {k: v for k, v in given.items() if k in ("return_unused_kwargs", "output_loading_info", "subfolder")}
            return _real(*args, **kept)

        monkeypatch.setattr(cls, "from_pretrained", spy)
    tokenizer = load_tokenizer(config)
    load_model(config)
    end_token_ids(config, tokenizer)
    assert len(told) == 4
    for name, given in told.items():
        codeless = ("code_revision", "trust_remote_code") if name == "GenerationConfig" else ()
        expected = {key: value for key, value in place.items() if key not in codeless}
        assert {key: given.get(key) for key in expected} == expected, name


def test_fields_of_the_configuration_reach_model_and_configuration(plain):
    config = PolicyConfig(path=str(plain), model_args={"attention_dropout": 0.5, "max_position_embeddings": 32})
    assert load_model_config(config).max_position_embeddings == 32
    assert load_model(config).config.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("attn_implementation", "eager", "model.policy.attention"),
        ("dtype", "bfloat16", "model.policy.dtype"),
        ("torch_dtype", "bfloat16", "model.policy.dtype"),
        ("device_map", "auto", "trainer"),
        ("quantization_config", {}, "model.policy.quantization"),
        ("load_in_4bit", True, "model.policy.quantization"),
        ("gguf_file", "x.gguf", "safetensors"),
        ("use_auth_token", "x", "token"),
        ("trust_remote_code", "yes", "true or false"),
        ("revision", 3, "a text"),
        ("proxies", "http://x", "a mapping"),
    ],
)
def test_arguments_that_something_else_decides_are_refused_by_name(plain, name, value, remedy):
    with pytest.raises(UserError) as caught:
        check_policy(PolicyConfig(path=str(plain), model_args={name: value}))
    assert caught.value.where == f"model.policy.model_args.{name}"
    assert remedy in (caught.value.remedy or "")


def test_an_unknown_argument_is_refused_before_weights_are_read(plain):
    with pytest.raises(UserError, match="no argument of the loader") as caught:
        load_model_config(PolicyConfig(path=str(plain), model_args={"revison": "main"}))
    assert caught.value.remedy == "did you mean revision?"


@pytest.mark.parametrize(("arguments", "runs"), [({}, False), (TRUSTED, True), ({"trust_remote_code": False}, False)])
def test_the_engine_runs_the_models_code_where_the_learner_may(arguments, runs):
    context: Any = SimpleNamespace(policy_config=PolicyConfig(path="x", model_args=arguments))
    assert runs_own_code(context) is runs


def test_a_tiny_model_takes_no_arguments():
    with pytest.raises(UserError, match="nothing that model_args could load"):
        check_policy(PolicyConfig(tiny=TinyModel(), model_args={"revision": "main"}))


def test_flash_attention_without_its_package(plain, monkeypatch):
    monkeypatch.setattr("lit_grpo.policy.model.load.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed") as caught:
        check_policy(PolicyConfig(path=str(plain), attention="flash_attention_2", share_prompts=False))
    assert caught.value.where == "model.policy.attention"


# ------------------------------------------------------------------------------------------------ adapters


def adapter(base, folder, **changes: Any):
    import peft

    model: Any = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **changes),
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_adapters_are_merged_into_their_model(plain, tmp_path, changes):
    trained = adapter(plain, tmp_path, **changes).eval()
    config = PolicyConfig(path=str(tmp_path))
    loaded = load_model(config)
    assert {name for name, p in loaded.named_parameters() if not p.requires_grad} == set()
    assert set(loaded.state_dict()) == set(load_model(PolicyConfig(path=str(plain))).state_dict())
    ids = torch.tensor([[3, 4, 5, 6, 7, 3]])
    expected, base = trained(ids).logits, load_model(PolicyConfig(path=str(plain)))(ids).logits
    assert (loaded(ids).logits - expected).abs().max() < 1e-5
    assert (base - expected).abs().max() > 1e-3
    assert load_tokenizer(config).get_vocab() == load_tokenizer(PolicyConfig(path=str(plain))).get_vocab()
    assert load_model_config(config).vocab_size


def test_adapters_whose_model_is_not_there_say_of_which_they_are(plain, tmp_path):
    copy, folder = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(plain, copy)
    adapter(copy, folder)
    shutil.rmtree(copy)
    with pytest.raises(UserError, match=r"holds adapters \(LoRA\) of the model .*base") as caught:
        check_policy(PolicyConfig(path=str(folder)))
    assert "base_model_name_or_path" in (caught.value.remedy or "")
