#!/usr/bin/env python3
"""Measure tokens per second of a rollout engine beside its bare library, on the same requests, in one run.

    python scripts/benchmark_rollout.py --model models/SmolLM2-135M-Instruct
    python scripts/benchmark_rollout.py --shape qwen2-1.5b --dtype bfloat16 --prompts 64 --max-new-tokens 128
    python scripts/benchmark_rollout.py --shape tiny --engine transformers

Every round runs each contestant once, in turn, so that a busy machine slows all of them alike. The last lines give our
median over bare's: at most 1.05 is the goal. CPU time is the steadier of the two where other programs run.

* ``bare``: ``vllm.LLM.generate`` with the same sampling parameters; its results are not read.
* ``bare, n``: one request of ``n`` samples per prompt, whose seeds vLLM derives.
* ``bare, unseeded``: the same without seeds.
* ``bare, objects``: with one object per log-probability (vLLM's default), read token by token.
* ``ours``: ``VLLMEngine.generate``, every completion read.

With ``--engine transformers`` bare is ``model.generate`` on the whole batch and ours ``TransformersEngine.generate``.
``scripts/benchmark_server.py`` does the like for a server.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lit_grpo.types import Request, Sampling

Contestant = Callable[[], Any]

SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "tiny": (2, 128, 256, 4, 2, 512),
    "smollm2-135m": (30, 576, 1536, 9, 3, 49152),
    "qwen2-0.5b": (24, 896, 4864, 14, 2, 151936),
    "qwen2-1.5b": (28, 1536, 8960, 12, 2, 151936),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of a Hugging Face model")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    source.add_argument("--shape", choices=SHAPES, help="a Qwen2-shaped model of this size with random weights")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=32, help="every completion has exactly this length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further vLLM engine arguments, as JSON")
    parser.add_argument("--only", nargs="*", help="contestants beside `bare` and `ours`")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or write_shape(args.shape, Path(folder))
        if args.engine == "transformers":
            contestants, closers = transformers_contestants(path, args)
        else:
            contestants, closers = vllm_contestants(path, args)
    tokens = args.prompts * args.samples * args.max_new_tokens
    print(f"{describe(args)}\n{tokens} tokens a round", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(args.rounds + 1):  # the first warms up
        for name, run in list(contestants.items())[:: 1 if round_ % 2 else -1]:
            gc.collect()
            gc.freeze()  # vLLM's own state after its start, which VLLMEngine puts back
            started, cpu_started = time.perf_counter(), time.process_time()
            made = run()
            taken, cpu_taken = time.perf_counter() - started, time.process_time() - cpu_started
            gc.unfreeze()
            if made != tokens:
                raise RuntimeError(f"{name} made {made} tokens instead of {tokens}")
            if round_:
                seconds[name].append(taken)
                cpu_seconds[name].append(cpu_taken)
    for name, times in seconds.items():
        rates = ", ".join(f"{tokens / t:,.0f}" for t in times)
        cpu = statistics.median(cpu_seconds[name])
        print(f"{name:16s} {tokens / statistics.median(times):10,.0f} tokens/s, {cpu:.2f} CPU s   ({rates})")
    for what, measured in (("time", seconds), ("CPU time", cpu_seconds)):
        ratio = statistics.median(measured["ours"]) / statistics.median(measured["bare"])
        print(f"ours takes {ratio:.3f} of bare's {what}")
    for close in closers:
        close()
    return 0


def transformers_contestants(path: Any, args: argparse.Namespace) -> tuple[dict[str, Contestant], list[Contestant]]:
    import torch
    from transformers import AutoModelForCausalLM

    from lit_grpo.engines.transformers.engine import TransformersEngine

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    requests = make_requests(model.config.vocab_size, args)
    engine = TransformersEngine(model, (), args.max_num_seqs)
    engine.sync((), 0)

    def bare() -> int:
        ids = torch.tensor([r.token_ids for r in requests for _ in r.seeds], device=model.device)
        length = {"max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}
        mask = torch.ones_like(ids)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **length)
        return int(out[:, ids.shape[1] :].numel())

    sampling = Sampling(max_new_tokens=args.max_new_tokens)
    return {"bare": bare, "ours": lambda: sum(len(c.token_ids) for c in engine.generate(requests, sampling))}, []


def vllm_contestants(path: Any, args: argparse.Namespace) -> tuple[dict[str, Contestant], list[Contestant]]:
    from lit_grpo.engines.vllm.engine import VLLMEngine

    engine = VLLMEngine(
        path,
        end_token_ids=(),  # nobody stops early, so all contestants make equally many tokens
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.max_new_tokens,
        max_num_seqs=args.max_num_seqs,
        **({"load_format": "auto"} | args.engine_args),
    )
    requests = make_requests(engine._vocab_size, args)
    sampling = Sampling(max_new_tokens=args.max_new_tokens)
    contestants = make_contestants(engine, requests, sampling)
    if args.only is not None:
        contestants = {name: run for name, run in contestants.items() if name in ("bare", "ours", *args.only)}
    return contestants, [engine.close]


def make_contestants(engine: Any, requests: list[Request], sampling: Sampling) -> dict[str, Contestant]:
    """Give the contestants by name; each runs all requests and returns the number of tokens made."""
    from vllm import SamplingParams

    from lit_grpo.engines.vllm.engine import _sampling_params

    def bare(groups: bool = False, read_objects: bool = False, seeded: bool = True) -> int:
        prompts, params = [], []
        for request in requests:
            for seed in request.seeds[:1] if groups else request.seeds:
                prompts.append({"prompt_token_ids": list(request.token_ids)})
                one: SamplingParams = _sampling_params(sampling, (), seed)
                one.n = len(request.seeds) if groups else 1
                one.flat_logprobs = not read_objects
                one.seed = one.seed if seeded else None
                params.append(one)
        engine._llm.reset_prefix_cache()
        with as_vllm_made_it(engine):
            results = [c for r in engine._llm.generate(prompts, params, use_tqdm=False) for c in r.outputs]
        if read_objects:
            for c in results:
                tuple(at[token].logprob for token, at in zip(c.token_ids, c.logprobs, strict=True))
        return sum(len(c.token_ids) for c in results)

    return {
        "bare": bare,
        "ours": lambda: sum(len(c.token_ids) for c in engine.generate(requests, sampling)),
        "bare, n": lambda: bare(groups=True),
        "bare, unseeded": lambda: bare(seeded=False),
        "bare, objects": lambda: bare(read_objects=True),
    }


@contextlib.contextmanager
def as_vllm_made_it(engine: Any) -> Iterator[None]:
    """Take out what a ``VLLMEngine`` puts in the place of a method of vLLM's."""
    client = engine._engine.engine_core
    ours = vars(client).pop("get_output")
    try:
        yield
    finally:
        client.get_output = ours


def make_requests(vocabulary: int, args: argparse.Namespace) -> list[Request]:
    import random

    draw = random.Random(0)
    return [
        Request(
            i,
            tuple(draw.randrange(vocabulary) for _ in range(args.prompt_tokens)),
            tuple(draw.randrange(2**63) for _ in range(args.samples)),
        )
        for i in range(args.prompts)
    ]


def write_shape(name: str, folder: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[name]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def describe(args: argparse.Namespace) -> str:
    import torch

    library = "transformers" if args.engine == "transformers" else "vllm"

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    number = importlib.import_module(library).__version__
    return (
        f"{args.engine}, {library} {number}, torch {torch.__version__}, {device}, "
        f"{args.model or args.shape}, {args.dtype}, "
        f"{args.prompts} prompts of {args.prompt_tokens} tokens x {args.samples} samples x {args.max_new_tokens} tokens"
    )


if __name__ == "__main__":
    sys.exit(main())
