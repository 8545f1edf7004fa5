"""What people hand over as engine in Python: settings, a dictionary, a name, the class of an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lit_grpo.engines.config import EngineConfig
from lit_grpo.errors import UserError
from lit_grpo.utils.dataclasses import from_arguments
from lit_grpo.utils.imports import path_of


def as_engine_config(given: Any, key: str) -> EngineConfig:
    """Return the settings of the engine that a value stands for.

    Args:
        given: settings, a dictionary of them, the name of an engine, or the class of an engine of your own, which may
            also stand where settings name it (``custom_engine``).
        key: key of the configuration, for messages.

    Raises:
        UserError: it is nothing of these, or an engine that is made already.
    """
    if isinstance(given, str):
        # A name that there is not is refused as any other choice that is none.
        return from_arguments(EngineConfig, {"custom_engine" if "." in given else "name": given}, key)
    if isinstance(given, type) and not issubclass(given, EngineConfig):
        return EngineConfig(custom_engine=path_of(given, key))
    if callable(getattr(given, "generate", None)):
        raise UserError(
            f"an engine of the class {type(given).__name__} is made already; a run makes its own, to put its weights "
            "into it after every step",
            where=key,
            remedy=_remedy(type(given)),
        )
    config = from_arguments(EngineConfig, given, key)
    if isinstance(config.custom_engine, type):
        return replace(config, custom_engine=path_of(config.custom_engine, f"{key}.custom_engine"))
    return config


def _remedy(cls: type) -> str:
    if cls.__module__.partition(".")[0] == "vllm":
        return "engine={'name': 'vllm', 'args': {...}}, with the arguments of vllm.LLM under args"
    return f"give its class, engine={cls.__name__}, with a classmethod from_context that makes it"
