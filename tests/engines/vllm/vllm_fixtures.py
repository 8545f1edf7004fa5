"""Tiny Qwen2-shaped models of random weights, and what transformers says of a vLLM completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.types import Completion, Request, Sampling

ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
GAP = 0.3 if ON_GPU else 5e-5
"""Bound on a log-probability's difference from a float32 model's, in nats: bfloat16 keeps 8 bits."""
WRONG_WEIGHTS = 1.0
"""Any other weights differ by more than this somewhere."""
VOCABULARY = 128
EOS = 1
MAX_MODEL_LEN = 192
PROMPTS = [tuple((7 * i + j * j) % 125 + 3 for j in range(40 + 11 * i)) for i in range(4)]
"""Of 40 to 73 tokens: all longer than one block of the prefix cache (32 on CPU)."""


def make_model(tied: bool, seed: int) -> Any:
    """A float32 causal language model whose next-token distributions are far from uniform."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def start_engine(folder: Path, model: Any, processes: int = 1, **options: Any) -> Any:
    """A fresh vLLM engine that reads ``model`` from disk; several processes are an engine of their own."""
    from lit_grpo.engines.vllm.engine import VLLMEngine
    from lit_grpo.engines.vllm_processes.engine import VLLMProcesses

    model.save_pretrained(folder)
    small = {"dtype": DTYPE, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "kv_cache_memory_bytes": 2**26}
    arguments: dict[str, Any] = {"end_token_ids": (EOS,), **small, **options}
    return (
        VLLMEngine(folder, **arguments) if processes == 1 else VLLMProcesses(folder, processes=processes, **arguments)
    )


def requests(samples: int, first_seed: int = 0, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[Request]:
    seeds = [range(first_seed + 1000 * i, first_seed + 1000 * i + samples) for i in range(len(prompts))]
    return [Request(i, prompt, tuple(s)) for i, (prompt, s) in enumerate(zip(prompts, seeds, strict=True))]


def sampled(engine: Any, asked: Sequence[Request], sampling: Sampling) -> list[Completion]:
    """All completions, in order of request and sample."""
    completions = sorted(engine.generate(asked, sampling), key=lambda c: (c.request, c.sample))
    assert [(c.request, c.sample) for c in completions] == [(r.index, s) for r in asked for s in range(len(r.seeds))]
    return completions


def stop_tokenizer() -> Any:
    """A tokenizer of one letter a token, with the vocabulary of the models, to decode with."""
    return char_tokenizer("".join(map(chr, range(0x4E00, 0x4E00 + VOCABULARY - 2))))


def check_stop_strings(engine: Any) -> None:
    """Check that completions are those without stop strings, cut behind the first of them."""
    tokenizer, asked = stop_tokenizer(), requests(8)
    settings: dict[str, Any] = {"temperature": 1.3, "max_new_tokens": 24}
    free = sampled(engine, asked, Sampling(**settings))
    stop = tuple(tokenizer.decode(c.token_ids[i : i + 2]) for c, i in ((free[3], 4), (free[9], 22), (free[20], 11)))
    ended = 0
    for before, c in zip(free, sampled(engine, asked, Sampling(**settings, stop=stop)), strict=True):
        text = "".join(tokenizer.decode([i])[:1] for i in before.token_ids)
        end = min((text.find(string) + 2 for string in stop if string in text), default=None)
        assert c.token_ids == before.token_ids[:end]
        assert c.finish_reason == (before.finish_reason if end is None else "stop")
        assert c.logprobs == pytest.approx(before.logprobs[:end], abs=GAP)
        ended += end is not None
    assert 3 <= ended < len(free), "the test needs both endings"


def greedy(engine: Any, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[tuple[int, ...]]:
    completions = sampled(engine, requests(1, prompts=prompts), Sampling(temperature=0.0, max_new_tokens=24))
    return [c.token_ids for c in completions]


@torch.no_grad()
def largest_gap(model: Any, asked: Sequence[Request], completions: Sequence[Completion], temperature: float) -> float:
    """Largest difference, in nats, of a completion's log-probabilities from those of ``model`` in float32."""
    prompts = {r.index: r.token_ids for r in asked}
    gap = 0.0
    for c in completions:
        prompt = prompts[c.request]
        logits = model(torch.tensor([[*prompt, *c.token_ids]])).logits[0, len(prompt) - 1 : -1].float()
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        gap = max(gap, float((expected - torch.tensor(c.logprobs)).abs().max()))
    return gap
