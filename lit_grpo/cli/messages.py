"""Reads jsonargparse's messages and knows what could have been meant by a class path."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
from types import ModuleType

from lit_grpo.errors import nearest
from lit_grpo.utils.imports import import_by_path

OUR_MODULES = ("lit_grpo.rewards", "lit_grpo.data", "lit_grpo.callbacks", "lit_grpo.tracking")
"""Where classes for ``class_path`` live."""


def class_problem(details: str) -> tuple[str, str] | None:
    """(class path, its problem) of the first class that jsonargparse could not use, innermost first."""
    if found := re.search(r"Expected a dot import path string: (\S+)", details):
        return found[1], "is no import path"
    if found := re.search(r"Import path (\S+) does not correspond to a subclass of (\S+)", details):
        return found[1], f"is no {found[2]}"
    found = re.search(r"Problem with given class_path '([^']+)':\s*\n(.*)", details, re.DOTALL)
    if not found:
        return None
    lines = found[2].splitlines()
    # The problem is what is indented like its first line; the union's other complaints follow, further left.
    indent = len(lines[0]) - len(lines[0].lstrip())
    block = []
    for line in lines:
        if len(line) - len(line.lstrip()) < indent:
            break
        block.append(line[indent:])
    return class_problem("\n".join(block)) or (found[1], "\n".join(block))


def choices(details: str) -> list[str]:
    """The values of the ``Literal`` types a value did not match."""
    found: list[str] = []
    for body in re.findall(r"Literal\[(.*?)\](?=\.| |,|$)", details, re.M):
        found += [item.strip().strip("'\"") for item in body.split(",")]
    return list(dict.fromkeys(found))


def given_value(details: str) -> str | None:
    """What was given, as text."""
    found = re.search(r"Got value: (.*)", details) or re.search(r"Given value: (.*)", details)
    return found[1].strip().strip("'\"") if found else None


def wanted_kinds(details: str) -> list[str]:
    """The types a value did not match, in words."""
    kinds = re.findall(r"Expected an? (.+?)(?:\. Got value|$)", details, re.M)
    return list(dict.fromkeys(_in_words(kind) for kind in kinds))


def _in_words(type_name: str) -> str:
    words = {
        "float": "a number",
        "int": "a whole number",
        "bool": "true or false",
        "str": "text",
        "NoneType": "null",
        "dict": "a mapping",
        "list": "a list",
        "tuple": "a list",
        "Iterable": "a list",
    }
    name = re.sub(r"^<class '(.*)'>$", r"\1", type_name.strip()).partition("[")[0].rpartition(".")[2]
    return words.get(name, name)


def did_you_mean(word: str, known: list[str]) -> str:
    """``did you mean 'a' or 'b'? ``, or nothing."""
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""


def arguments_of(class_path: str) -> list[str]:
    """Names of a class's arguments; empty if it cannot be imported."""
    names: list[str] = []
    try:
        for kind in inspect.getmro(import_by_path(class_path)):
            if "__init__" not in vars(kind):
                continue
            parameters = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[1:]
            names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):  # else the next class takes the others
                break
    except Exception:  # only a suggestion hangs on it
        return []
    return names


def similar_class(class_path: str) -> str:
    """What to write instead of a class path that leads nowhere."""
    module_name, _, name = class_path.rpartition(".")
    if not module_name:
        return _full_path(name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return _similar_module(module_name, name, error)
    except Exception as error:  # the user's module may raise anything
        return f"importing {module_name} fails: {type(error).__name__}: {error}"
    names = _class_names(module)
    if near := nearest(name, names):
        return f"did you mean {module_name}.{near}?"
    return f"{module_name} has {', '.join(names)}" if names else f"{module_name} has no classes"


def _class_names(module: ModuleType) -> list[str]:
    return [name for name in getattr(module, "__all__", dir(module)) if name[:1].isupper()]


def _full_path(name: str) -> str:
    paths = {n: f"{m}.{n}" for m in OUR_MODULES for n in _class_names(importlib.import_module(m))}
    if near := nearest(name, paths):
        return f"give the whole import path; did you mean {paths[near]}?"
    return "give the whole import path, for example lit_grpo.rewards.ExactMatch"


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
