"""What to type in the place of a value of the wrong form: a right one for its very key."""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from lit_grpo.cli.errors.parser_messages import in_words
from lit_grpo.utils.examples import example_of, members_of

EXAMPLES = {
    "model.policy.model_args": "{revision: main}",
    "model.optimizer.args": "{amsgrad: true}",
    "model.optimizer.scheduler_args": "{step_size: 100}",
    "data.format.chat_template_kwargs": "{enable_thinking: false}",
    "data.engine.args": "{enforce_eager: true}",
    "data.engine.init_args": '{url: "http://127.0.0.1:9000"}',
    "data.engine.server.env": '{CUDA_VISIBLE_DEVICES: "1"}',
    "data.engine.max_model_len": "4096",
    "data.format.max_prompt_tokens": "1024",
    "data.clean.decontaminate": "[{class_path: BenchmarkPrompts, init_args: {benchmark: gsm8k}}]",
    "data.sampling.stop": '["</answer>"]',
    "data.val": "{gsm8k: {limit: 100}}",
    "data.test": "{gsm8k: {limit: 100}}",
    "trainer.max_steps": "100",
    "model.policy.path": "models/SmolLM2-135M-Instruct",
    "model.objective.recipe": "grpo",
    "model.optimizer.lr": "1e-6",
    "data.engine.name": "vllm",
    "data.group_size": "8",
    "trainer.devices": "2",
    "trainer.strategy": "ddp",
    "trainer.accelerator": "auto",
    "trainer.profiler": "simple",
    "trainer.max_time": "00:08:00:00",
    "data.prompts": "rows.jsonl",
    "ckpt_path": "last",
}
"""Values of keys whose type alone says too little."""

_OF_ARGUMENTS = {"actions": "{critical: stop}", "path": "rows.jsonl", "function": "my_module.my_function"}
"""The same for arguments of classes, by their names."""

EXAMPLES_OF = {
    "Reward": "lit_grpo.rewards.ExactMatch",
    "Callback": "lit_grpo.callbacks.HealthMonitor",
    "Monitor": "lit_grpo.callbacks.EntropyMonitor",
    "Logger": "lightning.pytorch.loggers.TensorBoardLogger",
    "PromptSource": "lit_grpo.data.JsonlPrompts",
    "Strategy": "lightning.pytorch.strategies.DDPStrategy",
    "Profiler": "lightning.pytorch.profilers.SimpleProfiler",
}
"""A class that may stand where one has to derive from the class of this name."""

IN_LISTS = frozenset(
    {"lit_grpo.data.BenchmarkPrompts", *(EXAMPLES_OF[base] for base in ("Reward", "Callback", "Monitor"))}
)
"""Examples that stand in lists, to which an option with a ``+`` appends."""

_LIKELIEST = {
    ("model.policy", "text"): "path",
    ("model.policy.lora", "number"): "rank",
    ("model.optimizer", "number"): "lr",
    ("model.optimizer", "text"): "type",
    ("data.sampling", "number"): "temperature",
    ("data.format", "text"): "chat_template",
    ("EvaluationSet", "number"): "limit",
    ("EvaluationSet", "text"): "path",
    ("checkpoint", "number"): "every_n_rollouts",
    ("checkpoint", "text"): "dirpath",
    ("completions", "number"): "every",
}
"""Key that a number or a word is for which stands in the place of a whole group, by the group or by its class."""

Types = Mapping[str, tuple[Any, Any]]
"""Type and default of keys."""


def right_value(key: str, type_and_default: tuple[Any, Any] | None, given: str | None) -> str | None:
    """Return a right value of a key as YAML; None where none is known.

    Args:
        key: dotted key.
        type_and_default: its type and its default, where they are known.
        given: the wrong value, as text.
    """
    if key in EXAMPLES:
        return EXAMPLES[key]
    if (last := key.rpartition(".")[2]) in _OF_ARGUMENTS:
        return _OF_ARGUMENTS[last]
    if type_and_default is None:
        return None
    hint, default = type_and_default
    if key.startswith("model.objective.") and default is None:
        default = _default_of_part(key.rpartition(".")[2])
    found = example_of(hint, default, given)
    if found is None:
        lists = [one for one in members_of(hint) if typing.get_origin(one) in (list, collections.abc.Sequence)]
        classes = [name for one in lists for name in class_names(one) if name in EXAMPLES_OF]
        found = f"[{EXAMPLES_OF[classes[0]]}]" if classes else None
    return found


