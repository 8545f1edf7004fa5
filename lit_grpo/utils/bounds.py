"""Ranges of settings, declared where their types are, and checked in one place.

    lr: Annotated[float, Bound(above=0)] = 1e-6

jsonargparse reads the type and leaves the bound alone, so that values from a file, the command line and Python meet the
same check: :func:`check_fields` and :func:`check_arguments`. It also refuses what jsonargparse lets pass for any type,
null, and numbers that are not finite.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import nearest


@dataclasses.dataclass(frozen=True)
class Bound:
    """Range of a number, or of each number of a list; None: no limit on that side."""

    least: float | None = None
    """Smallest value allowed."""
    above: float | None = None
    """Largest value that is too small."""
    most: float | None = None
    """Largest value allowed."""
    below: float | None = None
    """Smallest value that is too large."""
    infinite: bool = False
    """Whether infinity is allowed."""

    def holds(self, value: float) -> bool:
        """Tell whether a number that is not NaN lies in the range."""
        return (
            (self.infinite or math.isfinite(value))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        limits = [(word, limit) for word, limit in words if limit is not None]
        if len(limits) == 2 and all(abs(limit) <= 1000 for _, limit in limits):
            (low, least), (high, most) = limits
            return f"in {'[('[low == 'above']}{least:g}, {most:g}{'])'[high == 'below']}"
        return " and ".join(f"{word} {limit:,.12g}" for word, limit in limits) or "finite"


def check_fields(instance: Any, key: str, *, finite: bool = True) -> None:
    """Check every field of a dataclass, and of the dataclasses in it, against its type, its choices and its bound.

    Args:
        instance: the dataclass.
        key: dotted key of the configuration that it stands under, for errors; empty where it may be one of several.
        finite: whether numbers without a bound must be finite.

    Raises:
        UserError: a value is null, no number, not finite, out of its range or none of its choices; names the key.
    """
    cls: Any = type(instance)
    for name, hint in _hints(cls).items():
        if hasattr(instance, name):
            _check(getattr(instance, name), hint, f"{key}.{name}".removeprefix("."), finite)


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], key: str, *, finite: bool = True) -> None:
    """Check the arguments of a call against the types and bounds of the function's parameters.

    Args:
        function: the function, or a class for its constructor.
        given: values by parameter; others are left alone.
        key: dotted key of the configuration, or name of the class, that they stand under.
        finite: whether numbers without a bound must be finite.

    Raises:
        UserError: as of :func:`check_fields`.
    """
    for name, hint in parameter_hints(function).items():
        if name in given:
            _check(given[name], hint, f"{key}.{name}", finite)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


@cache
def parameter_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of parameters; one whose default is None may be null, whatever its type says."""
    classes = inspect.getmro(function) if isinstance(function, type) else ()
    found: dict[str, Any] = {}
    # A class that passes **kwargs on takes the arguments of its bases too.
    for target in [vars(cls)["__init__"] for cls in reversed(classes) if "__init__" in vars(cls)] or [function]:
        try:
            hints = typing.get_type_hints(target, include_extras=True)
            parameters = inspect.signature(target).parameters
        # Types of a user's class that cannot be resolved, or of one written in C: they state nothing to check.
        except (NameError, TypeError, ValueError, AttributeError, SyntaxError):
            continue
        for name, hint in hints.items():
            if name in parameters:
                found[name] = hint | None if parameters[name].default is None else hint
    return found


def _check(value: Any, hint: Any, key: str, finite: bool) -> None:
    options, bound = _options(hint)
    if value is None:
        if types.NoneType not in options and not {Any, object} & set(options) and _readable(options):
            raise UserError(
                f"{_name(key)} cannot be null", where=key, remedy="leave it out for its default, or give a value"
            )
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        _check_number(value, options, bound, key, finite)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        check_fields(value, key, finite=finite)
    elif isinstance(value, Mapping):
        _check_names(value, options, key)
        for name, item, inner in _items_of_mapping(value, options):
            _check(item, inner, f"{key}.{name}", finite)
    elif isinstance(value, list | tuple):
        for item, inner in _items_of_list(value, options):
            _check(item, _with_bound(inner, bound), key, finite)
    if value is not None and (choices := _choices(options)) and value not in choices:
        near = nearest(str(value), choices)
        raise UserError(
            f"{_name(key)} is {value!r:.60}",
            where=key,
            remedy=(f"did you mean {near!r}? " if near else "") + f"Choose one of {', '.join(map(str, choices))}",
        )
    if value is not None and set(options) <= {int, float, bool, types.NoneType} and not isinstance(value, numbers.Real):
        raise UserError(
            f"{_name(key)} is {value!r:.60}, which is no {_number_word(options)}", where=key, remedy=_example(key, hint)
        )


