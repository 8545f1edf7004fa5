"""Rollout engines: what samples completions. See :mod:`lit_grpo.engines.base` for the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.engines.base import EngineError, NamedWeights, RolloutEngine
from lit_grpo.engines.config import EngineConfig, ServerConfig
from lit_grpo.errors import UserError


def check_engine(config: EngineConfig, experts: bool = False) -> None:
    """What can be known before a model is loaded. Quick, imports nothing.

    Args:
        config: of the engine.
        experts: completions are to say which experts their tokens went through.

    Raises:
        UserError: the engine needs vLLM, which is not installed, or a setting contradicts another.
    """
    if experts and config.name != "transformers":
        raise UserError(
            f"the engine {config.name} does not hand over the experts that it chose while sampling",
            where="model.routing_replay",
            remedy="set model.routing_replay: old, or data.engine.name: transformers",
        )
    if config.name == "vllm":
        from lit_grpo.engines.vllm.start import check_installed

        check_installed()
    elif config.name == "vllm_server":
        from lit_grpo.engines.vllm_server.process import check_server_config

        check_server_config(config)


def make_engine(
    config: EngineConfig,
    *,
    policy: Any,
    policy_config: Any,
    tokenizer: Any,
    end_token_ids: Sequence[int],
    max_model_len: int,
    seed: int,
    beside_learner: bool = False,
    experts: bool = False,
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
        beside_learner: it samples in a thread while the learner changes its weights.
        experts: completions say which experts their tokens went through (mixture-of-experts models).
    """
    if config.name == "transformers":
        from lit_grpo.engines.transformers.engine import TransformersEngine

        # A sharded model does not sample: each token would gather every weight, on all ranks alike.
        own = beside_learner or policy.sharded
        model = policy.without_adapters() if own else policy.model
        engine = TransformersEngine(model, end_token_ids, config.batch_size, own_weights=own)
        engine.routers = policy.record_router_outputs(engine.model) if experts else None
        return engine
    if config.name == "vllm_server":
        from lit_grpo.engines.vllm_server.engine import make_vllm_server

        return make_vllm_server(
            config,
            policy=policy,
            policy_config=policy_config,
            end_token_ids=end_token_ids,
            max_model_len=config.max_model_len or max_model_len,
            seed=seed,
        )
    from lit_grpo.engines.vllm.engine import make_vllm_engine

    return make_vllm_engine(
        config,
        policy=policy,
        policy_config=policy_config,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids,
        max_model_len=config.max_model_len or max_model_len,
        seed=seed,
    )


__all__ = [
    "EngineConfig",
    "EngineError",
    "NamedWeights",
    "RolloutEngine",
    "ServerConfig",
    "check_engine",
    "make_engine",
]
