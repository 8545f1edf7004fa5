"""The engines by name, and how one is checked and built; one from outside is named by its import path.

Classes are loaded when an engine is built: vLLM takes many seconds to import, and no run needs all engines.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, cast

from lit_grpo.engines.base import EngineClass, EngineContext, EngineStart, RolloutEngine
from lit_grpo.engines.config import EngineConfig, TransformersEngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from lit_grpo.errors import UserError
from lit_grpo.utils.imports import import_by_path

KEY = "data.engine"


@dataclass(frozen=True)
class EngineEntry:
    """One engine that the configuration calls by its name."""

    config: type
    """Dataclass of its settings. Its fields are fields of :class:`lit_grpo.engines.EngineConfig` too."""
    class_path: str
    """Import path of the engine, an :class:`lit_grpo.engines.base.EngineClass`."""
    gives_experts: bool = False
    """Whether its completions can say which experts their tokens went through."""
    begins_early: Callable[[Any], bool] = lambda config: False
    """Whether its start can be begun before the learner's model is there, by the class's ``begin``."""
    check: Callable[[Any, Any], None] | None = None
    """Checks its settings, beside those of the policy's adapters, before a model is loaded; imports nothing heavy."""


def _check_vllm(config: VLLMEngineConfig, lora: Any) -> None:
    from lit_grpo.engines.vllm.adapters import adapter_rank
    from lit_grpo.engines.vllm.arguments import check_arguments
    from lit_grpo.engines.vllm.start import check_in_process
    from lit_grpo.engines.vllm_processes.settings import check_cards

    check_arguments(config.args)
    adapter_rank(lora, config)
    check_in_process()
    check_cards(config)


def _check_server(config: VLLMServerEngineConfig, lora: Any) -> None:
    from lit_grpo.engines.vllm_server.process import check_server_config

    check_server_config(config)


ENGINES = {
    "transformers": EngineEntry(
        TransformersEngineConfig, "lit_grpo.engines.transformers.engine.TransformersEngine", gives_experts=True
    ),
    "vllm": EngineEntry(
        VLLMEngineConfig,
        "lit_grpo.engines.vllm_processes.choose.VLLM",
        begins_early=lambda config: config.processes != 1,
        check=_check_vllm,
    ),
    "vllm_server": EngineEntry(
        VLLMServerEngineConfig, "lit_grpo.engines.vllm_server.engine.VLLMServer", check=_check_server
    ),
}
_CHOICE = ("name", "custom_engine", "init_args")
"""Keys that choose the engine; all others are settings."""


def check_engine(config: EngineConfig, wants_experts: bool = False, lora: Any = None) -> None:
    """Check what can be known before a model is loaded.

    Args:
        config: which engine, and its settings.
        wants_experts: completions are to say which experts their tokens went through.
        lora: settings of the policy's adapters; None: it trains all weights.

    Raises:
        UserError: a setting contradicts another, the engine's class is not found, or it needs vLLM, which is not
            installed.
    """
    settings = engine_settings(config)
    _warn_of_other_engines(config)
    if config.custom_engine is not None:
        load_engine_class(config.custom_engine)
        return
    entry = ENGINES[config.name]
    if wants_experts and not entry.gives_experts:
        raise UserError(
            f"the engine {config.name} does not hand over the experts that it chose while sampling",
            where="model.routing_replay",
            remedy=f"set model.routing_replay: old, or {KEY}.name: transformers",
        )
    if entry.check is not None:
        entry.check(entry.config(**settings), lora)


def begins_early(config: EngineConfig) -> bool:
    """Tell whether :func:`begin_engine` may begin the engine that ``config`` names."""
    return config.custom_engine is None and ENGINES[config.name].begins_early(config)


def begin_engine(config: EngineConfig, context: EngineContext) -> EngineStart | None:
    """Begin to start the engine that ``config`` names, while the learner's model is still made.

    Args:
        config: which engine, and its settings.
        context: of the run. Its policy need not have weights, and ``max_model_len`` may be unknown.

    Returns:
        What :func:`make_engine` makes the engine of; None: that builds it from the beginning.
    """
    if not begins_early(config):
        return None
    build: Any = load_engine_class(ENGINES[config.name].class_path)
    return cast("EngineStart | None", build.begin(context, **engine_settings(config)))


def make_engine(config: EngineConfig, context: EngineContext, begun: EngineStart | None = None) -> RolloutEngine:
    """Build the engine that ``config`` names, for the policy that is trained.

    Args:
        config: which engine, and its settings.
        context: of the run.
        begun: what :func:`begin_engine` has begun with the same ``config``.

    Raises:
        UserError: see :func:`check_engine`; arguments that the engine's class does not take, a method that it lacks, or
            what the engine itself refuses.
    """
    if begun is not None:
        return begun.finish(context)
    settings = engine_settings(config)
    path = config.custom_engine or ENGINES[config.name].class_path
    build = load_engine_class(path).from_context
    # Bound before it is called: a TypeError from within the engine is the engine's fault, and keeps its traceback.
    try:
        inspect.signature(build).bind(context, **settings)
    except TypeError as error:
        raise UserError(f"{path} does not take these arguments: {error}", where=f"{KEY}.init_args") from error
    engine = build(context, **settings)
    missing = [name for name in ("policy_version", "generate", "sync", "close") if not hasattr(engine, name)]
    if missing:  # found now, and not when the run ends and the engine is closed
        raise UserError(
            f"{path} has no {', '.join(missing)}",
            where=f"{KEY}.custom_engine",
            remedy="write what lit_grpo.engines.RolloutEngine lists",
        )
    return engine


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings of the engine that ``config`` names, by keyword.

    Raises:
        UserError: arguments of an engine from outside, and there is none.
    """
    if config.custom_engine is not None:
        return dict(config.init_args)
    if config.init_args:
        raise UserError(
            "init_args are the arguments of an engine given by custom_engine, and there is none",
            where=f"{KEY}.init_args",
            remedy=f"set {KEY}.custom_engine, or write the settings of {config.name} directly under {KEY}",
        )
    return {item.name: getattr(config, item.name) for item in fields(ENGINES[config.name].config)}


def load_engine_class(class_path: str) -> EngineClass:
    """Import an engine's class.

    Raises:
        UserError: it is not found, its module fails while it is imported, or it has no ``from_context``.
    """
    remedy = (
        "write the import path of a class, my_package.MyEngine, of a package that is installed here or in PYTHONPATH"
    )
    found = import_by_path(class_path, f"{KEY}.custom_engine", remedy)
    if not callable(getattr(found, "from_context", None)):
        raise UserError(
            f"{class_path} is no engine: it has no classmethod from_context",
            where=f"{KEY}.custom_engine",
            remedy='see "Add an engine" in CONTRIBUTING.md',
        )
    return cast(EngineClass, found)


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _warn_of_other_engines(config: EngineConfig) -> None:
    """Warn of settings that belong to other engines and were changed."""
    own = set() if config.custom_engine is not None else {f.name for f in fields(ENGINES[config.name].config)}
    for item in fields(config):
        if item.name in own or item.name in _CHOICE or getattr(config, item.name) == _default(item):
            continue
        owners = [name for name, entry in ENGINES.items() if item.name in {f.name for f in fields(entry.config)}]
        # Not refused: `--data.engine.name transformers` over a configuration made for vLLM is how it is tried on a CPU.
        warnings.warn(
            f"{KEY}.{item.name} has no effect: it is a setting of the engine {' and of '.join(owners)}, and this run "
            f"samples with {config.custom_engine or config.name}.",
            stacklevel=3,
        )
