"""The parser of the commands that need no trainer: argparse, with our way of saying what is wrong."""

from __future__ import annotations

import argparse
import re
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

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        remedy = f"see {self.prog} --help"
        if found := re.search(r"unrecognized arguments: (\S+)", message):
            near = nearest(found[1].partition("=")[0], options)
            remedy = f"did you mean {near}?" if near else f"the options are {', '.join(options)}"
        raise UserError(message, where="command line", remedy=remedy)
