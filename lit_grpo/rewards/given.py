"""What people hand over as rewards in Python: rewards, or functions that become one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.function import FunctionReward
from lit_grpo.utils.arguments import made_in_python


def as_rewards(given: Any, key: str) -> list[Reward]:
    """Return the rewards that a value stands for.

    Args:
        given: a list of rewards and functions, one of these alone, or None. A function, or the import path of one, is
            scored by a :class:`lit_grpo.rewards.FunctionReward` of default settings: the names of its parameters say
            what it gets.
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
    if isinstance(given, str) and "." in given:
        return FunctionReward(given)
    raise UserError(f"{given!r:.60} is no reward", where=key, remedy=_instead(given))


def _instead(given: Any) -> str:
    """Say what to give in the place of something that is no reward."""
    if isinstance(given, Mapping) and "class_path" in given:
        return made_in_python(given)
    if isinstance(given, Mapping) and given:
        return "name each: " + ", ".join(f"FunctionReward(function, name={name!r})" for name in given)
    if isinstance(given, list | tuple) and any(isinstance(one, int | float) for one in given):
        return "give its weight to the reward: FunctionReward(function, weight=0.5), MathReward(weight=0.5)"
    if isinstance(given, str):
        return f"make one, {given}(), or give the import path of a function, 'my_module.my_function'"
    return "give rewards, as MathReward(), or functions of what they score: def right(text, answer)"
