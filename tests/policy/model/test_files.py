"""Model folders that are not whole: refused before anything is loaded, or before the first step."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lit_grpo.errors import UserError
from lit_grpo.policy.config import PolicyConfig
from lit_grpo.policy.model import load
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.policy.model.load import check_policy, load_model


@pytest.fixture
def folder(tmp_path):
    tokenizer = char_tokenizer("0123456789+=")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def change(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def settings(folder):
    return PolicyConfig(path=str(folder))


def test_a_whole_folder_loads(folder):
    check_policy(settings(folder))
    assert len(load_model(settings(folder)).model.layers) == 2


@pytest.mark.parametrize(
    "content",
    [lambda b: b"", lambda b: b"123", lambda b: b[: len(b) // 2], lambda b: b[:-1], lambda b: b + b"x",
     lambda b: b"\xff" * len(b), lambda b: b[:8] + b"{" * len(b[8:]), lambda b: b"text, no weights at all" * 9],
    ids=["empty", "3 bytes", "half", "a byte short", "a byte long", "ff", "braces", "text"],
)  # fmt: skip
def test_torn_weights_are_refused_before_loading(folder, content):
    file = folder / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(UserError, match="damaged") as caught:
        check_policy(settings(folder))
    assert caught.value.where == "model.policy.path"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00"])
def test_a_broken_configuration_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        check_policy(settings(folder))


def test_an_index_that_names_what_is_not_there(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="lacks model-00001"):
        check_policy(settings(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="weight_map"):
        check_policy(settings(folder))


def test_missing_layers_are_no_random_layers(folder):
    change(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(UserError, match="random"):
        load_model(settings(folder))


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"vocab_size": 99}, {"intermediate_size": 8}])
def test_other_shapes_are_refused(folder, changes):
    change(folder, **changes)
    with pytest.raises(UserError, match="shapes"):
        load_model(settings(folder))


def test_a_pickle_that_runs_code_does_not(folder):
    class Evil:
        def __reduce__(self):
            return (open, (str(folder / "ran"), "w"))

    (folder / "model.safetensors").unlink()
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError):
        load_model(settings(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["m", "nobody/nothing-of-this-name", "Qwen/Qwen2.5-99B", "a b/c"])
def test_a_hub_that_cannot_be_asked_is_told_at_once(name, monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("the hub's client, which tries for more than a minute, has been asked")

    monkeypatch.setattr(load, "_asks_nobody", lambda: "huggingface.co cannot be reached")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    with pytest.raises(UserError, match="cannot be reached") as caught:
        check_policy(PolicyConfig(path=name))
    assert f"./{name}" in (caught.value.remedy or "")


def test_memory_that_runs_out_is_no_fault_of_the_files(folder, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(settings(folder))


def made(*files):
    def make(path):
        for file in files:
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text("{}")
        return path

    return make


def in_a_model(path):
    made("config.json", "model.safetensors")(path)
    (path / "tokenizer").mkdir()
    return path / "tokenizer"


@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (made("checkpoints/last.ckpt", "config.yaml"), "that of a run", "lit-grpo export --checkpoint"),
        (made("rollout-000002.ckpt", "last.ckpt"), "holds checkpoints", "last.ckpt"),
        (made("meta.pt", ".metadata", "__0_0.distcp"), "checkpoint in shards", "lit-grpo export"),
        (made("zero_to_fp32.py", "latest"), "DeepSpeed", "convert"),
        (made("model_index.json", "unet/config.json"), "pipeline of diffusers", "language model"),
        (made("model.Q4_K_M.gguf"), "GGUF", "safetensors"),
        (made("model.onnx"), "ONNX", "safetensors"),
        (made("config.json", "onnx/model.onnx"), "ONNX", "safetensors"),
        (made("config.json", "tf_model.h5"), "TensorFlow", "safetensors"),
        (made("consolidated.00.pth", "params.json"), "Meta", "convert"),
        (made("inner/config.json"), "one lies below it", "inner"),
        (made("snapshots/abc/config.json", "refs/main"), "one lies below it", "snapshots/abc"),
        (in_a_model, "lies in a model folder", "did you mean"),
        (made("model.safetensors"), "no config.json", "copy the whole folder"),
        (made("adapter_model.safetensors", "README.md"), "no config.json", "copy"),
        (made("adapter_config.json", "config.json"), "a model and adapters beside it", "move"),
        (made("adapter_config.json"), "holds adapters of the kind None", "merge"),
        (made("README.md"), "no Hugging Face model", "save_pretrained"),
    ],
)
def test_a_folder_that_is_no_model_is_named_as_what_it_is(tmp_path, make, what, remedy):
    with pytest.raises(UserError, match=what) as caught:
        check_policy(settings(make(tmp_path)))
    assert caught.value.where == "model.policy.path"
    assert remedy in (caught.value.remedy or "")


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_without_its_shards(tmp_path, index):
    made("config.json")(tmp_path)
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks model-00001-of-00002\.safetensors"):
        check_policy(settings(tmp_path))


def test_a_pointer_to_weights_is_no_weights(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="Git LFS"):
        check_policy(settings(folder))
