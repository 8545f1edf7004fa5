"""Dataclasses rebuilt from nested dictionaries, the form in which checkpoints and YAML hold them."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from lit_grpo.errors import UserError, nearest

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
    if not isinstance(value, dict):
        raise UserError(
            f"{key.rpartition('.')[2]} is {value!r:.60}, and no {cls.__name__}",
            where=key,
            remedy=f"give {cls.__name__}(...), or a dict of {', '.join(names)}",
        )
    if unknown := [str(name) for name in value if name not in names]:
        guess = nearest(unknown[0], names)
        raise UserError(
            f"{cls.__name__} has no {unknown[0]!r}",
            where=key,
            remedy=f"did you mean {guess!r}?" if guess else f"it has {', '.join(names)}",
        )
    return dataclass_from_dict(cls, value)


def _convert(hint: Any, item: Any) -> Any:
    if isinstance(item, dict):
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
        for option in options:
            if isinstance(option, type) and is_dataclass(option):
                return dataclass_from_dict(option, item)
    # YAML and JSON have no tuples.
    if isinstance(item, list) and typing.get_origin(hint) is tuple:
        return tuple(item)
    return item


def as_dataclass(cls: type, value: Any) -> Any:
    """Return a dataclass as it is, or rebuild it from the dictionary that a checkpoint holds."""
    return value if is_dataclass(value) else dataclass_from_dict(cls, value)
