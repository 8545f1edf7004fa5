"""Reset of the objective by its recipe: a later layer that names one drops what earlier layers set of the objective."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.cli.config_files import Layer

KEY = "model.objective"


def reset_options(command: str, argv: Sequence[str], layers: Sequence[Layer]) -> list[str]:
    """Make the options that undo what earlier layers set of the objective before a later one named its recipe.

    Layers are, from the lowest: the file that the environment names, the environment, each file of ``argv``, and all
    options of ``argv`` together. What the layer of the recipe itself sets, or a later one, holds.

    Args:
        command: fit, validate, test or predict.
        argv: arguments of the command.
        layers: configuration files of the command, already read; that of the environment first if there is one.

    Returns:
        What to put behind ``argv``: ``--model.objective.clip_high=null`` for each key that is dropped.
    """
    files = [_objective_of_file(layer) for layer in layers]
    environment = _objective_of_environment(command)
    below = 1 if os.environ.get(f"LIT_GRPO_{command.upper()}__CONFIG") else 0
    options = dict(_objective_options(argv))
    given: dict[str, None] = {}
    holding: set[str] = set()
    for layer in [*files[:below], environment, *files[below:], options]:
        # What earlier layers set was meant for an earlier recipe.
        if layer.get("recipe") is not None:
            holding.clear()
        holding |= layer.keys()
        given |= dict.fromkeys(layer)
    # The parser merges layer on layer, key by key, and has no way to take a key out again. But null is the recipe's own
    # value, so that a null behind everything else is the same as a key that was never set.
    dropped = [f"--{KEY}.{key}=null" for key in given if key not in holding]
    # An option that stands before a file is overwritten by it, which would mix the file's recipe with these nulls.
    return dropped + ([f"--{KEY}.recipe={options['recipe']}"] if dropped and options.get("recipe") else [])


def _objective_of_file(layer: Layer) -> Mapping[str, Any]:
    values = yaml.safe_load("\n".join(layer.lines))
    for name in KEY.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return _loaded(values)


def _objective_of_environment(command: str) -> Mapping[str, Any]:
    prefix = f"LIT_GRPO_{command.upper()}__{KEY.replace('.', '__').upper()}"
    whole = _loaded(os.environ.get(prefix))
    single = {
        name.removeprefix(f"{prefix}__").lower(): value
        for name, value in os.environ.items()
        if name.startswith(f"{prefix}__")
    }
    return {**whole, **single}


def _objective_options(argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        option, equals, after_equals = word.partition("=")
        value = after_equals if equals else following
        if option == f"--{KEY}":
            yield from _loaded(value).items()
        elif option.startswith(f"--{KEY}."):
            # Below a key there may be arguments of a user's own part: --model.objective.custom_advantage.init_args.x
            yield option.removeprefix(f"--{KEY}.").partition(".")[0], value


def _loaded(value: Any) -> Mapping[str, Any]:
    """Return the keys of an objective that is given whole: a mapping, its YAML, or a file of it."""
    try:
        value = yaml.safe_load(value) if isinstance(value, str) else value
        if isinstance(value, str) and Path(value).is_file():
            value = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
    # The parser says later what is wrong with it.
    except (yaml.YAMLError, OSError):
        return {}
    return value if isinstance(value, dict) else {}
