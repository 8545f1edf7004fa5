"""The families of the table, and a tiny random model of each, from transformers' own configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "shared_expert_intermediate_size": 16, "mamba_d_state": 8, "state_size": 8, "num_heads": 4,
    "attention_chunk_size": 8,
}  # fmt: skip
"""A setting is given to a family if its configuration has one of that name."""

FAMILIES: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
        *("vaultgemma", "phi", "phi3", "phimoe", "gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "mpt"),
        *("stablelm", "starcoder2", "persimmon", "olmo", "olmo2", "olmo3", "olmoe", "flex_olmo", "smollm3", "granite"),
        *("granitemoe", "granitemoeshared", "cohere", "cohere2", "cwm", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
        *("deepseek_v2", "deepseek_v3", "youtu", "minicpm3", "dots1", "llama4_text", "mixtral", "qwen2_moe"),
        *("qwen3_moe", "qwen3_next", "qwen3_5_text", "gpt_oss", "jetmoe", "lfm2", "mamba", "falcon_mamba"),
        *("jamba", "falcon_h1", "nemotron", "nemotron_h", "recurrent_gemma", "olmo_hybrid", "minimax", "minimax_m2"),
        *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("seed_oss", "apertus", "arcee", "bitnet", "diffllama", "nanochat", "rwkv", "xlstm", "biogpt"),
        *("modernbert-decoder", "afmoe", "mimo_v2_flash", "bert", "doge", "zamba2", "deepseek_v32"),
        *("t5", "bart", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl"),
    )
}
# Latent attention has keys for all of its heads.
for _family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"):
    FAMILIES[_family] = {"num_key_value_heads": 4}
FAMILIES["lfm2"] = {"layer_types": ["conv", "full_attention", "conv"]}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES["qwen3_next"] = FAMILIES["qwen3_5_text"] = _LINEAR
FAMILIES["falcon_h1"] = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
FAMILIES["mamba2"] = {"head_dim": 16, "num_heads": 4, "n_groups": 1}
FAMILIES["bamba"] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]}
# Its one shared block needs two places: with a single one transformers' own code fails.
FAMILIES["zamba2"] = {
    "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3],
    "num_mem_blocks": 1, "n_mamba_heads": 4, "mamba_headdim": 16,
}  # fmt: skip
FAMILIES["deepseek_v32"] = {"num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
FAMILIES["gptj"] = {"rotary_dim": 8}
FAMILIES["gpt_neo"] = {"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8}

NOT_CAUSAL = ("t5", "bart", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl")
"""Encoder-decoders and multimodal models, which are refused by name."""


def save(family: str, folder: Path) -> None:
    """Save a tiny random model of a family, with a tokenizer's vocabulary size of 97 and weights that do something."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    cls = CONFIG_MAPPING[family]
    defaults = cls()
    fields = set(vars(defaults)) | set(getattr(defaults, "attribute_map", {}))
    changes = FAMILIES[family]
    settings = {key: value for key, value in SHAPE.items() if key in fields and key not in changes}
    config = cls(**settings, **changes)
    torch.manual_seed(0)
    if family in NOT_CAUSAL:
        # Refused by its configuration, before weights are read: their header is enough.
        config.save_pretrained(folder)
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])._from_config(config).float()
    # As they are initialised, weights hardly look at what is before a token, and no error would show.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(5)
        # It begins at 0, where the mask that the layer learns is the same for all tokens.
        for name, weight in model.named_parameters():
            if family == "doge" and name.endswith(".A"):
                weight.normal_()
    model.save_pretrained(folder)
