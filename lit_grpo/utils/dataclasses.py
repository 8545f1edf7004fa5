"""Dataclasses rebuilt from nested dictionaries, the form in which checkpoints and YAML hold them."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import yaml

from lit_grpo.errors import UserError
from lit_grpo.utils.examples import example_of
from lit_grpo.utils.foreign_names import FOREIGN_NAMES
from lit_grpo.utils.spelling import nearest

T = TypeVar("T")


def dataclass_from_dict(cls: type[T], value: Any) -> T:
    """Rebuild ``cls`` from ``dataclasses.asdict``'s output.

    Raises:
        TypeError: ``value`` is no dictionary, or has a key that is no field of ``cls``.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{cls.__name__} is made from a dictionary, not from {type(value).__name__}")
    # Annotations are text, since every module imports its annotations from __future__.
    hints = typing.get_type_hints(cls)
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if unknown := set(value) - names:
        raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    return cls(**{key: _convert(hints[key], item) for key, item in value.items()})


def from_arguments(cls: type[T], value: Any, key: str) -> T:
    """Return a dataclass as it is, or build it from the dictionary that somebody gives in its place in Python.

    Raises:
        UserError: the value is neither, or has a key that is no field; it names the fields.
    """
    if isinstance(value, cls):
        return value
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        # A class in the place of one of its objects is a pair of brackets that was forgotten.
        made = f"make one of it: {cls.__name__}(...)" if isinstance(value, type) and issubclass(value, cls) else None
        raise UserError(
            f"{key.rpartition('.')[2]} is {_shown(value)}, and no {cls.__name__}",
            where=key,
            remedy=made or f"give {cls.__name__}(...), or a dict: {_example(cls)}; it has {_listed(names)}",
        )
    if unknown := [str(name) for name in value if name not in names]:
        # A name that another framework has for one of these.
        meant = FOREIGN_NAMES.get(unknown[0], "").rpartition(".")[2]
        guess = meant if meant in names else nearest(unknown[0], names)
        raise UserError(
            f"{cls.__name__} has no {unknown[0]!r}",
            where=key,
            remedy=f"did you mean {guess!r}?" if guess else f"it has {_listed(names)}",
        )
    hints = typing.get_type_hints(cls)
    converted = {str(name): _from_argument(hints[name], item, f"{key}.{name}") for name, item in value.items()}
    try:
        return cls(**converted)
    except TypeError as error:
        raise UserError(f"{cls.__name__} cannot be made: {error}", where=key) from error


def _example(cls: Any) -> str:
    """Return a dictionary of one field as Python has it, with its default where that says something."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for one in fields(cls):
        if isinstance(one.default, str | int | float) and not isinstance(one.default, bool):
            return repr({one.name: one.default})
        if (text := example_of(hints[one.name])) is not None:
            return repr({one.name: yaml.safe_load(text)})
    return "{}"


def _listed(names: Sequence[str]) -> str:
    """List names, of many the first: a screen full of them is read by nobody."""
    return ", ".join(names) if len(names) <= 16 else f"{', '.join(names[:12])} and {len(names) - 12} more"


def _from_argument(hint: Any, item: Any, key: str) -> Any:
    wanted = next((one for one in _options(hint) if isinstance(one, type) and is_dataclass(one)), None)
    if wanted is not None and item is not None:
        return from_arguments(wanted, item, key)
    return _convert(hint, item)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)


def _shown(value: Any) -> str:
    """Show a value that a person gave: what is short as it is, of anything else its class."""
    if isinstance(value, str | int | float | list | tuple | type(None)):
        return f"{value!r:.60}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of the class {type(value).__name__}"


def _convert(hint: Any, item: Any) -> Any:
    if isinstance(item, dict):
        for option in _options(hint):
            if isinstance(option, type) and is_dataclass(option):
                return dataclass_from_dict(option, item)
    # YAML and JSON have no tuples.
    if isinstance(item, list) and typing.get_origin(hint) is tuple:
        return tuple(item)
    return item
