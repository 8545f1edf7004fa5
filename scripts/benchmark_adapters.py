"""Measure adapters (LoRA) merged into the weights that vLLM gets, beside adapters that come by themselves.

    python scripts/benchmark_adapters.py                                    # SmolLM2-135M, float32, CPU
    python scripts/benchmark_adapters.py --shape qwen2-1.5b --dtype bfloat16 --prompts 64 --samples 8 --tokens 256

Bytes and seconds of a sync (after the first, which brings everything), tokens a second, and how far the engine's
log-probabilities are from the learner's, after the adapters were moved as training moves them. Both ways sample in
turn, one engine at a time, and every median is over the syncs and generations of all turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor

from lit_grpo.engines import EngineConfig, EngineContext, make_engine
from lit_grpo.engines.base import weights_for
from lit_grpo.policy import LoraConfig, Policy, PolicyConfig
from lit_grpo.policy.model.load import load_model
from lit_grpo.types import Completion, Request, Sampling

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--shape", help="random weights of this shape instead (see benchmark_rollout.py)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--moved", type=float, default=1e-3, help="standard deviation of what is added to the adapters")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if args.shape:
            from benchmark_rollout import write_shape

            write_shape(args.shape, Path(folder))
            path = folder
        config = PolicyConfig(path=path, dtype=args.dtype, lora=LoraConfig(rank=args.rank, alpha=2.0 * args.rank))
        policy = Policy(load_model(config))
        if torch.cuda.is_available():
            policy.cuda()
        move(policy, args.moved, 0)
        found: dict[str, dict[str, list[float]]] = {"merged": {}, "hot": {}}
        for turn in range(args.turns):
            for adapters, values in found.items():
                measure(args, config, policy, adapters, values, turn)
    print("| | MB a sync | ms a sync | first sync ms | tokens/s | mean gap, nats | largest gap |")
    print("|" + "---|" * 7)
    for adapters, values in found.items():
        middle = {name: statistics.median(seen) for name, seen in values.items()}
        print(
            f"| {adapters} | {middle['bytes'] / 1e6:.1f} | {1e3 * middle['sync']:.1f} | {1e3 * middle['first']:.0f} | "
            f"{middle['speed']:.0f} | {middle['gap']:.2g} | {middle['largest']:.2g} |"
        )
    return 0


def move(policy: Policy, by: float, seed: int) -> None:
    """Change the adapters as an optimizer step does: everywhere by about as much."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data.add_(by * torch.randn(parameter.shape, generator=generator).to(parameter))


def measure(
    args: argparse.Namespace, config: PolicyConfig, policy: Policy, adapters: str, values: dict[str, list[float]],
    turn: int,
) -> None:  # fmt: skip
    """Start an engine, sync and sample several times, and add what that took to ``values``."""
    engine: Any = make_engine(
        EngineConfig(name="vllm", adapters=adapters, processes=args.processes, max_num_seqs=512),  # type: ignore[arg-type]
        EngineContext(policy=policy, policy_config=config, tokenizer=None, end_token_ids=(),
                      max_model_len=256 + args.tokens, seed=0),
    )  # fmt: skip
    sampling = Sampling(max_new_tokens=args.tokens)
    try:
        for number in range(args.syncs + 1):
            move(policy, args.moved / 10, 100 * turn + number)
            sizes: list[int] = []
            started = clock()
            engine.sync(counted(weights_for(engine, policy), sizes), number)
            seconds = clock() - started
            if not number:
                values.setdefault("first", []).append(seconds)
                list(engine.generate(requests(args, 0), sampling))  # kernels are compiled
                continue
            values.setdefault("sync", []).append(seconds)
            values.setdefault("bytes", []).append(float(sum(sizes)))
            asked, started = requests(args, number), clock()
            completions = list(engine.generate(asked, sampling))
            values.setdefault("speed", []).append(sum(len(c.token_ids) for c in completions) / (clock() - started))
            gaps = differences(policy, asked, completions[:16])
            values.setdefault("gap", []).append(float(gaps.mean()))
            values.setdefault("largest", []).append(float(gaps.max()))
    finally:
        engine.close()


def clock() -> float:
    """Return the time once the card has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def counted(weights: Any, sizes: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, and note their sizes in bytes."""
    for name, tensor in weights:
        sizes.append(tensor.nbytes)
        yield name, tensor


def requests(args: argparse.Namespace, number: int) -> list[Request]:
    """Return prompts of 128 tokens, which are others in every generation."""
    generator = torch.Generator().manual_seed(number)
    prompts = torch.randint(0, 10_000, (args.prompts, 128), generator=generator).tolist()
    return [
        Request(i, tuple(ids), tuple(range(1000 * i, 1000 * i + args.samples))) for i, ids in enumerate(prompts)
    ]  # fmt: skip


@torch.no_grad()
def differences(policy: Policy, asked: Sequence[Request], completions: Sequence[Completion]) -> Tensor:
    """Return how far what the engine says of each token is from what the learner says, in nats."""
    prompts, gaps = {r.index: r.token_ids for r in asked}, []
    device = next(policy.parameters()).device
    for c in completions:
        prompt = prompts[c.request]
        ids = torch.tensor([[*prompt, *c.token_ids]], device=device)
        logits = policy.model(ids).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids, device=device)[:, None])[:, 0]
        gaps.append((own.cpu() - torch.tensor(c.logprobs)).abs())
    return torch.cat(gaps)


if __name__ == "__main__":
    sys.exit(main())
