"""``lit-grpo schema``: the JSON schema of a configuration, with which an editor completes keys and marks wrong ones."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.errors import UserError
from lit_grpo.utils.files import write_atomically

PACKAGES = ("lit_grpo.rewards", "lit_grpo.tracking", "lit_grpo.evaluation", "lit_grpo.report", "lit_grpo.callbacks")
"""Packages with classes that a configuration may name, beside those that the parser imports."""
EXAMPLES = """\
An editor with a YAML language server (VS Code's YAML extension, Neovim, Emacs, JetBrains) reads it where the first line
of a configuration names it:

  # yaml-language-server: $schema=schema.json

example:
  lit-grpo schema --output schema.json
"""


def run(command: str, argv: list[str]) -> int:
    """Write the schema to a file or to standard output, and return the exit code."""
    parser = CommandParser(command, "Write the JSON schema of the configuration, for editors.", EXAMPLES)
    parser.add_argument("--output", metavar="FILE", help="where it goes; standard output if left out")
    options = parser.parse_args(argv)
    # Only now: what it describes takes many seconds to import.
    from lit_grpo.cli.config_schema import config_schema
    from lit_grpo.cli.lightning_cli import build_parser
    from lit_grpo.datamodule import RolloutDataModule
    from lit_grpo.module import LitGRPO

    # Subclasses are known once they are imported, and these packages import theirs at the first use of a name.
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            getattr(module, name)
    schema = config_schema(build_parser("fit"), {"model": LitGRPO, "data": RolloutDataModule})
    text = json.dumps(schema, indent=1) + "\n"
    if options.output is None:
        print(text, end="")
        return 0
    try:
        write_atomically(Path(options.output), text)
    except OSError as error:
        raise UserError(
            f"the schema cannot be written: {error.strerror or error}", where="--output", remedy="choose another place"
        ) from error
    print(f"wrote {options.output}; a configuration names it in its first line:")
    print(f"# yaml-language-server: $schema={options.output}")
    return 0
