"""A tiny training run that tests share: a random model, single-digit addition, the transformers engine."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.context import RunContext
from lit_grpo.data import AdditionPrompts, PromptFormat
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.rewards.base import Reward
from lit_grpo.tracking import RunLogger
from lit_grpo.types import Completion, Prompt, RewardInput, Rollout, Sampling, Score

TINY = TinyModel(width=32, layers=2, heads=2)


class EvenReward(Reward):
    """Reward of 1 where the ids sum to an even number: true of half of a random model's, so groups have spread."""

    def score(self, batch: Any) -> list[Score]:
        return [Score(float(sum(item.completion.token_ids) % 2 == 0)) for item in batch]


def module(**changes: Any) -> LitGRPO:
    settings: dict[str, Any] = {
        "policy": PolicyConfig(tiny=TINY),
        "objective": ObjectiveConfig(),
        "optimizer": OptimizerConfig(lr=1e-2),
        # All completions of a rollout this small: what a few say of it depends on how it is split.
        "step_kl_samples": 16,
        "micro_batch_size": 8,
    }
    return LitGRPO(**(settings | changes))


def data(**changes: Any) -> RolloutDataModule:
    settings: dict[str, Any] = {
        "prompts": AdditionPrompts(digits=1),
        "rewards": [EvenReward()],
        "group_size": 4,
        "prompts_per_rollout": 4,
        "rollouts": 3,
        "sampling": Sampling(max_new_tokens=5),
    }
    return RolloutDataModule(**(settings | changes))


def context(rollouts: int, **changes: Any) -> RunContext:
    """The shape of a run of two groups of four, for modules that are trained without a data module."""
    settings: dict[str, Any] = {"group_size": 4, "prompts_per_rollout": 2, "max_new_tokens": 6,
                                "primary_range": (0.0, 1.0)}  # fmt: skip
    return RunContext(rollouts=rollouts, **(settings | changes))


def kept_in(folder: Any) -> RunLogger:
    """A logger that keeps the run in this very folder, and nowhere else."""
    return RunLogger(run_dir=str(folder), tracking_uri="none")


def trainer(**changes: Any) -> pl.Trainer:
    """A quiet trainer; with ``default_root_dir`` and without a logger the run is kept in that very folder."""
    if "default_root_dir" in changes and "logger" not in changes:
        changes["logger"] = kept_in(changes["default_root_dir"])
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**(settings | changes))


def rollout(rewards: list[float], lengths: list[int], group_size: int, *, seed: int = 0, **changes: Any) -> Rollout:
    """Make a rollout of random ids with given rewards and lengths, prompts of different lengths.

    No model sampled it: its log-probabilities are unknown (NaN).
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 12, (count,), generator=generator).tolist())

    groups = len(rewards) // group_size
    settings: dict[str, Any] = {
        "index": 0,
        "prompts": [Prompt(f"p{g}", "", ids(2 + g), "0") for g in range(groups)],
        "completions": [
            Completion(i // group_size, i % group_size, ids(n), tuple([float("nan")] * n), "stop", 0)
            for i, n in enumerate(lengths)
        ],
        "texts": [""] * len(rewards),
        "rewards": {"even": torch.tensor(rewards)},
        "reward": torch.tensor(rewards),
        "correct": torch.tensor(rewards) >= 1,
        "flipped_reward": 1 - torch.tensor(rewards),
        "group_size": group_size,
    }
    return Rollout(**(settings | changes))


class Recorder(pl.Callback):
    """Callback that keeps the metrics, ids, prompts and policy versions of each rollout."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.ids: list[list[tuple[int, ...]]] = []
        self.prompts: list[list[str]] = []
        self.versions: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        self.versions.append((batch.policy_version, pl_module.policy_version))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Rollout, batch_idx: int) -> None:
        timed = ("time/", "time/tokens_per_second", "memory/")
        self.metrics.append({k: v for k, v in pl_module.step_metrics.items() if not k.startswith(timed)})
        self.ids.append([c.token_ids for c in batch.completions])
        self.prompts.append([p.id for p in batch.prompts])


def weights(module: LitGRPO) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([w.flatten() for _, w in module.named_weights()]).clone()


__all__ = [
    "TINY",
    "EvenReward",
    "PromptFormat",
    "Recorder",
    "RewardInput",
    "context",
    "data",
    "module",
    "rollout",
    "trainer",
    "weights",
]
