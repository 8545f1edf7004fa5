"""Rollout engines: what samples completions. See :mod:`lit_grpo.engines.base` for the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.engines.base import EngineError, NamedWeights, RolloutEngine
from lit_grpo.engines.config import EngineConfig


def make_engine(
    config: EngineConfig,
    *,
    policy: Any,
    policy_config: Any,
    tokenizer: Any,
    end_token_ids: Sequence[int],
    max_model_len: int,
    seed: int,
) -> RolloutEngine:
    """The engine that ``config`` names, for the policy that is trained.

    Args:
        config: name and options.
        policy: a :class:`lit_grpo.policy.Policy`.
        policy_config: its :class:`lit_grpo.policy.PolicyConfig`.
        tokenizer: saved beside the weights where an engine needs a folder.
        end_token_ids: ids that end a completion.
        max_model_len: longest prompt plus completion of the run; ``config.max_model_len`` goes first.
        seed: of the run.
    """
    if config.name == "transformers":
        from lit_grpo.engines.transformers import TransformersEngine

        return TransformersEngine(policy.model, end_token_ids, config.batch_size)
    from lit_grpo.engines.vllm import make_vllm_engine

    return make_vllm_engine(
        config,
        policy=policy,
        policy_config=policy_config,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids,
        max_model_len=config.max_model_len or max_model_len,
        seed=seed,
    )


__all__ = ["EngineConfig", "EngineError", "NamedWeights", "RolloutEngine", "make_engine"]
