"""Rewards: each looks at a batch of completions and gives every one a number."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_grpo.rewards.addition import AdditionReward
    from lit_grpo.rewards.base import Reward, judging_reward, total_range
    from lit_grpo.rewards.by_source import RewardBySource, SourceReward
    from lit_grpo.rewards.choice import ChoiceReward
    from lit_grpo.rewards.code.reward import CodeReward
    from lit_grpo.rewards.combine import OnError, RewardError, check_rewards, score_all
    from lit_grpo.rewards.countdown import CountdownReward
    from lit_grpo.rewards.exact_match import ExactMatch
    from lit_grpo.rewards.format_tags import FormatReward
    from lit_grpo.rewards.function import FunctionReward
    from lit_grpo.rewards.judge import JudgeReward
    from lit_grpo.rewards.length import CosineReward, LengthReward, OverlongPenalty
    from lit_grpo.rewards.math.numeric import NumericReward
    from lit_grpo.rewards.math.verify import MathReward
    from lit_grpo.rewards.noise import NoisyReward
    from lit_grpo.rewards.reasoning_gym import ReasoningGymReward
    from lit_grpo.rewards.repetition import RepetitionPenalty

_HOME = {
    "AdditionReward": "addition",
    "ChoiceReward": "choice",
    "CodeReward": "code.reward",
    "CosineReward": "length",
    "CountdownReward": "countdown",
    "ExactMatch": "exact_match",
    "FormatReward": "format_tags",
    "FunctionReward": "function",
    "JudgeReward": "judge",
    "LengthReward": "length",
    "MathReward": "math.verify",
    "NoisyReward": "noise",
    "NumericReward": "math.numeric",
    "OnError": "combine",
    "OverlongPenalty": "length",
    "RepetitionPenalty": "repetition",
    "ReasoningGymReward": "reasoning_gym",
    "Reward": "base",
    "RewardBySource": "by_source",
    "RewardError": "combine",
    "SourceReward": "by_source",
    "check_rewards": "combine",
    "judging_reward": "base",
    "score_all": "combine",
    "total_range": "base",
}

__all__ = [
    "AdditionReward",
    "ChoiceReward",
    "CodeReward",
    "CosineReward",
    "CountdownReward",
    "ExactMatch",
    "FormatReward",
    "FunctionReward",
    "JudgeReward",
    "LengthReward",
    "MathReward",
    "NoisyReward",
    "NumericReward",
    "OnError",
    "OverlongPenalty",
    "ReasoningGymReward",
    "RepetitionPenalty",
    "Reward",
    "RewardBySource",
    "RewardError",
    "SourceReward",
    "check_rewards",
    "judging_reward",
    "score_all",
    "total_range",
]


def __getattr__(name: str) -> Any:
    # Worker processes import modules of this package; they must not pay for what the other classes need.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
