"""Rollout engines: what samples completions. See :mod:`lit_grpo.engines.base` for the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.utils.imports import lazy_attributes

if TYPE_CHECKING:
    from lit_grpo.engines.base import EngineContext as EngineContext
    from lit_grpo.engines.base import EngineError as EngineError
    from lit_grpo.engines.base import EngineStart as EngineStart
    from lit_grpo.engines.base import NamedWeights as NamedWeights
    from lit_grpo.engines.base import RolloutEngine as RolloutEngine
    from lit_grpo.engines.config import EngineConfig as EngineConfig
    from lit_grpo.engines.config import ServerConfig as ServerConfig
    from lit_grpo.engines.registry import begin_engine as begin_engine
    from lit_grpo.engines.registry import begins_early as begins_early
    from lit_grpo.engines.registry import check_engine as check_engine
    from lit_grpo.engines.registry import make_engine as make_engine

_MODULES = {
    **dict.fromkeys(("EngineContext", "EngineError", "EngineStart", "NamedWeights", "RolloutEngine"), "base"),
    **dict.fromkeys(("EngineConfig", "ServerConfig"), "config"),
    **dict.fromkeys(("begin_engine", "begins_early", "check_engine", "make_engine"), "registry"),
}

# The process of an engine is started before torch is imported, which these take.
__getattr__ = lazy_attributes(__name__, _MODULES)
__all__ = sorted(_MODULES)
