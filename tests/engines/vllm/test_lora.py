"""vLLM samples with the adapters of a policy that trains by LoRA: they come merged into the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineConfig, EngineContext, make_engine
from lit_grpo.engines.base import weights_for
from lit_grpo.policy import LoraConfig, Policy, PolicyConfig, TinyModel
from lit_grpo.policy.model.load import load_model
from lit_grpo.types import Request, Sampling
from tests.engines.vllm.vllm_fixtures import ON_GPU, largest_gap, requests, sampled

pytestmark = pytest.mark.vllm
TINY = TinyModel(width=64, heads=2, max_position=256)
ROUNDING = 0.3 if ON_GPU else 2e-3
WRONG = 1.0 if ON_GPU else 0.2
"""Nats. Adapters this large make a badly conditioned model: float32 with merged weights is 4e-4 from float64."""
PROMPTS = [tuple((5 * i + j * j) % 12 for j in range(40 + 5 * i)) for i in range(4)]


@pytest.mark.parametrize("adapters", ["merged", "hot"])
def test_greedy_and_logprobs_are_the_learners_after_each_sync(adapters: str) -> None:
    pytest.importorskip("peft")
    config = PolicyConfig(tiny=TINY, lora=LoraConfig(rank=4, alpha=16.0))
    policy = Policy(load_model(config))
    policy.model.get_input_embeddings().weight.data.mul_(10)  # far from uniform distributions
    engine: Any = make_engine(
        EngineConfig(name="vllm", max_num_seqs=32, adapters=adapters, args={"kv_cache_memory_bytes": 2**26}),  # type: ignore[arg-type]
        EngineContext(
            policy=policy,
            policy_config=config,
            tokenizer=None,
            end_token_ids=(),
            max_model_len=128,
            seed=0,
        ),
    )
    try:
        outputs = []
        for version in range(3):
            engine.sync(weights_for(engine, policy), version)
            asked = [Request(i, prompt, (0,)) for i, prompt in enumerate(PROMPTS)]
            greedy = sampled(engine, asked, Sampling(temperature=0.0, max_new_tokens=12))
            for completion in greedy:
                prompt = PROMPTS[completion.request]
                with torch.no_grad():
                    logits = policy.model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
                logits = logits[len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                assert (logits.max(-1).values - chosen).max() < ROUNDING, "greedy, but for ties within rounding"
            asked = requests(4, prompts=PROMPTS)
            drawn = sampled(engine, asked, Sampling(temperature=1.3, max_new_tokens=16))
            assert largest_gap(policy.model, asked, drawn, 1.3) < ROUNDING
            outputs.append([c.token_ids for c in greedy])
            for name, parameter in policy.named_parameters():
                if ".lora_B." in name:
                    parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(version))
            assert largest_gap(policy.model, asked, drawn, 1.3) > WRONG, "the adapters matter"
        assert outputs[0] != outputs[1] != outputs[2]
    finally:
        engine.close()
