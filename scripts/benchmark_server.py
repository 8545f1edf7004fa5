#!/usr/bin/env python3
"""Measure what our client of a vLLM server costs beside the least that a client can do, on the same server.

    python scripts/benchmark_server.py --shape tiny
    python scripts/benchmark_server.py --model models/SmolLM2-135M-Instruct --prompts 16 --max-new-tokens 64

Every round runs each contestant once, in turn, so that a busy machine slows all of them alike.

* ``bare``: aiohttp posts the same bodies and parses the answers, which nobody looks at.
* ``ours``: ``VLLMServer.generate``, every completion read.

The last lines give our median over bare's, in time and in CPU time of this process, and the seconds of a sync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lit_grpo.types import Sampling
from scripts.benchmark_rollout import SHAPES, make_requests, write_shape


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder of a Hugging Face model")
    source.add_argument("--shape", choices=SHAPES, help="a Qwen2-shaped model of this size with random weights")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="every completion has exactly this length")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    args = parser.parse_args()

    from lit_grpo.engines import ServerConfig
    from lit_grpo.engines.vllm.settings import sampling_settings
    from lit_grpo.engines.vllm_server.engine import VLLMServer

    model = load(args)
    vocabulary = model.config.get_text_config().vocab_size
    requests = make_requests(vocabulary, args)
    sampling = Sampling(max_new_tokens=args.max_new_tokens)
    engine = VLLMServer(
        model.config,
        ServerConfig(),
        end_token_ids=(),
        max_model_len=args.prompt_tokens + args.max_new_tokens,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
    )
    try:
        syncs = [timed(lambda: engine.sync(model.named_parameters(), 0))[0] for _ in range(3)]
        bodies = [
            {"token_ids": list(r.token_ids), "sampling_params": sampling_settings(sampling, (), seed)}
            for r in requests
            for seed in r.seeds
        ]
        contestants: dict[str, Callable[[], int]] = {
            "bare": lambda: asyncio.run(bare(engine, bodies, args.max_num_seqs + 32)),
            "ours": lambda: sum(len(c.token_ids) for c in engine.generate(requests, sampling)),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
        for number in range(args.rounds + 1):
            for name, run in contestants.items():
                wall, cpu, tokens = timed(run)
                assert tokens == args.prompts * args.samples * args.max_new_tokens
                if number:  # the first warms up
                    results[name].append((wall, cpu))
                    print(f"round {number}  {name:5} {tokens / wall:9,.0f} tokens/s  cpu {cpu:6.2f} s", flush=True)
    finally:
        engine.close()
    wall, cpu = (
        statistics.median(r[k] for r in results["ours"]) / statistics.median(r[k] for r in results["bare"])
        for k in (0, 1)
    )
    print(f"{platform.machine()}, {vars(args)}")
    print(f"ours / bare: time {wall:.3f}, CPU time {cpu:.3f}; sync {statistics.median(syncs):.2f} s")
    return 0


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Give seconds, CPU seconds of this process, and the result of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - cpu, result


async def bare(engine: Any, bodies: list[Any], connections: int) -> int:
    """Post the bodies, parse the answers, and count the tokens sampled."""
    import aiohttp

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        await (await session.post(f"{engine._http.url}/reset_prefix_cache")).read()

        async def one(body: Any) -> int:
            async with session.post(f"{engine._http.url}/inference/v1/generate", json=body) as answer:
                content = json.loads(await answer.read())
                assert answer.status == 200, content
                return len(content["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*(one(body) for body in bodies)))


def load(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or write_shape(args.shape, Path(folder))
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


if __name__ == "__main__":
    sys.exit(main())
