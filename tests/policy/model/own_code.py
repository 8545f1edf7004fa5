"""A model folder with code of its own: configuration, model and tokenizer are classes of files in the folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lit_grpo.policy.model.char_tokenizer import char_tokenizer

_CONFIG = """from transformers import Qwen2Config


class OwnConfig(Qwen2Config):
    model_type = "lit_grpo_own"
"""
_MODEL = """from transformers import Qwen2ForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""
_TOKENIZER = """from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def plain_folder(folder: Path) -> Path:
    """Write a tiny Qwen2 model that reads digits, with random weights."""
    tokenizer = char_tokenizer("0123456789+=")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def own_code_folder(folder: Path) -> Path:
    """Write the same model as classes of the folder's own."""
    plain_folder(folder)
    for name, text in (("configuration", _CONFIG), ("modeling", _MODEL), ("tokenization", _TOKENIZER)):
        (folder / f"{name}_own.py").write_text(text)
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "lit_grpo_own"}
    settings["architectures"] = ["OwnForCausalLM"]
    settings["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "OwnTokenizer"}
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