def shown_as(key: str, value: str, where: str) -> str:
    """Write a key and its value as they would be typed at the place of the wrong one.

    Args:
        key: key of a configuration, or the name of an argument below it.
        value: as YAML.
        where: place of the wrong one: an option of the command line, or a file and line.
    """
    name = key.rpartition(".")[2]
    if where.startswith("command line, --"):
        option = where.removeprefix("command line, ").partition(" ")[0].partition("=")[0]
        # Otherwise it stands inside of what was typed, as in a file.
        if option.removeprefix("--").rpartition(".")[2] == name:
            return f"{option} {shlex.quote(value)}"
    return f"{name}: {value}"


def takes_keys(type_and_default: tuple[Any, Any] | None) -> bool:
    """Tell whether a key takes a dataclass, whose fields are keys below it."""
    hint = type_and_default[0] if type_and_default is not None else None
    return any(isinstance(one, type) and dataclasses.is_dataclass(one) for one in members_of(hint))


def type_below(hint: Any, names: Sequence[str]) -> Any:
    """Return the type of what stands below a mapping or dataclass at some names; None if nothing can stand there."""
    for name in names:
        found = None
        for one in members_of(hint):
            if isinstance(one, type) and dataclasses.is_dataclass(one):
                found = typing.get_type_hints(one, include_extras=True).get(name, found)
            elif isinstance(origin := typing.get_origin(one), type) and issubclass(origin, Mapping):
                found = typing.get_args(one)[1]
        hint = found
    return hint


def takes_class(hint: Any) -> bool:
    """Tell whether a class may stand at a key of this type, or a list of classes."""
    return bool(class_names(hint))


def class_names(hint: Any) -> list[str]:
    """Name the classes of which one may stand at a key of this type, alone or in a list."""
    inner = [one for member in members_of(hint) for one in (typing.get_args(member) or (member,))]
    plain = ("builtins", "collections.abc", "datetime", "pathlib", "types", "typing")
    classes = [one for one in inner if isinstance(one, type) and one.__module__ not in plain]
    return [one.__name__ for one in classes if not dataclasses.is_dataclass(one)]


def types_in_words(hint: Any) -> list[str]:
    """Name the types that a key takes as a person would; empty where one of them has no such name."""
    names = [in_words(getattr(typing.get_origin(one) or one, "__name__", "")) for one in members_of(hint)]
    return list(dict.fromkeys(names)) if all(" " in name or name in ("text", "null") for name in names) else []


def key_that_was_meant(group: str, given: str, types: Types) -> str | None:
    """Return the key below a group to which a value belongs that was given for the whole group.

    It is one of the choices of that key, such as ``vllm`` for ``name`` below ``data.engine``, or a number or text where
    one key is the likeliest. None if no key is.
    """
    below = _below(group, types)
    for name, (hint, _) in below.items():
        if given in _words(hint):
            return name
    if given in ("null", "Null", "NULL", "~"):
        return None
    number = re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", given) is not None
    classes = [getattr(one, "__name__", "") for one in members_of(types[group][0])] if group in types else []
    kind = "number" if number else "text"
    likeliest = next((_LIKELIEST[name, kind] for name in (group, *classes) if (name, kind) in _LIKELIEST), None)
    plain = number or re.fullmatch(r"[\w./~-]+", given) is not None
    return likeliest if plain and likeliest in below else None


def group_example(group: str, types: Types) -> tuple[str, str] | None:
    """Return a key below a group and a right value for it."""
    for name, known in _below(group, types).items():
        if (value := right_value(f"{group}.{name}", known, None)) is not None:
            return name, value
    return None


def _below(group: str, types: Types) -> dict[str, tuple[Any, Any]]:
    """Return type and default of what stands below a group, by name, what is nearest first."""
    found = {key.removeprefix(f"{group}."): known for key, known in types.items() if key.startswith(f"{group}.")}
    # A dataclass that may be left out is one key, and its fields are none.
    for cls in members_of(types[group][0]) if group in types else ():
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            hints = typing.get_type_hints(cls, include_extras=True)
            found |= {one.name: (hints[one.name], one.default) for one in dataclasses.fields(cls)}
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def _words(hint: Any) -> list[str]:
    found = [typing.get_args(one) for one in members_of(hint) if typing.get_origin(one) is typing.Literal]
    return [word for words in found for word in words if isinstance(word, str)]


def _default_of_part(name: str) -> Any:
    # Heavy to import, and wanted on an error screen alone.
    from lit_grpo.objectives.registry import default_of

    return default_of(name)
