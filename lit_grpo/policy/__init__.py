"""The model that is trained: how it is loaded, what it says of each token, and what steps its weights."""

from lit_grpo.policy.config import (
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    QuantizationConfig,
    ReferenceConfig,
    TinyModel,
)
from lit_grpo.policy.critic import Critic
from lit_grpo.policy.forward.batching import Layout, PolicyInput, pack_rows, pad_rows, share_prompts
from lit_grpo.policy.forward.policy import Policy, TokenStats

__all__ = [
    "Critic",
    "CriticConfig",
    "Layout",
    "LoraConfig",
    "OptimizerConfig",
    "Policy",
    "PolicyConfig",
    "PolicyInput",
    "QuantizationConfig",
    "ReferenceConfig",
    "TinyModel",
    "TokenStats",
    "pack_rows",
    "pad_rows",
    "share_prompts",
]
