"""A module and a loader with the outer shape of LitGRPO and RolloutDataModule, without any language model."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from lit_grpo.types import Completion, Prompt, Rollout
from tests.tiny import kept_in


def make_rollout(index: int, groups: int = 2, group_size: int = 2) -> Rollout:
    """A rollout whose completion ``i`` has reward ``i`` modulo 2."""
    count = groups * group_size
    reward = torch.arange(count).remainder(2).float()
    return Rollout(
        index=index,
        prompts=[Prompt(f"p{g}", f"{g}+{g}=", (1, 2, 3), str(2 * g)) for g in range(groups)],
        completions=[
            Completion(i // group_size, i % group_size, (4, 5), (-0.5, -0.5), "stop", index) for i in range(count)
        ],
        texts=[f"answer {i}" for i in range(count)],
        rewards={"right": reward},
        reward=reward,
        correct=reward > 0,
        group_size=group_size,
    )


class StandInLoader:
    """Sized and resumable."""

    def __init__(self, count: int) -> None:
        self.count, self.next = count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        while self.next < self.count:
            rollout = make_rollout(self.next)
            self.before_yield(self.next)
            self.next += 1
            yield rollout

    def before_yield(self, index):
        """For tests that break in while a rollout is made."""

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class StandInData(pl.LightningDataModule):
    """Says how long the run is, as RolloutDataModule does."""

    def __init__(self, rollouts: int, loader: StandInLoader | None = None) -> None:
        super().__init__()
        self.rollouts, self.loader = rollouts, loader or StandInLoader(rollouts)

    def train_dataloader(self):
        return self.loader


class StandIn(pl.LightningModule):
    """Two weights, manual optimization, three logged metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters({"policy": {"path": "somewhere"}, "note": "x" * 400})
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.policy_version = 0

    def training_step(self, batch, batch_idx):
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.weight**2).sum())
        optimizer.step()
        self.policy_version += 1
        self.during_step(batch_idx)
        self.log_dict(
            {
                "reward": batch.index / 10,
                "policy/entropy": 1.0 / (1 + batch.index),
                "completions/length": 2.0,
                "optim/grad_norm": 0.5,
            },
            batch_size=1,
        )

    def during_step(self, batch_idx):
        """For tests that break in after the optimizer's step."""

    def configure_optimizers(self):
        return torch.optim.AdamW([self.weight], lr=0.1)


def make_trainer(logger, callbacks=(), **kwargs) -> pl.Trainer:
    """A trainer as the command line sets it up, without progress bar; without a logger, in ``default_root_dir``."""
    if logger is False and "default_root_dir" in kwargs:
        logger = kept_in(kwargs["default_root_dir"])
    defaults = {
        "max_epochs": 1,
        "min_epochs": 0,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(logger=logger, callbacks=list(callbacks), **{**defaults, **kwargs})
