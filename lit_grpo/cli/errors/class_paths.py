"""Suggestions for a ``class_path`` that leads nowhere, and the arguments that a class takes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lit_grpo.cli.errors.value_forms import class_in_wrong_form, read, written
from lit_grpo.errors import UserError
from lit_grpo.utils.bounds import parameter_hints
from lit_grpo.utils.imports import fault_of_class
from lit_grpo.utils.spelling import nearest

MODULES = (
    "lit_grpo.rewards", "lit_grpo.data", "lit_grpo.callbacks", "lit_grpo.callbacks.monitors", "lit_grpo.tracking",
)  # fmt: skip
"""Modules whose classes a configuration names by ``class_path``."""

LIGHTNING = ("lightning.pytorch.callbacks", "lightning.pytorch.loggers")
"""Modules of Lightning whose classes it names so."""


def load_classes() -> None:
    """Import the classes of :data:`MODULES`, which a configuration may then name without their modules.

    jsonargparse finds a class by its bare name among those that are imported, and ours are imported when they are used.
    Takes a tenth of a second beside torch.
    """
    for name in MODULES:
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            getattr(module, exported)


def arguments_of(class_path: str) -> list[str]:
    """List the names of a class's arguments; empty if it cannot be imported."""
    names: list[str] = []
    try:
        module, _, name = class_path.rpartition(".")
        for cls in inspect.getmro(getattr(importlib.import_module(module), name)):
            if "__init__" not in vars(cls):
                continue
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            # With **kwargs the next class in the order of inheritance takes the others, as jsonargparse resolves them.
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                break
    # Importing a class of the user may raise anything, and only a suggestion depends on it.
    except (Exception, SystemExit):
        return []
    return names


EXAMPLES = {
    "trainer.logger": "lightning.pytorch.loggers.TensorBoardLogger",
    "trainer.callbacks": "lit_grpo.callbacks.HealthMonitor",
    "trainer.plugins": "lightning.pytorch.plugins.MixedPrecision",
    "data.prompts": "lit_grpo.data.JsonlPrompts",
    "data.val_prompts": "lit_grpo.data.JsonlPrompts",
    "data.test_prompts": "lit_grpo.data.JsonlPrompts",
    "data.clean.decontaminate": "lit_grpo.data.BenchmarkPrompts",
}
"""A class that may stand at a key, for a word that is no class; a reward anywhere else."""


@dataclass(frozen=True)
class Argument:
    """One argument of a class that a configuration names."""

    of: str
    """Name of the class."""
    name: str
    type: tuple[Any, Any] | None
    """Its type and its default (None: none is known); None where the class does not say."""


def argument_of(class_path: str, name: str) -> Argument:
    """Return what is known of one argument of a class."""
    module, _, last = class_path.rpartition(".")
    found = None
    try:
        cls = getattr(importlib.import_module(module), last)
        hints = parameter_hints(cls)
        if name in hints:
            default = inspect.signature(cls).parameters[name].default
            found = hints[name], None if default is inspect.Parameter.empty else default
    # Importing a class of the user may raise anything, and only an example depends on it.
    except (Exception, SystemExit):
        found = None
    return Argument(last, name, found)


def broken_module(value: Any) -> UserError | None:
    """Return the error of a class's module that is there and cannot be imported; None if there is none.

    jsonargparse takes such a class for a value of another type, and says nothing of its module.

    Args:
        value: the value of a key: the import path of a class, a mapping with ``class_path``, or a list of either; its
            arguments may hold further classes.
    """
    faults = (fault_of_class(word, named=named) for word, named in _words(value))
    return next((fault for fault in faults if fault is not None), None)


def _words(value: Any, named: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each text in a value, and whether it stands under ``class_path``."""
    if isinstance(value, str):
        yield value, named
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from _words(one, key == "class_path")


def full_path(name: str) -> str:
    """Return the import path of a class that a configuration may name without its module."""
    if "." in name:
        return name
    return next((f"{m}.{name}" for m in MODULES if name in _class_names(importlib.import_module(m))), name)


def similar_class(class_path: str, example: str | None = None) -> str:
    """Say what to write instead of a class path that leads nowhere; ``example`` is a class that may stand there."""
    module_name, _, name = class_path.rpartition(".")
    if not module_name:
        return _full_path(name, example or "lit_grpo.rewards.ExactMatch")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return _similar_module(module_name, name, error)
    # A module of the user may raise anything.
    except (Exception, SystemExit) as error:
        return f"importing {module_name} fails: {type(error).__name__}: {error}"
    names = _class_names(module)
    if near := nearest(name, names):
        return f"did you mean {module_name}.{near}?"
    return f"{module_name} has {', '.join(names)}" if names else f"{module_name} has no classes"


def _class_names(module: ModuleType) -> list[str]:
    return [name for name in getattr(module, "__all__", dir(module)) if name[:1].isupper()]


def _full_path(name: str, example: str) -> str:
    paths = {n: f"{m}.{n}" for m in (*LIGHTNING, *MODULES) for n in _class_names(importlib.import_module(m))}
    if near := nearest(name, paths):
        return f"did you mean {paths[near]}?"
    return f"give the import path, for example {example}"


def _similar_module(module_name: str, name: str, error: ImportError) -> str:
    package_name, _, last = module_name.rpartition(".")
    try:
        package = importlib.import_module(package_name)
        modules = [info.name for info in pkgutil.iter_modules(package.__path__)]
    except (ImportError, ValueError, AttributeError):
        modules = []
    if near := nearest(last, modules):
        return f"did you mean {package_name}.{near}.{name}?"
    return f"{module_name} cannot be imported ({error}): is it installed, or in the folder you are in?"


def instead(class_path: str, problem: str, example: str | None) -> str:
    """Say what to write in the place of a class that cannot stand there, of which ``example`` is one that can."""
    base = problem.removeprefix("is no ")
    if base == problem or problem == "is no import path":
        return similar_class(class_path, example)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", class_path) or class_path == "null":
        return f"name a class, for example {example}, or {{class_path: {example}, init_args: {{NAME: VALUE}}}}"
    if base == "Reward" and not class_path.rpartition(".")[2][:1].isupper():
        return f"name a class that derives from Reward, or give a function: {one_reward(class_path)}"
    return f"name a class that derives from {base}, for example {example}"


def one_reward(word: str) -> str:
    """Write the list of one reward that was probably meant: a class by its bare name, else a function."""
    value = read(word)
    if isinstance(value, Mapping):
        wrong = class_in_wrong_form(value, str(next(iter(value), "")))
        return f"[{wrong[1] if wrong else written(value)}]"
    if word.rpartition(".")[2][:1].isupper():
        return f"[{word}]"
    function = (
        word if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", word) and not word.endswith(".py") else "my_module.my_function"
    )
    return f"[{{class_path: lit_grpo.rewards.FunctionReward, init_args: {{function: {function}}}}}]"
