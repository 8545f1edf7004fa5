"""The work of :class:`lit_grpo.rewards.ReasoningGymReward` in worker processes, which alone import the package."""

from __future__ import annotations

from typing import Any

_SCORERS: dict[str, Any] = {}


def warm_up() -> None:
    """Import the package before the first time limit begins to run."""
    import reasoning_gym  # noqa: F401


def score_entry(item: tuple[str, dict[str, Any], str]) -> float:
    """Score an item of task, entry of the task, and answer."""
    import reasoning_gym

    task, entry, answer = item
    if task not in _SCORERS:
        _SCORERS[task] = reasoning_gym.get_score_answer_fn(task)
    return float(_SCORERS[task](answer, entry))
