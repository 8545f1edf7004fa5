"""Export from checkpoints made by hand: one file, shards, a base model that has moved, and everything that is wrong."""

from dataclasses import asdict

import pytest
import torch
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_grpo.commands.export import PREFIX, export
from lit_grpo.errors import UserError
from lit_grpo.policy.config import PolicyConfig, TinyModel
from lit_grpo.policy.model.load import load_model, load_tokenizer

TINY = TinyModel(layers=1, width=16, heads=2)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory):
    """A model folder with a generation configuration that transformers itself would refuse to write."""
    folder = tmp_path_factory.mktemp("base")
    model = load_model(PolicyConfig(tiny=TINY))
    model.config.tie_word_embeddings = request.param
    model = type(model)(model.config)
    model.save_pretrained(folder)
    load_tokenizer(PolicyConfig(tiny=TINY)).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [12, 13], "temperature": 0.6}')
    return folder


def trained(base):
    """The base model after some training."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def content(model, policy):
    weights = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    return {"state_dict": {**weights, "other.weight": torch.ones(1)}, "hyper_parameters": {"policy": asdict(policy)}}


def same(folder, model):
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        return torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_one_file(base, tmp_path):
    model = trained(base)
    torch.save(content(model, PolicyConfig(path=str(base))), tmp_path / "x.ckpt")
    done = export(tmp_path / "x.ckpt", tmp_path / "deep" / "out")
    assert same(tmp_path / "deep" / "out", model)
    assert done.architecture == "Qwen2ForCausalLM"
    assert done.parameters == sum(p.numel() for p in model.parameters())
    assert (done.folder / "generation_config.json").read_text() == (base / "generation_config.json").read_text()
    assert AutoTokenizer.from_pretrained(done.folder).decode([1, 2]) == "12"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_shards(base, tmp_path):
    model = trained(base)
    whole = content(model, PolicyConfig(path=str(base)))
    dcp.save({"state_dict": whole.pop("state_dict")}, checkpoint_id=tmp_path / "x.ckpt", no_dist=True)
    torch.save(whole, tmp_path / "x.ckpt" / "meta.pt")
    export(tmp_path / "x.ckpt", tmp_path / "out", dtype="float16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float16
    export(tmp_path / "x.ckpt", tmp_path / "out", force=True)
    assert same(tmp_path / "out", model)


def test_a_base_model_that_has_moved(base, tmp_path):
    torch.save(content(trained(base), PolicyConfig(path="/no/longer/here")), tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="no model folder") as error:
        export(tmp_path / "x.ckpt", tmp_path / "out")
    assert "--base" in str(error.value)
    export(tmp_path / "x.ckpt", tmp_path / "out", base=base)
    assert (tmp_path / "out" / "model.safetensors").exists()


def bad(tmp_path, name, value):
    torch.save(value, tmp_path / name)
    return tmp_path / name


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "folder").mkdir()
    model = load_model(PolicyConfig(tiny=TINY))
    tiny = content(model, PolicyConfig(tiny=TINY))
    other = content(model, PolicyConfig(tiny=TinyModel(layers=2, width=16, heads=2)))
    cases = {
        tmp_path / "none.ckpt": "there is no checkpoint",
        tmp_path / "folder": "neither a sharded checkpoint nor the folder of a run",
        tmp_path / "text.ckpt": "cannot be used",
        bad(tmp_path, "a.ckpt", {"x": 1}): "no checkpoint of a Lightning run",
        bad(
            tmp_path, "b.ckpt", {"state_dict": {"w": torch.ones(1)}, **{"hyper_parameters": tiny["hyper_parameters"]}}
        ): ("holds no policy weights"),
        bad(tmp_path, "c.ckpt", {"state_dict": tiny["state_dict"]}): "does not say which model",
        bad(tmp_path, "d.ckpt", other): "do not fit Qwen2ForCausalLM",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message):
            export(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_safe(tmp_path):
    checkpoint = bad(tmp_path, "x.ckpt", content(load_model(PolicyConfig(tiny=TINY)), PolicyConfig(tiny=TINY)))
    home = tmp_path / "home"
    home.mkdir()
    (home / "letters.txt").write_text("dear")
    with pytest.raises(UserError, match="not empty"):
        export(checkpoint, home)
    with pytest.raises(UserError, match="something that is no model"):
        export(checkpoint, home, force=True)
    assert [path.name for path in home.iterdir()] == ["letters.txt"]


def test_a_write_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
    checkpoint = bad(tmp_path, "x.ckpt", content(load_model(PolicyConfig(tiny=TINY)), PolicyConfig(tiny=TINY)))
    export(checkpoint, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        export(checkpoint, tmp_path / "out", force=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.ckpt"]