def _choices(options: tuple[Any, ...]) -> list[Any]:
    """Return the values that a type allows, where it allows nothing but some; empty for any other type."""
    named = [option for option in options if option is not types.NoneType]
    if not all(typing.get_origin(option) is typing.Literal for option in named):
        return []
    return [value for option in named for value in typing.get_args(option)]


def _check_number(value: Any, options: tuple[Any, ...], bound: Bound | None, key: str, finite: bool) -> None:
    if not {int, float} & set(options):
        return
    if float not in options and not isinstance(value, numbers.Integral):
        raise UserError(
            f"{_name(key)} is {value!r}, must be a whole number",
            where=key,
            remedy=f"for example {_name(key)}: {round(value)}" if math.isfinite(value) else None,
        )
    number = _as_float(value)
    bound = bound or Bound(infinite=not finite)
    if math.isnan(number) or not bound.holds(number):
        remedy = "null switches it off" if types.NoneType in options and not math.isfinite(number) else None
        wanted = "finite" if not math.isfinite(number) and str(bound) == "finite" else str(bound)
        if not math.isfinite(number) and wanted != "finite":
            wanted += " and finite"
        if words := _words(options):
            wanted += f", or {' or '.join(words)}"
        raise UserError(f"{_name(key)} is {_shown(value)}, must be {wanted}", where=key, remedy=remedy)


def _example(key: str, hint: Any) -> str | None:
    # They are made within the bounds that are declared here.
    from lit_grpo.utils.examples import example_of

    found = example_of(hint)
    return None if found is None else f"for example {_name(key)}: {found}"


def _words(options: tuple[Any, ...]) -> list[str]:
    """List the words that may stand in the place of a number."""
    literals = (option for option in options if typing.get_origin(option) is typing.Literal)
    return [word for literal in literals for word in typing.get_args(literal) if isinstance(word, str)]


def _as_float(value: Any) -> float:
    try:
        return float(value)
    # A whole number of hundreds of digits.
    except OverflowError:
        return math.inf


def _options(hint: Any) -> tuple[tuple[Any, ...], Bound | None]:
    """Return the members of a type, without its annotations, and its bound."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, *extras = typing.get_args(hint)
        options, bound = _options(inner)
        return options, next((extra for extra in extras if isinstance(extra, Bound)), bound)
    if origin in (typing.Union, types.UnionType):
        members = [_options(member) for member in typing.get_args(hint)]
        return (
            tuple(option for options, _ in members for option in options),
            next((bound for _, bound in members if bound), None),
        )
    return (hint,), None


def _readable(options: tuple[Any, ...]) -> bool:
    """Tell whether all members are types as such, and no type variables or the like that may stand for null."""
    return all(isinstance(o, type) or typing.get_origin(o) is not None for o in options)


def _check_names(value: Mapping[Any, Any], options: tuple[Any, ...], key: str) -> None:
    """Refuse names that are no text, as YAML reads ``1``, ``on`` and ``~``, where the type wants text."""
    arguments = [typing.get_args(option) for option in options if issubclass(_class_of(option), Mapping)]
    if not arguments or any(not pair or pair[0] is not str for pair in arguments):
        return
    for name in value:
        if not isinstance(name, str):
            raise UserError(
                f"{_name(key)} has the name {name!r}, which is no text",
                where=f"{key}.{name}",
                remedy="put it in quotes, if it is meant so",
            )


def _class_of(option: Any) -> type:
    origin = typing.get_origin(option) or option
    return origin if isinstance(origin, type) else object


def _items_of_mapping(value: Mapping[Any, Any], options: tuple[Any, ...]) -> Iterator[tuple[str, Any, Any]]:
    for option in options:
        origin = typing.get_origin(option)
        if isinstance(origin, type) and issubclass(origin, Mapping) and len(typing.get_args(option)) == 2:
            yield from ((str(name), item, typing.get_args(option)[1]) for name, item in value.items())
            return


def _items_of_list(value: list[Any] | tuple[Any, ...], options: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    for option in options:
        arguments = typing.get_args(option)
        origin = typing.get_origin(option)
        if origin is tuple and arguments and arguments[-1] is not ...:
            yield from zip(value, arguments, strict=False)
            return
        if isinstance(origin, type) and arguments and issubclass(origin, list | tuple):
            yield from ((item, arguments[0]) for item in value)
            return


def _with_bound(hint: Any, bound: Bound | None) -> Any:
    return hint if bound is None else typing.Annotated[hint, bound]


def _shown(value: Any) -> str:
    """Return a number as text, without most of the digits of one that has hundreds."""
    try:
        text = str(value)
    # Python writes no whole number of thousands of digits.
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:30]}... ({len(text)} digits)"


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _number_word(options: tuple[Any, ...]) -> str:
    return "number" if float in options else "whole number" if int in options else "truth value"
