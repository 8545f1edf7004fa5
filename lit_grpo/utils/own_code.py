"""Whose code it is: this package's, the person's, or that of an installed package or Python, told by the file."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def _folders(*paths: str | Path) -> tuple[str, ...]:
    """Return the beginnings of all paths below some folders, also as they are without symbolic links."""
    return tuple({f"{one}{os.sep}" for path in paths for one in (str(path), os.path.realpath(path))})


def _package_folders(paths: Iterable[str]) -> list[str]:
    """Return those of some folders that packages were installed into, by ``pip install --target`` or a Python below.

    A project that is installed in place is not among them: what describes it lies with the installed packages.
    """
    found = []
    for path in paths:
        # A folder on the path may be gone, or not be for this user.
        with suppress(OSError):
            if path and Path(path).is_dir() and next(Path(path).glob("*.dist-info"), None) is not None:
                found.append(path)
    return found


_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = _folders(_PACKAGE, _PACKAGE / "callbacks")
_INSTALLED = _folders(
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    *_package_folders(sys.path),
)


def is_of_this_package(path: str) -> bool:
    """Tell whether a source file belongs to lit-grpo."""
    return path.startswith(_OWN)


def is_ours(path: str) -> bool:
    """Tell whether a source file belongs to lit-grpo or to the person, and not to an installed package or Python."""
    if is_of_this_package(path):
        return True
    # What begins with `<` is code without a file: `<string>`, `<frozen importlib._bootstrap>`.
    return not path.startswith(("<", *_INSTALLED)) and not os.path.realpath(path).startswith(_INSTALLED)


def is_the_persons(path: str) -> bool:
    """Tell whether a source file belongs to neither lit-grpo nor an installed package or Python."""
    return is_ours(path) and not is_of_this_package(path)
