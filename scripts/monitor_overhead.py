#!/usr/bin/env python
"""Measure what all monitors together, and the metrics made for them alone, cost of a training step.

    python scripts/monitor_overhead.py --model models/SmolLM2-135M-Instruct --rollouts 4

Trains on one-digit sums with the transformers engine (8 prompts x 8 samples of at most 12 tokens (--tokens), as
configs/addition_smollm2_cpu.yaml) and a HealthMonitor, and times it from inside: the monitors, the metrics that tell
broken plumbing and degenerate text (lit_grpo/learner/rollout_metrics.py), and the whole of each rollout, sampling
included. The first rollout is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TIMED = {
    "audit": {
        "lit_grpo.module": ("add_audit_metrics",),
        "lit_grpo.learner.optimizer_step": ("add_direction", "gradient_cosine", "update_size"),
    },
    "step_kl": {"lit_grpo.module": ("measure_step",)},
}
"""Functions by what they are counted as: metrics that need no pass, and the pass after the last update."""


class Clock:
    """Adds up the seconds spent in some functions, rollout by rollout."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.rollouts: list[dict[str, float]] = []

    def timed(self, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[key] = self.now.get(key, 0.0) + time.perf_counter() - started

        return call


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12, help="most tokens of a completion")
    args = parser.parse_args(argv)
    if args.rollouts < 2:
        parser.error("--rollouts must be at least 2: the first is left out")
    seconds = measure(args.model, args.rollouts, args.tokens)
    whole = statistics.median(s["rollout"] for s in seconds)
    print(f"a rollout takes {whole:.2f} s (median of {len(seconds)})")
    total = 0.0
    for key in ("monitors", "audit", "step_kl"):
        spent = statistics.median(s.get(key, 0.0) for s in seconds)
        total += spent
        print(f"{key}: {1000 * spent:.1f} ms, {100 * spent / whole:.3f} %")
    print(f"together: {100 * total / whole:.3f} % of a rollout")
    return 0


def measure(model: str, rollouts: int, tokens: int = 12) -> list[dict[str, float]]:
    """Seconds of each rollout but the first, by what they were spent on."""
    import importlib

    import lightning.pytorch as pl

    from lit_grpo import LitGRPO, RolloutDataModule
    from lit_grpo.callbacks import HealthMonitor
    from lit_grpo.data import AdditionPrompts
    from lit_grpo.engines import EngineConfig
    from lit_grpo.policy import OptimizerConfig, PolicyConfig
    from lit_grpo.rewards import AdditionReward
    from lit_grpo.types import Sampling

    clock = Clock()

    class Lap(pl.Callback):
        """Comes last; a rollout begins where the one before ended, so sampling belongs to it."""

        started = 0.0

        def on_train_batch_end(self, *_: Any) -> None:
            now = time.perf_counter()
            if self.started:
                clock.rollouts.append({**clock.now, "rollout": now - self.started})
            self.started = time.perf_counter()
            clock.now.clear()

    monitor = HealthMonitor(actions={"critical": "log"})
    for hook in ("on_train_batch_end", "veto_update", "limit_update"):
        setattr(monitor, hook, clock.timed("monitors", getattr(monitor, hook)))
    prompts = AdditionPrompts(digits=1, template="What is {a} + {b}? Answer with just the number.")
    with ExitStack() as stack:
        for key, modules in TIMED.items():
            for name, functions in modules.items():
                module = importlib.import_module(name)
                for function in functions:
                    wrapped = clock.timed(key, getattr(module, function))
                    stack.enter_context(mock.patch.object(module, function, wrapped))
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[monitor, Lap()],
            default_root_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(
            LitGRPO(policy=PolicyConfig(path=model), optimizer=OptimizerConfig(lr=1e-5), micro_batch_size=64),
            datamodule=RolloutDataModule(
                prompts=prompts,
                rewards=[AdditionReward()],
                group_size=8,
                prompts_per_rollout=8,
                rollouts=rollouts,
                sampling=Sampling(max_new_tokens=tokens),
                engine=EngineConfig(name="transformers", batch_size=64),
            ),
        )
    return clock.rollouts


if __name__ == "__main__":
    raise SystemExit(main())
