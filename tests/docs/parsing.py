"""Whether a command would be understood: its program, its options and the files that it names are there.

Each parser is the program's own, stopped when it has read its arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.docs.typed import Typed
from tests.paths import ROOT


class _Understood(BaseException):
    """Raised by a parser that has read its arguments; no ``except Exception`` of a program holds it back."""


@contextmanager
def _stopped_parsers() -> Iterator[pytest.MonkeyPatch]:
    """Argument parsers that end their program once they have understood what they were given."""
    read = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        read(self, *args, **kwargs)
        raise _Understood

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        yield patch


def understand(command: Typed) -> None:
    """Parse one command as its program would.

    Raises:
        AssertionError: the program, an option, a value or a named file is not what there is.
    """
    program, *arguments = command.words
    checks: dict[str, Callable[[list[str], Path], None]] = {
        "lit-grpo": _lit_grpo, "python": _python, "pip": _pip, "git": _git, "hf": _hf,
        "mkdocs": _mkdocs, "scripts/setup_venv": _setup_venv,
    }  # fmt: skip
    if program in checks:
        checks[program](arguments, command.folder)
    else:
        assert program.startswith("scripts/"), f"nothing here knows how {program} is called"
        _shell_script(program, arguments)
    # What a command writes need not be there; all else of the clone must.
    for before, word in zip(command.words, command.words[1:], strict=False):
        if re.match(r"(configs|scripts|docs|tests|callbacks|lit_grpo)/", word) and before not in ("--output", "--json"):
            assert (ROOT / word).exists(), f"{command} names {word}"


def _lit_grpo(arguments: list[str], folder: Path) -> None:
    from lit_grpo.cli.lightning_cli import TrainingCLI
    from lit_grpo.cli.main import main

    def understood(*_: Any, **__: Any) -> NoReturn:
        raise _Understood

    with _stopped_parsers() as patch:
        patch.chdir(folder)
        # Called when the whole configuration has been parsed; next would be the building of the run.
        patch.setattr(TrainingCLI, "before_instantiate_classes", understood)
        _expect_understood(lambda: main(arguments), ["lit-grpo", *arguments])


def _python(arguments: list[str], folder: Path) -> None:
    if arguments[0] == "-m":
        assert arguments[1] in ("pytest", "lit_grpo", "venv"), arguments
        return
    script = ROOT / arguments[0]
    assert script.is_file(), f"there is no {arguments[0]}"
    with _stopped_parsers() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(script), *arguments[1:]])
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        patch.setattr(os, "execv", lambda *_: pytest.fail("a script begins anew before it reads its arguments"))
        modules = set(sys.modules)
        try:
            _expect_understood(lambda: runpy.run_path(str(script), run_name="__main__"), arguments)
        finally:
            # Neighbours of a script, imported by their bare names, would stay for the next one.
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if file.startswith(str(ROOT / "scripts")):
                    del sys.modules[name]


def _expect_understood(program: Callable[[], Any], words: list[str]) -> None:
    try:
        code = program()
    except _Understood:
        return
    except SystemExit as end:
        code = end.code
    # A program without options is not run: it must have ended by itself, as --version does.
    assert not code, f"{' '.join(words)}: ended with {code}"
    helps = any(word == "--help" or word.endswith(".help") for word in words)
    assert words[-1].startswith("--") or helps, f"{' '.join(words)} ran instead of reading its arguments"


def _extras(text: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in filter(None, text.split(",")):
        assert extra in known, f"there is no extra {extra}"


def _pip(arguments: list[str], folder: Path) -> None:
    assert arguments[0] == "install"
    # Not on PyPI: what is installed is the clone.
    named = re.fullmatch(r"\.(?:\[(.*)\])?", arguments[arguments.index("-e") + 1])
    assert named, arguments
    _extras(named[1] or "")
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).is_file()


def _setup_venv(arguments: list[str], folder: Path) -> None:
    assert len(arguments) <= 1
    _extras("".join(arguments))


def _git(arguments: list[str], folder: Path) -> None:
    assert arguments[0] == "clone"


def _hf(arguments: list[str], folder: Path) -> None:
    assert arguments[0] in ("download", "upload", "repo", "repos", "auth")


def _mkdocs(arguments: list[str], folder: Path) -> None:
    assert arguments in (["serve"], ["build", "--strict"])


def _shell_script(program: str, arguments: list[str]) -> None:
    path = ROOT / program
    assert path.is_file(), f"there is no {program}"
    assert os.access(path, os.X_OK), f"{program} is no program"
    # Only these hand their arguments on.
    assert not arguments or path.name in ("quickstart", "test"), f"{program} takes no arguments"


def check_inline(text: str) -> None:
    """Look at a command in a sentence, which may be the beginning of one or hold ``…``: what it names is there.

    Raises:
        AssertionError: there is no such program, command or option.
    """
    words = text.removeprefix(". ").split()
    if words[0] in ("lit-grpo", "python"):
        words = words[1:] if words[0] == "python" else words
    if words[0] == "lit-grpo":
        from lit_grpo.cli.main import COMMANDS

        names = {command.name for command in COMMANDS}
        assert words[1] in names or words[1] == "--version", f"there is no {words[0]} {words[1]}"
        # The other commands take every key of the configuration, too.
        own = [
            path for path in (ROOT / "lit_grpo/commands").glob(f"{words[1]}*") if words[1] not in ("check", "filter")
        ]
        files = [file for path in own for file in ([path] if path.is_file() else path.glob("*.py"))]
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        for option in (word.partition("=")[0] for word in words[2:] if files and word.startswith("--")):
            assert f'"{option}"' in source, f"lit-grpo {words[1]} has no {option}"
        return
    if words[0] == "-m":
        return
    path = ROOT / words[0]
    assert path.exists(), f"there is no {words[0]}"
    if path.suffix == ".py":
        source = path.read_text(encoding="utf-8")
        for option in (word for word in words[1:] if word.startswith("--")):
            assert f'"{option}"' in source, f"{words[0]} has no {option}"
