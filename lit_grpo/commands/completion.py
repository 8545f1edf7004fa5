"""``lit-grpo completion``: a script with which a shell completes commands, options, keys and choices.

The script holds all words. Asking the program at each press of the key would take the seconds that its imports take.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from typing import Any

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.cli.main import COMMANDS, Command

EXAMPLES = """\
examples:
  lit-grpo completion bash > ~/.lit-grpo-completion; echo '. ~/.lit-grpo-completion' >> ~/.bashrc
  lit-grpo completion zsh > ~/.lit-grpo-completion; echo '. ~/.lit-grpo-completion' >> ~/.zshrc
"""
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }
autoload -Uz bashcompinit && bashcompinit
"""
SCRIPT = """\
# Written by `lit-grpo completion`: make it again after an update.
_lit_grpo() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} options='' choices=''
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {commands} -- "$word"))
        return
    fi
    # To bash `--key=value` is three words.
    if [ "$word" = = ]; then
        word=''
    elif [ "$before" = = ]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case ${{COMP_WORDS[1]}} in
{options}
    esac
    case $before in
{choices}
    esac
    if [ -n "$choices" ]; then
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
    elif [ "${{word:0:1}}" = - ]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    fi
}}
# Files where none of these fits.
complete -o default -F _lit_grpo lit-grpo
"""


def run(command: str, argv: list[str]) -> int:
    """Print the script, and return the exit code."""
    parser = CommandParser(command, "Print a script with which your shell completes lit-grpo's words.", EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that is to read it")
    options = parser.parse_args(argv)
    print((ZSH if options.shell == "zsh" else "") + completion_script(), end="")
    return 0


def completion_script() -> str:
    """Write the script for bash; zsh reads it behind a line of its own."""
    choices: dict[str, tuple[str, ...]] = {}
    cases = []
    for command in COMMANDS:
        words = set(_shown_options(command)) if command.function != "lit_grpo.cli.training:run" else set()
        # These take a configuration beside their own options.
        if command.name in ("check", "filter") or not words:
            found = _keys("fit" if words else command.name)
            choices |= {option: values for option, values in found.items() if values}
            words |= {*found, "--config", "--print_config", "--help"}
        cases.append(f"        {command.name}) options={shlex.quote(' '.join(sorted(words)))} ;;")
    return SCRIPT.format(
        commands=shlex.quote(" ".join(command.name for command in COMMANDS)),
        options="\n".join(cases),
        choices="\n".join(
            f"        {option}) choices={shlex.quote(' '.join(values))} ;;"
            for option, values in sorted(choices.items())
        ),
    )


def _shown_options(command: Command) -> Iterator[str]:
    """Yield the long options that a command's own help lists."""
    module, _, function = command.function.partition(":")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)(command.name, ["--help"])
    yield from re.findall(r"^ +(?:-\w, )?(--[\w-]+)", shown.getvalue(), re.MULTILINE)


def _keys(command: str) -> dict[str, tuple[str, ...]]:
    """Return the choices of every key of a configuration, by its option; empty where any value may stand."""
    from lit_grpo.cli.config_schema import config_schema
    from lit_grpo.cli.lightning_cli import build_parser

    return dict(_leaves(config_schema(build_parser(command), {}), "--"))


def _leaves(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, entry in schema.get("properties", {}).items():
        if name == "$schema":
            continue
        if "properties" in entry:
            yield from _leaves(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", tuple(_choices(entry))


def _choices(entry: dict[str, Any]) -> Iterator[str]:
    parts = [entry, *entry.get("anyOf", ())]
    for part in parts:
        yield from (str(value) for value in part.get("enum", ()))
    # Only where nothing else may stand there.
    if entry.get("type") == "boolean":
        yield from ("true", "false")
