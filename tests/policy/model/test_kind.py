"""Models that are no causal language models of text: refused by name, from their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.policy import Layout, Policy, PolicyConfig
from lit_grpo.policy.config import LoraConfig
from lit_grpo.policy.model.load import load_model, load_model_config, resolve_backend
from scripts.model_families_cases.families import save


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("t5", "encoder-decoder (model_type t5)"),
        ("bart", "encoder-decoder (model_type bart)"),
        ("qwen2_5_vl", "multimodal (model_type qwen2_5_vl, with vision"),
        ("llava", "multimodal (model_type llava, with vision"),
        ("mistral3", "multimodal (model_type mistral3, with vision"),
        ("deepseek_v32", "an indexer chooses"),
    ],
)
def test_what_is_no_causal_language_model_is_refused_by_name(family: str, named: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    with pytest.raises(UserError) as caught:
        load_model_config(PolicyConfig(path=str(tmp_path)))
    assert named in caught.value.what
    assert caught.value.remedy


def test_a_decoder_that_was_saved_alone_is_a_causal_language_model(tmp_path: Path) -> None:
    from transformers import BartConfig, BartForCausalLM

    shape: Any = {"vocab_size": 32, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    BartForCausalLM(BartConfig(**shape, decoder_ffn_dim=16, max_position_embeddings=64)).save_pretrained(tmp_path)
    assert load_model_config(PolicyConfig(path=str(tmp_path))).model_type == "bart"


def test_a_mask_that_a_layer_learns_is_not_left_out_of_packed_rows(tmp_path: Path) -> None:
    save("doge", tmp_path)
    plain = PolicyConfig(path=str(tmp_path))
    with pytest.raises(UserError, match="mask of its own"):
        Policy(load_model(PolicyConfig(path=str(tmp_path), attention="sdpa"))).verify_against_model_forward(Layout())
    # Left to itself the policy takes the attention that computes it, and all parameters get a gradient.
    policy = Policy(load_model(resolve_backend(plain)))
    policy.verify_against_model_forward(Layout())
    batch = Layout().build([(3, 5, 7)] * 2, [(4, 6), (9, 8, 5)], width=3)
    policy(batch).logprobs.sum().backward()
    learnt = [weight.grad for name, weight in policy.named_parameters() if name.endswith(".A")]
    assert learnt
    assert all(gradient is not None and float(gradient.norm()) > 0 for gradient in learnt)


def test_routers_that_are_linear_layers_by_name_get_no_adapter(tmp_path: Path) -> None:
    save("llama4_text", tmp_path)
    policy = Policy(load_model(resolve_backend(PolicyConfig(path=str(tmp_path), lora=LoraConfig(rank=2, alpha=4.0)))))
    policy.verify_against_model_forward(Layout())
    adapted = {name.partition(".lora_")[0] for name, _ in policy.named_parameters() if ".lora_" in name}
    assert adapted
    assert not [name for name in adapted if name.endswith("router")]


def test_layers_of_the_other_orientation_are_refused_by_name(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    with pytest.raises(UserError, match="Conv1D") as caught:
        load_model(PolicyConfig(path=str(tmp_path), lora=LoraConfig()))
    assert "leave lora out" in str(caught.value.remedy)
    assert torch.isfinite(load_model(PolicyConfig(path=str(tmp_path)))(torch.tensor([[3, 4]])).logits).all()
