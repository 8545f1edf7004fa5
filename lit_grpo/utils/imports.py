"""Imports that are decided at run time: by a path in a configuration, or when a name is first asked for."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.own_code import is_the_persons
from lit_grpo.utils.spelling import nearest


def import_by_path(path: str, where: str | None = None, remedy: str = "as in my_package.my_module.my_name") -> Any:
    """Import ``package.module.name`` and return what stands under the name.

    Args:
        path: import path of a function, class or other value.
        where: key of the configuration that holds the path, for the message.
        remedy: what to do where the module cannot be imported, or the path is none.

    Raises:
        UserError: ``path`` is no import path, its module cannot be imported, or has nothing of that name; with the
            nearest name it has.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"{path!r} is no import path", where=where, remedy=remedy)
    module = import_named_module(module_name, path, where, remedy)
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = nearest(name, dir(module))
        raise UserError(
            f"{module_name} has no {name}",
            where=where,
            remedy=f"did you mean {module_name}.{near}?" if near else _own_names(module),
        ) from error


def _own_names(module: ModuleType) -> str | None:
    """Say which functions and classes a module defines; None if there are none, or too many to read."""
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f"it has {', '.join(own)}" if 0 < len(own) <= 12 else None


def path_of(value: Any, where: str) -> str:
    """Return the import path of a function or class, under which a checkpoint and other processes find it again.

    Args:
        value: function or class.
        where: key of the configuration, for messages.

    Raises:
        UserError: it has none: a lambda, or something that was made within a function.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found = getattr(sys.modules.get(str(module)), str(name), None)
    if found is not value:
        shown = name or f"object of the class {type(value).__name__}"
        raise UserError(
            f"{shown} has no import path, by which a checkpoint can say what a run was trained with",
            where=where,
            remedy="write it with `def` or `class` at the top level of a module or script, and give it or its path",
        )
    return f"{module}.{name}"


def import_named_module(
    module_name: str, path: str, where: str | None = None, remedy: str = "as in my_package.my_module.my_name"
) -> Any:
    """Import a module that a person has named.

    Args:
        module_name: the module.
        path: what was named in it, for the message.
        where: key of the configuration.
        remedy: what to do where there is no such module.

    Raises:
        UserError: it is not found, does not compile, or fails or ends the program while it is imported.
    """
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{path} cannot be imported: {error}", where=where, remedy=remedy) from error
    except SyntaxError as error:
        raise UserError(
            f"{module_name} is no valid Python: {error.msg}",
            where=f"{error.filename}:{error.lineno}" if error.filename else where,
            remedy="mend that line",
        ) from error
    # The code of a person may raise anything, and `sys.exit` in it must not end a run as if it were done.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"importing {module_name} fails: {type(error).__name__}: {error}".rstrip(": "),
            where=line_of(error) or where,
            remedy="mend the module; LIT_GRPO_DEBUG=1 shows the whole traceback",
        ) from error


def fault_of_class(path: str, *, named: bool = False) -> UserError | None:
    """Return the error of a class's module that is there and fails while it is imported; None for any other word.

    Args:
        path: a word that may be the import path of a class, as ``my_module.MyReward`` is.
        named: it stands where a class is named, so that it is one without a capital letter too.
    """
    # Other words with a dot may be names of files, and `rows.jsonl` must not run a rows.py.
    if re.fullmatch(r"([A-Za-z_]\w*\.)+[A-Za-z_]\w*" if named else r"([A-Za-z_]\w*\.)+[A-Z]\w*", path):
        try:
            import_by_path(path)
        except UserError as error:
            # Where it is not there, or needs another package, its cause is one of these.
            if error.__cause__ is not None and not isinstance(error.__cause__, ImportError | AttributeError):
                return error
    return None


def line_of(error: BaseException) -> str | None:
    """Return file and line at which an error was raised, None if it is not known.

    It is the last line of the person's own on the way there, if there is one: what a library has under it is no place
    to mend.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if is_the_persons(frame.filename)] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def from_import(error: BaseException) -> bool:
    """Tell whether an error was raised while a module was being imported."""
    # Code at the top of a module runs in a frame of this name; Python leaves those of the import system itself out.
    return any(frame.name == "<module>" for frame in traceback.extract_tb(error.__traceback__))


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package that imports its modules when their names are first asked for.

    The package lists the names once more under ``TYPE_CHECKING``, for type checkers and editors.

        if TYPE_CHECKING:
            from lit_grpo.report.writer import ReportWriter as ReportWriter

        __getattr__ = lazy_attributes(__name__, {"ReportWriter": "writer"})

    Args:
        package: ``__name__`` of the package.
        modules: module below the package, by the name that it holds; the names become the package's ``__all__``.
    """
    vars(sys.modules[package])["__all__"] = sorted(modules)

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        # From now on Python finds the name by itself, without this function.
        setattr(sys.modules[package], name, value)
        return value

    return get
