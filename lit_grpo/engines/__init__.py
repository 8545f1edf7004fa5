"""Rollout engines: what samples completions. See :mod:`lit_grpo.engines.base` for the protocol.

Each name is loaded when it is first asked for: an engine process is started before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_WHERE = {
    "base": ("EngineContext", "EngineError", "EngineStart", "NamedWeights", "RolloutEngine"),
    "config": ("EngineConfig", "ServerConfig"),
    "registry": ("begin_engine", "begins_early", "check_engine", "make_engine"),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
