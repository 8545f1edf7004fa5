"""What a run trained is what plain transformers loads from its export: prompts, log-probabilities, ends, settings."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lit_grpo.commands.export import export
from lit_grpo.commands.exported_template import template_for
from lit_grpo.data import PromptFormat
from lit_grpo.data.sources.base import Row
from lit_grpo.errors import UserError
from lit_grpo.policy import LoraConfig, PolicyConfig
from tests.policy.model.own_code import own_code_folder, plain_folder
from tests.tiny import data, module

CHAT = (
    "{%- for message in messages -%}<{{ message['role'] }}>{{ message['content'] }}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>"
    "{%- if thinking is defined and not thinking -%}=={%- endif -%}{%- endif -%}"
)
FORMATS = {
    "its own": {},
    "none": {"chat_template": "none"},
    "none with a system prompt": {"chat_template": "none", "system_prompt": 'Say "yes"\n\\boxed{} é 😀 {{ x }}'},
    "qwen_math": {"chat_template": "qwen_math"},
    "r1": {"chat_template": "r1"},
    "gtpo": {"chat_template": "gtpo"},
    "text": {"chat_template": "Q: {question}\nS: {system}\nA:", "system_prompt": "be brief",
             "question_format": "[{question}]"},
    "jinja": {"chat_template": "\n{% for m in messages %}\n{{ m.content }}|{% endfor %}"},
    "system prompt": {"system_prompt": "think 'hard'"},
    "question format": {"question_format": "Solve {question} in \\boxed{}.", "system_prompt": "s"},
    "variables": {"chat_template_kwargs": {"thinking": False}},
}  # fmt: skip


class Letters:
    """A stand-in for a tokenizer's text side: ids are characters, with a beginning token before plain text."""

    def __init__(self, real: Any, bos: bool) -> None:
        self.real, self.bos = real, bos
        self.chat_template: str | None = CHAT

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*([1] if self.bos and add_special_tokens else []), *map(ord, text)]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(i) for i in ids]

    def __len__(self) -> int:
        return 0x110000

    def apply_chat_template(self, messages: Any, chat_template: str | None = None, **kwargs: Any) -> Any:
        kwargs |= {"tokenize": False}
        kwargs.pop("return_dict", None)
        text = self.real.apply_chat_template(messages, chat_template=chat_template or self.chat_template, **kwargs)
        return {"input_ids": [ord(sign) for sign in text]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return plain_folder(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_exported_template_makes_the_runs_prompts(folder, name, bos):
    form = PromptFormat(**FORMATS[name])  # type: ignore[arg-type]
    tokenizer = Letters(AutoTokenizer.from_pretrained(folder), bos)
    row = Row(id="1", question="3+4 {system} {{ x }}?", answer="7")
    expected = list(form.encode(row, tokenizer).token_ids)
    template = template_for(form.identity(tokenizer), tokenizer)
    messages = [{"role": "user", "content": row.question}]
    given = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True)["input_ids"]
    assert "".join(map(chr, given)) == "".join(map(chr, expected))


def trained(folder, place, **settings: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, default_root_dir=place, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    policy = PolicyConfig(path=str(folder), **settings)
    trainer.fit(module(policy=policy), data(rollouts=1, format=PromptFormat(chat_template="none")))
    trainer.save_checkpoint(place / "x.ckpt")
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=2)}, {"dtype": "bfloat16"}], ids=str)
def test_plain_transformers_loads_what_was_trained(folder, tmp_path, settings):
    trainer = trained(folder, tmp_path, **settings)
    learner: Any = trainer.lightning_module
    export(tmp_path / "x.ckpt", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    prompt = trainer.datamodule.train_prompts[0]  # type: ignore[attr-defined]
    encoded: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.question}], add_generation_prompt=True, return_dict=True
    )
    ids = encoded["input_ids"]
    assert tuple(ids) == prompt.token_ids
    batch = torch.tensor([[*ids, 3, 4, 5]])
    with torch.no_grad():
        theirs, ours = model(batch).logits.log_softmax(-1), learner.policy.model(batch).logits.log_softmax(-1)
    assert model.dtype == learner.policy.model.dtype
    assert (theirs - ours).abs().max() < (1e-5 if model.dtype == torch.float32 else 0.05)
    ends = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert [*(ends if isinstance(ends, list) else [ends])] == [tokenizer.eos_token_id]


@pytest.mark.slow
def test_adapters_alone_go_over_their_model(folder, tmp_path):
    import peft

    trained(folder, tmp_path, lora=LoraConfig(rank=2))
    export(tmp_path / "x.ckpt", tmp_path / "merged")
    done = export(tmp_path / "x.ckpt", tmp_path / "alone", adapter=True)
    assert done.architecture == "LoRA"
    alone: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "alone")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert (alone.eval()(ids).logits - merged(ids).logits).abs().max() < 1e-5
        # The adapters are those that were trained, not none.
        assert not torch.equal(merged(ids).logits, AutoModelForCausalLM.from_pretrained(folder)(ids).logits)
    from lit_grpo.policy.model.load import load_model

    again = load_model(PolicyConfig(path=str(tmp_path / "alone")))
    with torch.no_grad():
        assert (again(ids).logits - merged(ids).logits).abs().max() < 1e-5


@pytest.mark.slow
def test_code_of_a_model_runs_at_an_export_only_where_that_is_said(tmp_path):
    folder = own_code_folder(tmp_path / "own")
    trained(folder, tmp_path, model_args={"trust_remote_code": True})
    with pytest.raises(UserError, match="brings code of its own") as caught:
        export(tmp_path / "x.ckpt", tmp_path / "out")
    assert "--trust-remote-code" in (caught.value.remedy or "")
    assert export(tmp_path / "x.ckpt", tmp_path / "out", trust_remote_code=True).architecture == "OwnForCausalLM"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"


def test_the_runs_sampling_and_ends_are_in_the_generation_configuration(folder, tmp_path):
    from dataclasses import asdict

    policy = PolicyConfig(path=str(folder))
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    settings = {
        "data.sampling.temperature": 0.7, "data.sampling.top_p": 1.0, "data.sampling.top_k": 0,
        "data.sampling.max_new_tokens": 9, "data.sampling.stop_token_ids": [5],
    }  # fmt: skip
    content = {
        "state_dict": {f"policy.model.{name}": tensor for name, tensor in weights.items()},
        "hyper_parameters": {"policy": asdict(policy)},
        "callbacks": {"RunSettings": {"settings": settings}},
    }
    torch.save(content, tmp_path / "x.ckpt")
    export(tmp_path / "x.ckpt", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert 5 in saved["eos_token_id"]
    assert len(saved["eos_token_id"]) == 2
    assert (saved["do_sample"], saved["temperature"], saved["top_p"], saved["top_k"]) == (True, 0.7, 1.0, 0)
    assert saved["max_new_tokens"] == 9
    GenerationConfig.from_pretrained(tmp_path / "out")
