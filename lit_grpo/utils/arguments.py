"""Arguments by name that a class does not take, answered in Python as the command line answers them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar

from lit_grpo.errors import UserError
from lit_grpo.utils.bounds import parameter_hints
from lit_grpo.utils.foreign_names import FOREIGN_NAMES
from lit_grpo.utils.spelling import nearest

F = TypeVar("F", bound=Callable[..., Any])


class UnknownArgumentError(UserError, TypeError):
    """Error for an argument that a class does not take; a TypeError too, as Python's own is."""


def explained(section: str, needed: str | None = None) -> Callable[[F], F]:
    """Decorate an ``__init__`` that names the argument that was meant where it does not take one.

    Args:
        section: section of the configuration that the class stands for, ``model`` or ``data``.
        needed: argument without which it cannot be made, with an example of a value: ``policy={...}``.
    """

    def decorate(init: F) -> F:
        names = list(inspect.signature(init).parameters)[1:]

        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in names:
                    raise UnknownArgumentError(
                        f"{type(self).__name__} has no argument {name!r}",
                        where=f"{type(self).__name__}({name}=...)",
                        remedy=_meant(name, init, names, section),
                    )
            if needed is not None and not args and needed.partition("=")[0] not in kwargs:
                raise UnknownArgumentError(
                    f"{type(self).__name__} needs {needed.partition('=')[0]!r}", where=section, remedy=f"give {needed}"
                )
            init(self, *args, **kwargs)

        return typing.cast(F, checked)

    return decorate


def _meant(name: str, init: Callable[..., Any], names: list[str], section: str) -> str:
    if (key := FOREIGN_NAMES.get(name)) is not None:
        return f"{name} is {key} here: {_written(key, section)}"
    for parameter, hint in parameter_hints(init).items():
        for cls in _dataclasses_in(hint):
            if name in {field.name for field in dataclasses.fields(cls)}:
                return f"give {parameter}={{{name!r}: ...}}"
    near = nearest(name, names)
    return f"did you mean {near!r}?" if near else f"it takes {', '.join(names)}"


def _written(key: str, section: str) -> str:
    """Write a key of the configuration as an argument of the class of its section."""
    part, *names = key.split(".")
    value = "..."
    for name in reversed(names[1:]):
        value = f"{{{name!r}: {value}}}"
    owner = "" if part == section else f" of {'LitGRPO' if part == 'model' else 'RolloutDataModule'}"
    return f"give {names[0]}={value}{owner}"


def _dataclasses_in(hint: Any) -> Iterator[Any]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    else:
        for inner in typing.get_args(hint):
            yield from _dataclasses_in(inner)


def made_in_python(given: Mapping[str, Any]) -> str:
    """Say how to make in Python what a mapping with ``class_path`` and ``init_args`` is in YAML."""
    made = str(given["class_path"]).rpartition(".")[2]
    arguments = ", ".join(f"{name}={value!r}" for name, value in dict(given.get("init_args") or {}).items())
    return f"that is the form of YAML; in Python make one: {made}({arguments})"
