"""Runs without an engine, shared by the tests of what is prepared before an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lit_grpo.types import Rollout
from tests import tiny

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
LENGTHS = [3, 1, 5, 2, 4, 4, 1, 6]


class Given:
    """A sized loader of given rollouts, each as if sampled by the weights before it."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.rollouts = rollouts
        for version, item in enumerate(rollouts):
            for completion in item.completions:
                object.__setattr__(completion, "policy_version", version)

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Any:
        return iter(self.rollouts)


class Watch(tiny.Recorder):
    """Recorder that also keeps the weights of policy and critic after each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: list[torch.Tensor] = []
        self.critic: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.policy.append(tiny.weights(pl_module))
        if pl_module.critic is not None:
            self.critic.append(vector(pl_module.critic))


def vector(model: Any) -> torch.Tensor:
    """Return all weights of a model as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def rollout(**changes: Any) -> Rollout:
    settings: dict[str, Any] = {"rewards": REWARDS, "lengths": LENGTHS, "group_size": 4}
    return tiny.rollout(**(settings | changes))


def part(whole: Rollout, rank: int) -> Rollout:
    """Return one of the two groups of a rollout, as the only one of its rank."""
    rows = slice(4 * rank, 4 * rank + 4)
    return replace(
        whole,
        prompts=[whole.prompts[rank]],
        completions=[replace(c, request=0) for c in whole.completions[rows]],
        texts=whole.texts[rows],
        rewards={name: values[rows] for name, values in whole.rewards.items()},
        reward=whole.reward[rows],
        correct=None if whole.correct is None else whole.correct[rows],
        flipped_reward=None if whole.flipped_reward is None else whole.flipped_reward[rows],
    )


def fit(count: int = 2, *, batches: Any = None, callbacks: Any = (), **changes: Any) -> tuple[Any, Watch]:
    """Train on ``count`` given rollouts; returns the module and what was seen."""
    module, watch = tiny.module(**changes), Watch()
    loader = Given(*(batches or [rollout(seed=k) for k in range(count)]))
    module.connect(tiny.context(len(loader)))
    tiny.trainer(callbacks=[watch, *callbacks]).fit(module, loader)
    return module, watch
