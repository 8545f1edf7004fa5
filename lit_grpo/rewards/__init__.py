"""Rewards: each looks at a batch of completions and gives every one a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.utils.imports import lazy_attributes

if TYPE_CHECKING:
    from lit_grpo.rewards.addition import AdditionReward as AdditionReward
    from lit_grpo.rewards.base import Reward as Reward
    from lit_grpo.rewards.base import primary_reward as primary_reward
    from lit_grpo.rewards.base import total_range as total_range
    from lit_grpo.rewards.choice import ChoiceReward as ChoiceReward
    from lit_grpo.rewards.code.reward import CodeReward as CodeReward
    from lit_grpo.rewards.combine import OnError as OnError
    from lit_grpo.rewards.combine import RewardError as RewardError
    from lit_grpo.rewards.combine import check_rewards as check_rewards
    from lit_grpo.rewards.combine import score_all as score_all
    from lit_grpo.rewards.countdown import CountdownReward as CountdownReward
    from lit_grpo.rewards.exact_match import ExactMatch as ExactMatch
    from lit_grpo.rewards.format_tags import FormatReward as FormatReward
    from lit_grpo.rewards.function import FunctionReward as FunctionReward
    from lit_grpo.rewards.judge import JudgeReward as JudgeReward
    from lit_grpo.rewards.length import CosineReward as CosineReward
    from lit_grpo.rewards.length import LengthReward as LengthReward
    from lit_grpo.rewards.math.numeric import NumericReward as NumericReward
    from lit_grpo.rewards.math.verify import MathReward as MathReward
    from lit_grpo.rewards.reasoning_gym import ReasoningGymReward as ReasoningGymReward
    from lit_grpo.rewards.repetition import RepetitionPenalty as RepetitionPenalty
    from lit_grpo.rewards.wrappers import GatedReward as GatedReward
    from lit_grpo.rewards.wrappers import RewardBySource as RewardBySource
    from lit_grpo.rewards.wrappers import SourceReward as SourceReward

_MODULES = {
    "AdditionReward": "addition",
    "ChoiceReward": "choice",
    "CodeReward": "code.reward",
    "CosineReward": "length",
    "CountdownReward": "countdown",
    "ExactMatch": "exact_match",
    "FormatReward": "format_tags",
    "FunctionReward": "function",
    "GatedReward": "wrappers",
    "JudgeReward": "judge",
    "LengthReward": "length",
    "MathReward": "math.verify",
    "NumericReward": "math.numeric",
    "OnError": "combine",
    "ReasoningGymReward": "reasoning_gym",
    "RepetitionPenalty": "repetition",
    "Reward": "base",
    "RewardBySource": "wrappers",
    "RewardError": "combine",
    "SourceReward": "wrappers",
    "check_rewards": "combine",
    "primary_reward": "base",
    "score_all": "combine",
    "total_range": "base",
}

# Worker processes import modules of this package; they must not pay for what the other classes need.
__getattr__ = lazy_attributes(__name__, _MODULES)
__all__ = sorted(_MODULES)
