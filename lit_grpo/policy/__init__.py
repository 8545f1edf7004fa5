"""The model that is trained: loading, log-probabilities and entropies, weights by name."""

from lit_grpo.policy.batching import PolicyInput, pad_rows, share_prompts
from lit_grpo.policy.config import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.policy.policy import Policy, TokenStats

__all__ = [
    "OptimizerConfig",
    "Policy",
    "PolicyConfig",
    "PolicyInput",
    "TinyModel",
    "TokenStats",
    "pad_rows",
    "share_prompts",
]
