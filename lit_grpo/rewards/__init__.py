"""Rewards: each looks at a batch of completions and gives every one a number."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_grpo.rewards.addition import AdditionReward
    from lit_grpo.rewards.base import Reward, judging_reward
    from lit_grpo.rewards.exact_match import ExactMatch
    from lit_grpo.rewards.math_verify import MathReward
    from lit_grpo.rewards.scoring import OnError, RewardError, check_rewards, score_all

_HOME = {
    "AdditionReward": "addition",
    "ExactMatch": "exact_match",
    "MathReward": "math_verify",
    "OnError": "scoring",
    "Reward": "base",
    "RewardError": "scoring",
    "check_rewards": "scoring",
    "judging_reward": "base",
    "score_all": "scoring",
}

__all__ = [
    "AdditionReward",
    "ExactMatch",
    "MathReward",
    "OnError",
    "Reward",
    "RewardError",
    "check_rewards",
    "judging_reward",
    "score_all",
]


def __getattr__(name: str) -> Any:
    # Worker processes import modules of this package; they must not pay for torch, which the classes above need.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
