"""What the policy's settings leave open is decided by device, number format and model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.policy import CriticConfig, PolicyConfig, TinyModel
from lit_grpo.policy.critic import model_settings
from lit_grpo.policy.model.load import check_replay, load_model, resolve_backend

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip


def folder(path: Path, **changes: Any) -> PolicyConfig:
    (path / "config.json").write_text(json.dumps(QWEN2 | changes))
    # No tensor, and whole.
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return PolicyConfig(path=str(path))


def decided(config: PolicyConfig, dtype: torch.dtype | None = torch.bfloat16, device: str = "cuda") -> tuple[str, bool]:
    resolved = resolve_backend(config, dtype, device)
    assert resolved.compile is not None
    return resolved.attention, resolved.compile


def test_on_cuda_in_bfloat16_rows_are_not_padded_and_blocks_compiled(tmp_path):
    assert decided(folder(tmp_path)) == ("varlen", True)
    assert decided(PolicyConfig(tiny=TinyModel())) == ("varlen", False), "compiling takes longer than a tiny model"


@pytest.mark.parametrize(
    ("dtype", "device", "changes"),
    [
        (torch.bfloat16, "cpu", {}),
        (torch.float32, "cuda", {}),
        (None, "cuda", {}),  # computes in the weights' format: float32
        (torch.bfloat16, "cuda", {"num_attention_heads": 16, "num_key_value_heads": 2}),  # heads of 4 numbers
        (torch.bfloat16, "cuda", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_elsewhere_torchs_own_attention_is_taken_as_it_is(tmp_path, dtype, device, changes):
    assert decided(folder(tmp_path, **changes), dtype, device) == ("sdpa", False)


def test_a_critics_own_model_is_decided_for_by_itself(tmp_path):
    policy = folder(tmp_path)
    own = model_settings(policy, CriticConfig(tiny=TinyModel(width=40, heads=4)))  # heads of 10 numbers
    assert decided(policy) == ("varlen", True)
    assert decided(own) == ("sdpa", False)


def test_what_is_set_stays(tmp_path):
    config = folder(tmp_path)
    config.attention, config.compile = "sdpa", True
    assert decided(config) == ("sdpa", True)
    config.attention, config.compile = "auto", False
    assert decided(config) == ("varlen", False)
    config.pack = False
    assert decided(config) == ("sdpa", False)


def test_experts_are_not_compiled():
    assert decided(PolicyConfig(tiny=TinyModel(experts=4))) == ("varlen", False)


def test_replayed_routers_are_not_compiled():
    with pytest.raises(UserError, match="compiled blocks") as info:
        check_replay(PolicyConfig(tiny=TinyModel(experts=4), compile=True))
    assert info.value.where == "model.policy.compile"


def test_an_attention_that_cannot_compute_in_float32_says_so_before_weights_are_read(tmp_path):
    config = folder(tmp_path)
    config.attention = "varlen"
    with pytest.raises(UserError, match="computes in bfloat16, not in float32") as info:
        resolve_backend(config, torch.float32, "cuda")
    assert info.value.where == "model.policy.attention"


def test_a_model_made_without_a_decision_uses_sdpa():
    assert load_model(PolicyConfig(tiny=TinyModel())).config._attn_implementation == "lit_grpo_sdpa"
