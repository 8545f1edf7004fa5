"""Rewards: each looks at a batch of completions and gives every one a number."""

from lit_grpo.rewards.addition import AdditionReward
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.exact_match import ExactMatch
from lit_grpo.rewards.scoring import OnError, RewardError, check_rewards, score_all

__all__ = [
    "AdditionReward",
    "ExactMatch",
    "OnError",
    "Reward",
    "RewardError",
    "check_rewards",
    "score_all",
]
