"""A right value of a type, written as YAML has it, for the message that refuses a wrong one."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import math
import numbers
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from lit_grpo.utils.bounds import Bound

_LONGEST = 60
"""Characters of an example beyond which it is no help."""
_NUMBERS = (0.5, 8, 1, 2, 0.1, 1e-3, 0, 100)
"""Numbers of which the first that a bound allows is the example, whole ones for whole numbers."""


def example_of(hint: Any, default: Any = None, given: str | None = None) -> str | None:
    """Return a value of a type as YAML; None for a type of which none can be made up, such as a class.

    Args:
        hint: the type, with or without ``Annotated[..., Bound(...)]``.
        default: of what takes the type; it is the example where it is short and says something.
        given: the wrong value as text, which may have been meant as the one item of a list.

    >>> example_of(list[int] | None), example_of(typing.Annotated[float, Bound(above=0, below=1)])
    ('[0, 1]', '0.5')
    """
    if _says_something(default):
        text = _written(default)
        if len(text) <= _LONGEST:
            return text
    value = _value(hint, None)
    if value == ["text"] and given is not None and re.fullmatch(r"\w[\w./-]*", given):
        value = [given]
    return None if value is None else _written(value)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one type that it is; annotations are left out."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return members_of(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(one for member in typing.get_args(hint) for one in members_of(member))
    return (hint,)


def _says_something(default: Any) -> bool:
    if isinstance(default, str | bool | numbers.Real):
        return not isinstance(default, float) or math.isfinite(default)
    plain = isinstance(default, list | tuple | Mapping) and bool(default)
    items = list(default.values()) if isinstance(default, Mapping) else list(default) if plain else []
    return plain and all(_says_something(item) for item in items)


def _value(hint: Any, bound: Bound | None) -> Any:
    """Return a value of a type; None if none can be made up."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _value(arguments[0], next((one for one in arguments[1:] if isinstance(one, Bound)), bound))
    if origin in (typing.Union, types.UnionType):
        found = (_value(one, bound) for one in arguments if one is not types.NoneType)
        return next((one for one in found if one is not None), None)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [_value(one, bound) for one in arguments]
        return None if None in items else items
    kind = origin or hint
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Mapping):
        inner = _value(arguments[1], bound) if len(arguments) == 2 else 1
        return None if inner is None else {"name": inner}
    if kind is not str and issubclass(kind, Sequence | set | frozenset | collections.abc.Iterable) and arguments:
        return _list_of(arguments[0], bound)
    return _plain_value(kind, bound)


def _plain_value(kind: type, bound: Bound | None) -> Any:
    if kind is bool:
        return True
    if kind in (int, float):
        allowed = (one for one in _NUMBERS if bound is None or bound.holds(one))
        return next((one for one in allowed if kind is float or isinstance(one, int)), None)
    if kind is str:
        return "text"
    if issubclass(kind, enum.Enum):
        return next(iter(kind)).value
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            value = field.default if _says_something(field.default) else _value(hints[field.name], None)
            if value is not None:
                return {field.name: value}
    return None


def _list_of(hint: Any, bound: Bound | None) -> list[Any] | None:
    origin = typing.get_origin(hint)
    inner, bound = (typing.get_args(hint)[0], bound) if origin is typing.Annotated else (hint, bound)
    if inner is int and (bound is None or (bound.holds(0) and bound.holds(1))):
        return [0, 1]
    one = _value(hint, bound)
    return None if one is None else [one]


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
