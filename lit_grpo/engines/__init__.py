"""Rollout engines: what samples completions. See :mod:`lit_grpo.engines.base` for the protocol."""

from __future__ import annotations

from lit_grpo.engines.base import EngineContext, EngineError, EngineStart, NamedWeights, RolloutEngine
from lit_grpo.engines.config import EngineConfig, ServerConfig
from lit_grpo.engines.registry import begin_engine, begins_early, check_engine, make_engine

__all__ = [
    "EngineConfig",
    "EngineContext",
    "EngineError",
    "EngineStart",
    "NamedWeights",
    "RolloutEngine",
    "ServerConfig",
    "begin_engine",
    "begins_early",
    "check_engine",
    "make_engine",
]
