"""The parser of the commands that need no trainer: argparse, with our way of saying what is wrong."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

from lit_grpo.errors import UserError, nearest


class CommandParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` that raises :class:`lit_grpo.errors.UserError` instead of printing its usage."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"lit-grpo {command}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def options(self) -> list[str]:
        """The long options, without their dashes."""
        given = (option for action in self._actions for option in action.option_strings)
        return [option.removeprefix("--") for option in given if option.startswith("--")]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"unrecognized arguments: (\S+)", message):
            word = found[1].partition("=")[0]
            if not word.startswith("-"):
                raise self._wrong(f"{word!r} is not expected here", f"see {self.prog} --help")
            near = _meant(word, self.options())
            listed = ", ".join(f"--{name}" for name in self.options())
            raise self._wrong(f"there is no option {word}", near or f"the options are {listed}")
        if found := re.search(r"arguments are required: (.*)", message):
            missing = [name.removeprefix("--") for name in found[1].split(", ")]
            for word in (word.partition("=")[0] for word in self._given if word.startswith("-")):
                if word.removeprefix("--") not in self.options() and (near := _meant(word, missing)):
                    raise self._wrong(f"there is no option {word}", near)
        raise self._wrong(message, f"see {self.prog} --help")

    @staticmethod
    def _wrong(what: str, remedy: str) -> UserError:
        return UserError(what, where="command line", remedy=remedy)


def _meant(word: str, options: list[str]) -> str | None:
    """``did you mean --output?``, of one of the options; None if the word is like none."""
    name = word.lstrip("-")
    near = next((option for option in options if name and option.startswith(name)), None) or nearest(name, options)
    return f"did you mean --{near}?" if near and "." not in name else None
