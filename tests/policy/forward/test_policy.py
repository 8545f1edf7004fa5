"""Log-probabilities and entropies against a loop over single tokens, which uses nothing but the model's own forward."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.policy import Layout, Policy, PolicyConfig, TinyModel, pad_rows, share_prompts
from lit_grpo.policy.model.load import load_model

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9), (3, 3)]
COMPLETIONS = [(7, 8), (9, 10, 11, 12, 2), (), (1,)]
WIDTH = 6


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    policy = Policy(load_model(PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2))), logits_chunk=3)
    for parameter in policy.parameters():  # away from the flat start: entropies must differ
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return policy


def one_by_one(policy: Policy, prompt, completion, temperature):
    """(log-probability, entropy) of each token: the model is run on each prefix alone."""
    out = []
    for t, token in enumerate(completion):
        prefix = torch.tensor([[*prompt, *completion[:t]]])
        logits = policy.model(input_ids=prefix, use_cache=False).logits[0, -1].detach().double()
        probs = torch.softmax(logits, 0)
        entropy = -sum(p * math.log(p) for p in probs.tolist() if p > 0)
        out.append((torch.log_softmax(logits / temperature, 0)[token].item(), entropy))
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("grad", [True, False])
def test_padded_batch_equals_a_loop_over_single_tokens(policy, temperature, grad):
    with torch.set_grad_enabled(grad):
        stats = policy(pad_rows(PROMPTS, COMPLETIONS, width=WIDTH), temperature, "detached")
    assert stats.logprobs.shape == (4, WIDTH)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected = one_by_one(policy, prompt, completion, temperature)
        for t, (logprob, entropy) in enumerate(expected):
            assert stats.logprobs[i, t].item() == pytest.approx(logprob, abs=1e-5)
            assert stats.entropy[i, t].item() == pytest.approx(entropy, abs=1e-5)
        assert (stats.logprobs[i, len(completion) :] == 0).all()


def gradient(policy: Policy, rows, entropy="detached"):
    policy.zero_grad()
    stats = policy(pad_rows([PROMPTS[i] for i in rows], [COMPLETIONS[i] for i in rows], width=WIDTH), 1.0, entropy)
    weights = torch.arange(1.0, WIDTH + 1)
    total = (stats.logprobs * weights).sum() + (stats.entropy.sum() if entropy == "grad" else 0.0)
    total.backward()
    gradients: Any = [p.grad for p in policy.parameters()]
    return [g.clone() for g in gradients]


@pytest.mark.parametrize("entropy", ["detached", "grad"])
def test_gradient_is_that_of_the_unchunked_model(policy, entropy):
    actual = gradient(policy, range(4), entropy)
    policy.zero_grad()
    total = torch.zeros(())
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        logp = policy.model(input_ids=ids, use_cache=False).logits[0].log_softmax(1)[len(prompt) - 1 : -1]
        for t, token in enumerate(completion):
            total = total + (t + 1) * logp[t, token]
        if entropy == "grad" and completion:
            total = total - (logp.exp() * logp).sum()
    total.backward()
    for a, parameter in zip(actual, policy.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad, rtol=1e-4, atol=1e-5)


def test_gradient_does_not_depend_on_the_batch_it_is_computed_in(policy):
    whole = gradient(policy, range(4))
    parts = [gradient(policy, [i]) for i in range(4)]
    for i, expected in enumerate(whole):
        torch.testing.assert_close(sum(part[i] for part in parts), expected, rtol=1e-4, atol=1e-5)


def test_only_empty_completions_give_zeros_and_can_be_differentiated(policy):
    policy.zero_grad()
    stats = policy(pad_rows([(1, 2)], [()], width=2))
    assert stats.logprobs.tolist() == [[0.0, 0.0]]
    stats.logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        pad_rows([()], [(1,)], width=1)


def test_functional_dropout_under_a_family_s_own_name_is_off_too():
    from transformers import SeedOssConfig, SeedOssForCausalLM

    config = SeedOssConfig(
        vocab_size=14, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4,
    )  # fmt: skip
    assert config.residual_dropout > 0
    assert config.attention_dropout > 0
    policy = Policy(SeedOssForCausalLM(config)).train()
    batch = pad_rows([(1, 2)], [(3, 4)], width=2)
    assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


def test_dropout_is_off_even_in_training_mode():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    policy = Policy(model).train()
    batch = pad_rows([(1, 2)], [(3, 4)], width=2)
    with torch.no_grad():
        assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


def test_shared_prompts_give_the_numbers_and_gradients_of_padded_rows(policy):
    prompts = [(1, 2, 3)] * 3 + [(4,)] + [(1, 2, 3)] * 2
    completions = [(7, 8), (9, 10, 11, 12, 2), (), (1,), (7, 8), (8, 7, 7)]
    results = {}
    layouts: list[tuple[str, Any]] = [
        ("padded", pad_rows),
        ("shared", share_prompts),
        ("cut", partial(share_prompts, row_tokens=8)),
    ]
    for name, build in layouts:
        policy.zero_grad()
        batch = build(prompts, completions, width=WIDTH)
        stats = policy(batch, 0.9, "grad")
        (stats.logprobs * torch.arange(1.0, WIDTH + 1)).sum().add(stats.entropy.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
        results[name] = (batch.input_ids.numel(), stats.logprobs, stats.entropy, gradient)
    assert results["shared"][0] < results["padded"][0]
    for name in ("shared", "cut"):
        for a, b in zip(results[name][1:], results["padded"][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_eager_attention_keeps_to_the_mask():
    policy = Policy(load_model(PolicyConfig(tiny=TinyModel(width=32, layers=1, heads=2), attention="eager")))
    policy.verify_against_model_forward(Layout())


def test_logits_that_the_model_changes_after_its_head_are_the_models_own(policy):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    policy.verify_against_model_forward(Layout())
    capped = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            final_logit_softcapping=0.05,
        )
    )
    with torch.no_grad():
        for weight in capped.parameters():
            weight.mul_(5)
    changed = Policy(capped.eval())
    changed.verify_against_model_forward(Layout())
    # Without the model's own code the head alone would be asked, and the check notices.
    changed._own_logits = None
    with pytest.raises(UserError, match="differ from the model's own"):
        changed.verify_against_model_forward(Layout())


def test_a_model_that_ignores_the_mask_is_refused_for_shared_prompts(policy, monkeypatch):
    inner, ignored = policy.model.base_model.forward, {"attention_mask": None, "segments": None}
    monkeypatch.setattr(policy.model.base_model, "forward", lambda **kw: inner(**(kw | ignored)))
    policy.verify_against_model_forward(Layout(pack=False, share=False))
    with pytest.raises(UserError, match="share_prompts"):
        policy.verify_against_model_forward(Layout())


def test_named_weights_are_those_of_transformers_without_tied_copies(policy):
    names = [name for name, _ in policy.named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied
    state = policy.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in policy.named_weights())
