"""Scoring for :class:`lit_grpo.rewards.ReasoningGymReward`, which runs in worker processes.

It is a module of its own, because a worker imports all of the module that holds its function.
"""

from __future__ import annotations

from typing import Any

_SCORERS: dict[str, Any] = {}


def warm_up() -> None:
    """Import reasoning-gym before the first time limit begins to run."""
    import reasoning_gym  # noqa: F401


def score_entry(item: tuple[str, dict[str, Any], str]) -> float:
    """Score an answer with its task's own function.

    Args:
        item: name of the task, the problem as the task made it, and the answer.
    """
    import reasoning_gym

    task, entry, answer = item
    if task not in _SCORERS:
        _SCORERS[task] = reasoning_gym.get_score_answer_fn(task)
    return float(_SCORERS[task](answer, entry))
