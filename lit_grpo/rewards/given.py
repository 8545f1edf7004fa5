"""What people hand over as rewards in Python: rewards, or functions that become one."""

from __future__ import annotations

import inspect
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.function import FunctionReward


def as_rewards(given: Any, key: str) -> list[Reward]:
    """Return the rewards that a value stands for.

    Args:
        given: a list of rewards and functions, one of these alone, or None. A function is scored by a
            :class:`lit_grpo.rewards.FunctionReward` of default settings: the names of its parameters say what it gets.
        key: key of the configuration, for messages.

    Raises:
        UserError: something is neither, or a function asks for something that no reward gets.
    """
    if given is None:
        return []
    return [_as_reward(one, key) for one in (given if isinstance(given, (list, tuple)) else [given])]


def _as_reward(given: Any, key: str) -> Reward:
    if isinstance(given, Reward):
        return given
    if inspect.isclass(given):
        raise UserError(
            f"{given.__name__} is a class, not a reward", where=key, remedy=f"make one of it: {given.__name__}(...)"
        )
    if callable(given):
        return FunctionReward(given)
    raise UserError(
        f"{given!r:.60} is no reward",
        where=key,
        remedy="give rewards, as MathReward(), or functions of what they score: def right(text, answer)",
    )
