"""What validation, test and prediction say of a batch of completions."""

from __future__ import annotations

from typing import Any

from lit_grpo.metrics import StepMetrics, add_rollout_metrics
from lit_grpo.types import Rollout


def records(batch: Rollout) -> list[dict[str, Any]]:
    """One record a completion: prompt id, question, completion, rewards."""
    return [
        {
            "id": batch.prompts[i // batch.group_size].id,
            "question": batch.prompts[i // batch.group_size].question,
            "completion": text,
            "finish_reason": batch.completions[i].finish_reason,
            "reward": float(batch.reward[i]),
            "rewards": {name: float(values[i]) for name, values in batch.rewards.items()},
        }
        for i, text in enumerate(batch.texts)
    ]


def means(batch: Rollout) -> dict[str, tuple[float, int]]:
    """Mean and number of completions, by metric."""
    metrics = StepMetrics()
    add_rollout_metrics(metrics, batch)
    keys = ("reward", "length", "truncated", *(f"reward/{name}" for name in batch.rewards))
    return {
        key: (float(metrics.sums[key].total / metrics.sums[key].weight), int(metrics.sums[key].weight)) for key in keys
    }
