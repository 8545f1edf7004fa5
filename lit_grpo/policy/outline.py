"""The policy before it is loaded: its configuration, and the names and sizes of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.policy.config import PolicyConfig
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.forward.routing import Routers
from lit_grpo.policy.model.load import load_model
from lit_grpo.types import WeightForm


class PolicyOutline:
    """The policy on the device ``meta``, for what needs none of its weights, which are not read.

    It is made when it is first asked for anything, since that takes the import of the model's code; random state is
    left as it was. How the learner computes (compiled, recomputing activations) is no part of it.

    Args:
        config: settings of the policy.

    Raises:
        UserError: when it is made, as when the policy is loaded: the model is not there, or a setting does not fit it.
    """

    sharded = False
    """Whether each rank holds only a shard of the weights; there are none."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    @cached_property
    def _policy(self) -> Policy:
        plain = replace(self._config, compile=False, gradient_checkpointing=False, attention="auto")
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return Policy(load_model(plain), plain.logits_chunk)

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._policy.model

    def named_weights(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, tensor of the weight's shape), see :meth:`Policy.named_weights`."""
        return self._policy.named_weights(form)

    def without_adapters(self) -> nn.Module:
        """Return a model into which the named weights fit."""
        return self._policy.without_adapters()

    def record_router_outputs(self, model: nn.Module) -> Routers:
        """Record the routers of ``model``."""
        return self._policy.record_router_outputs(model)
