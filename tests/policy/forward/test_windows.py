"""Models whose layers see a part of what is before them: exact in every layout, or refused by the policy's own check.

The yardstick is the model's own forward pass, one completion at a time, over several windows. Random weights as they
are initialised attend to everything alike, so they are made six times larger.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lit_grpo.errors import UserError
from lit_grpo.policy import Layout, Policy
from lit_grpo.policy.config import CriticConfig
from lit_grpo.policy.critic import Critic
from lit_grpo.policy.forward.attention import NAMES, probe_ids, register
from lit_grpo.policy.forward.policy import backbone

WINDOW = 8
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": WINDOW}
SOME_LAYERS = {"use_sliding_window": True, "max_window_layers": 1, **SLIDING}
PLAIN_SCORES = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
EXPERTS = {"num_local_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    # Every layer has the window.
    "Mistral": SLIDING,
    "Mixtral": SLIDING | EXPERTS,
    "Phi3": SLIDING,
    "Phimoe": SLIDING | EXPERTS,
    "Starcoder2": SLIDING,
    "Qwen3Moe": SOME_LAYERS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    # Some have it.
    "Qwen2": SOME_LAYERS,
    "Qwen3": SOME_LAYERS,
    "SmolLM3": SOME_LAYERS,
    "Gemma2": SLIDING | PLAIN_SCORES,
    "Gemma3": SLIDING | {"sliding_window_pattern": 2},
    "VaultGemma": SLIDING | PLAIN_SCORES,
    "Cohere2": SLIDING | {"logit_scale": 1.0},
    "Olmo3": SLIDING,
    "Ministral": SLIDING,
    "Exaone4": SLIDING,
    "GptOss": SLIDING | EXPERTS,
    # Chunks instead.
    "Llama4": {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48},
}
LAYOUTS = [Layout(pack=False, share=False), Layout(False, True), Layout(True, False), Layout(True, True)]


def eager_alone(family: str) -> bool:
    """Whether transformers has no other attention for a family: GptOss, since 5.20 also those with a soft cap."""
    return not getattr(transformers, f"{family}ForCausalLM")._supports_sdpa


def made(family: str, attention: str, **changes: Any) -> Any:
    register()
    config_name = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}.get(family, f"{family}Config")
    config = getattr(transformers, config_name)(**(SHAPE | FAMILIES[family] | changes))
    torch.manual_seed(0)
    cls = getattr(transformers, f"{family}ForCausalLM")
    model = cls._from_config(config, attn_implementation=NAMES.get(attention, attention))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(6)
    return model.float().eval()


def draw(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = [draw(20, 0)] * 3 + [draw(5, 1)] * 2
COMPLETIONS = [draw(n, 10 + n) for n in (12, 3, 7, 14, 1)]


@torch.no_grad()
def gap(policy: Policy, layout: Layout) -> float:
    found = policy(layout.build(PROMPTS, COMPLETIONS, width=14), entropy="none").logprobs
    most = 0.0
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits = policy.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits
        alone = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        most = max(most, float((found[row, : len(completion)] - alone).abs().max()))
    return most


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_is_kept_to_in_every_layout(family, attention):
    if eager_alone(family) and attention != "eager":
        with pytest.raises(ValueError, match="does not support"):
            made(family, attention)
        return
    policy = Policy(made(family, attention))
    for layout in LAYOUTS:
        policy.verify_against_model_forward(layout)
        assert gap(policy, layout) < 1e-5, layout


@pytest.mark.parametrize("family", ["Mistral", "Gemma3", "GptOss"])
def test_without_the_window_the_check_would_notice(monkeypatch, family):
    """The probe is longer than the window, so a mask without one is refused."""
    monkeypatch.setattr("lit_grpo.policy.forward.policy.masks_by_layer_type", lambda config, mask, positions: mask)
    policy = Policy(made(family, "eager"))
    for layout in LAYOUTS[1:]:
        with pytest.raises(UserError, match="differ from the model's own"):
            policy.verify_against_model_forward(layout)
        assert gap(policy, layout) > 0.01


def varlen_with_window(query, key, value, queries, keys, *_: Any, scale=None, window_size=None, enable_gqa=False):
    """What torch's kernel is documented to do: ``left`` keys before a query's own, the last query beside the last."""
    left, right = window_size
    assert right == 0
    out = []
    for k in range(len(queries) - 1):
        q = query[queries[k] : queries[k + 1]].transpose(0, 1)
        ks, vs = (x[keys[k] : keys[k + 1]].transpose(0, 1) for x in (key, value))
        own = torch.arange(q.shape[1])[:, None] + ks.shape[1] - q.shape[1]
        sees = (torch.arange(ks.shape[1]) <= own) & ((left < 0) | (torch.arange(ks.shape[1]) >= own - left))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, ks, vs, attn_mask=sees, scale=scale, enable_gqa=enable_gqa
        )
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_variable_length_kernels_get_the_window(monkeypatch, family):
    """The kernel runs on CUDA alone: a stand-in with its documented meaning takes its place."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_with_window)
    policy = Policy(made(family, "varlen"))
    for layout in LAYOUTS[2:]:
        assert gap(policy, layout) < 1e-5


def test_gradients_agree_across_layouts():
    policy, found = Policy(made("Gemma3", "sdpa")), []
    for layout in LAYOUTS:
        policy.zero_grad()
        policy(layout.build(PROMPTS, COMPLETIONS, width=14)).logprobs.sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_critic_keeps_to_the_window_too(attention):
    critic = Critic(backbone(made("Gemma3", attention)), CriticConfig())
    for layout in LAYOUTS:
        critic.verify_against_model_forward(layout)


def test_a_soft_cap_is_refused_where_it_would_be_left_out():
    for layout in LAYOUTS:
        if eager_alone("Gemma2"):
            with pytest.raises(ValueError, match="does not support"):
                made("Gemma2", "sdpa", attn_logit_softcapping=1.0)
        else:
            with pytest.raises(UserError, match="soft cap") as refused:
                Policy(made("Gemma2", "sdpa", attn_logit_softcapping=1.0)).verify_against_model_forward(layout)
            assert refused.value.remedy == "set attention: eager"
        policy = Policy(made("Gemma2", "eager", attn_logit_softcapping=1.0))
        policy.verify_against_model_forward(layout)
        assert gap(policy, layout) < 1e-5


def test_the_probe_reaches_past_windows_and_chunks_and_stays_within_the_positions():
    for family, longest in (("Mistral", WINDOW), ("Gemma3", WINDOW), ("Llama4", WINDOW)):
        config = made(family, "eager").config
        prompt, completions = probe_ids(config, reach=True)
        assert len(prompt) == longest + 2
        assert {token for completion in completions for token in completion} <= set(range(97))
        config.max_position_embeddings = 12
        assert len(probe_ids(config, reach=True)[0]) + max(map(len, completions)) <= 12
    assert probe_ids(made("Qwen2", "eager", use_sliding_window=False).config, reach=True)[0] == ()
