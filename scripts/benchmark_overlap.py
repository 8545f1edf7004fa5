#!/usr/bin/env python3
"""Measure what sampling beside the learner saves: the same run with max_staleness 0 and 1, in turn, in one process.

    OMP_NUM_THREADS=1 python scripts/benchmark_overlap.py   # CPU, two cores
    python scripts/benchmark_overlap.py --engine vllm_server --server-cuda 1 --accelerator gpu  # two cards
    OMP_NUM_THREADS=1 python scripts/benchmark_overlap.py --engine vllm

With 0 a step is generation + training, with 1 at best the longer of the two: the goal is at most 1.15 times that. The
model has random weights and all completions the same length, so that both runs do the same work.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", choices=["transformers", "vllm", "vllm_server"])
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--server-cuda", help="CUDA_VISIBLE_DEVICES of the server that is started")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further engine arguments, as JSON")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=10, help="of each run; the first three are left out")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(args.repeats):
        for staleness, steps in runs.items():
            steps += one_run(staleness, args)
    medians = {s: {k: statistics.median(step[k] for step in steps) for k in steps[0]} for s, steps in runs.items()}
    print(describe(args))
    for staleness, values in medians.items():
        print(f"max_staleness {staleness}: " + ", ".join(f"{key} {value:.3f}" for key, value in values.items()))
    alone = medians[0]
    learner = alone["step"] - alone["generation"]  # update, sync, logging: all that is not sampling
    longer = max(alone["generation"], learner)
    both = medians[1]["step"]
    share = f"{both / longer:.2f} x the longer of generation and everything else ({longer:.3f} s)"
    print(f"step with overlap {both:.3f} s = {share}")
    print(f"speed-up over one after the other: {alone['step'] / both:.2f} x")
    return 0


def one_run(staleness: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Measure the seconds of each step after the third."""
    import lightning.pytorch as pl

    import lit_grpo.datamodule
    from lit_grpo import LitGRPO, RolloutDataModule
    from lit_grpo.data import AdditionPrompts
    from lit_grpo.engines import EngineConfig
    from lit_grpo.objectives import ObjectiveConfig
    from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
    from lit_grpo.rewards import Reward
    from lit_grpo.types import Sampling, Score

    class Even(Reward):
        def score(self, batch: Any) -> list[Score]:
            return [Score(float(sum(item.completion.token_ids) % 2 == 0)) for item in batch]

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.last = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen, now = pl_module.step_metrics, time.perf_counter()
            step = {"step": now - self.last, "generation": seen["time/generate"] + seen["time/reward"]}
            self.steps.append(step | {"update": seen["time/update"], "sync": seen["time/sync"]})
            self.last = now

    lit_grpo.datamodule.end_token_ids = lambda *_: ()  # nobody stops early
    engine: dict[str, Any] = {"name": args.engine, "args": args.engine_args}
    if args.engine == "vllm_server" and args.server_cuda:
        from lit_grpo.engines.config import ServerConfig

        engine["server"] = ServerConfig(env={"CUDA_VISIBLE_DEVICES": args.server_cuda})
    shape = TinyModel(width=args.width, layers=args.layers, heads=args.heads, max_position=2048)
    pl.seed_everything(0, verbose=False)
    module = LitGRPO(
        policy=PolicyConfig(tiny=shape, dtype=args.dtype),
        objective=ObjectiveConfig(),
        optimizer=OptimizerConfig(lr=1e-6),
        micro_batch_size=args.micro_batch,
        updates_per_rollout=args.updates,
        max_staleness=staleness,
    )
    data = RolloutDataModule(
        prompts=AdditionPrompts(digits=2),
        rewards=[Even()],
        group_size=args.group_size,
        prompts_per_rollout=args.prompts,
        rollouts=args.rollouts,
        engine=EngineConfig(**engine),
        sampling=Sampling(max_new_tokens=args.new_tokens),
    )
    clock = Clock()
    pl.Trainer(
        max_epochs=1,
        accelerator=args.accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    ).fit(module, datamodule=data)
    return clock.steps[3:-1]  # while the last one trains, nothing is sampled any more


def describe(args: argparse.Namespace) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    size = f"width {args.width}, {args.layers} layers"
    work = f"{args.prompts} x {args.group_size} x {args.new_tokens} tokens, {args.updates} updates"
    threads = f"{torch.get_num_threads()} threads"
    return f"{args.engine} on {device}, {threads}, torch {torch.__version__}; {size}, {args.dtype}; {work}. Seconds:"


if __name__ == "__main__":
    raise SystemExit(main())
