"""Your own Trainer and callback around LitGRPO: it stops when the last rollouts are good enough.

python docs/examples/own_trainer.py
"""

from collections import deque
from typing import Any

import lightning.pytorch as pl

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.callbacks import HealthMonitor
from lit_grpo.data import AdditionPrompts
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Sampling


class GoodEnough(pl.Callback):
    """Stops the run when the mean reward of the last rollouts has reached a bar.

    One Lightning batch is one rollout, so ``on_train_batch_end`` comes once a rollout, after all its updates.
    """

    def __init__(self, bar: float, rollouts: int = 5) -> None:
        self.bar, self.rewards = bar, deque[float](maxlen=rollouts)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        # Everything of docs/metrics.md is in step_metrics, the same numbers on every rank.
        self.rewards.append(pl_module.step_metrics["reward"])
        if len(self.rewards) == self.rewards.maxlen and sum(self.rewards) / len(self.rewards) >= self.bar:
            trainer.should_stop = True


def main(rollouts: int = 150, bar: float = 0.5) -> pl.Trainer:
    """Train a tiny random model on sums of one digit."""
    pl.seed_everything(0)
    module = LitGRPO(
        policy=PolicyConfig(tiny=TinyModel()),
        objective=ObjectiveConfig(recipe="grpo", entropy_coef=0.03),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    data = RolloutDataModule(
        AdditionPrompts(digits=1),
        [ExactMatch()],
        prompts_per_rollout=50,
        group_size=20,
        rollouts=rollouts,
        sampling=Sampling(max_new_tokens=3),
    )
    watching = [GoodEnough(bar), HealthMonitor()]
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=watching)
    trainer.fit(module, datamodule=data)
    print(f"stopped after {trainer.global_step} rollouts, reward {module.step_metrics['reward']:.2f}")
    return trainer


if __name__ == "__main__":
    main()
