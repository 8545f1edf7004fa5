"""The argument parser of the commands that need no trainer: argparse, with errors that name a remedy."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from typing import NoReturn

from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import nearest


class _Wrapped(argparse.RawDescriptionHelpFormatter):
    """Layout of ``--help`` whose sentences are as wide as the terminal, and whose indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            # Commands and columns stand indented, and could not be copied once they are wrapped.
            if line.startswith(" ") or not line:
                lines.append(indent + line)
            elif lines and lines[-1] and not lines[-1].startswith(" "):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in lines
        )


class CommandParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` that raises :class:`lit_grpo.errors.UserError` instead of printing its usage."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"lit-grpo {command}",
            description=description,
            epilog=epilog,
            # A shortened option would be taken for the one it begins, and a misspelt one start hours of work.
            allow_abbrev=False,
            formatter_class=_Wrapped,
        )

    def options(self) -> list[str]:
        """List the long options, without their dashes."""
        option_strings = (option for action in self._actions for option in action.option_strings)
        return [option.removeprefix("--") for option in option_strings if option.startswith("--")]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        # Kept for `error`, to which argparse gives the message alone.
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the UserError for a message of argparse, with the nearest valid option as its remedy."""
        if match := re.search(r"unrecognized arguments: (\S+)", message):
            word = match[1].partition("=")[0]
            if not word.startswith("-"):
                raise self._user_error(f"{word!r} is not expected here", f"see {self.prog} --help")
            suggestion = _suggestion(word, self.options())
            listed = ", ".join(f"--{name}" for name in self.options())
            raise self._user_error(f"there is no option {word}", suggestion or f"the options are {listed}")
        if match := re.search(r"arguments are required: (.*)", message):
            # argparse complains of the missing option first; if it is there misspelt, that is the better answer.
            missing = [name.removeprefix("--") for name in match[1].split(", ")]
            for word in (word.partition("=")[0] for word in self._arguments if word.startswith("-")):
                if word.removeprefix("--") not in self.options() and (suggestion := _suggestion(word, missing)):
                    raise self._user_error(f"there is no option {word}", suggestion)
            raise self._user_error(f"{' and '.join(match[1].split(', '))} {_verb(match[1])} missing", self._example())
        if match := re.match(r"argument (\S+): invalid (int|float) value: (.*)", message):
            word, right = ("whole number", "8") if match[2] == "int" else ("number", "0.5")
            raise self._user_error(f"{match[1]} takes a {word}, not {match[3]}", f"for example {match[1]} {right}")
        if match := re.match(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message):
            choices = match[3].replace("'", "").split(", ")
            near = nearest(match[2].strip("'"), choices)
            remedy = f"did you mean {near}?" if near else f"choose one of {', '.join(choices)}"
            raise self._user_error(f"{match[1]} cannot be {match[2]}", remedy)
        if match := re.match(r"argument (\S+): expected .*argument", message):
            raise self._user_error(f"{match[1]} has no value behind it", self._example(match[1]))
        raise self._user_error(message, f"see {self.prog} --help")

    def _example(self, option: str = "") -> str:
        """Return the first example of ``--help``, of those with an option where there is one; else where to look."""
        lines = [line.strip() for line in (self.epilog or "").splitlines()]
        found = [
            line.partition("  ")[0]
            for line in lines
            if line.startswith(self.prog) and option and option in line.split()
        ]
        found += [line.partition("  ")[0] for line in lines if line.startswith(self.prog)]
        return f"as in {found[0]}" if found else f"see {self.prog} --help"

    @staticmethod
    def _user_error(what: str, remedy: str) -> UserError:
        return UserError(what, where="command line", remedy=remedy)


def _verb(names: str) -> str:
    return "are" if "," in names else "is"


def _suggestion(word: str, options: list[str]) -> str | None:
    """Ask ``did you mean --output?``; None if no option resembles the word."""
    name = word.lstrip("-")
    near = next((option for option in options if name and option.startswith(name)), None) or nearest(name, options)
    # A dotted name is a configuration key, never one of these options.
    return f"did you mean --{near}?" if near and "." not in name else None
