"""The critic: a value for the state before each completion token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.policy.batching import PolicyInput
from lit_grpo.policy.config import CriticConfig, PolicyConfig
from lit_grpo.policy.load import load_model
from lit_grpo.policy.policy import hidden_states, switch_off_dropout


class Critic(nn.Module):
    """A base model from transformers with a linear value head, its weights zero at the start: every value begins at 0,
    or in the middle of the range if ``bounded``.

    Args:
        base: trunk, without output layer.
        config: see :class:`CriticConfig`.
    """

    base: Any

    def __init__(self, base: nn.Module, config: CriticConfig) -> None:
        super().__init__()
        self.base = base
        self.config = config
        self.head = nn.Linear(int(self.base.config.get_text_config().hidden_size), 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        switch_off_dropout(base)

    def forward(self, batch: PolicyInput) -> Tensor:
        """Value of the state before each completion token, [n, T] float32, 0 where there is no token.

        The layout of the batch is that of the policy, shared prompts included: what predicts a token also values the
        state before it.
        """
        states, _ = hidden_states(self.base, batch)
        hidden = states.flatten(0, 1)[batch.source]  # [M, D]
        values = self.head(hidden.to(self.head.weight.dtype)).float()[:, 0]
        if self.config.bounded:
            low, high = self.config.value_low, self.config.value_high
            values = low + (high - low) * torch.sigmoid(values)
        return batch.scatter(values)


def make_critic(policy: PolicyConfig, config: CriticConfig) -> Critic:
    """A critic whose trunk is a copy of the untrained policy's base model."""
    return Critic(load_model(policy).base_model, config)
