"""``lit-grpo fit | validate | test | predict``, and the steps that every command with a configuration begins with."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_grpo.cli.config_files import Layer, read_layers
from lit_grpo.cli.engine_ahead import start_ahead
from lit_grpo.cli.errors.fast_validation import validate_fast
from lit_grpo.cli.help import help_of_class, help_text, wanted
from lit_grpo.cli.main import DONE, INTERRUPTED, STOPPED
from lit_grpo.errors import UserError

log = logging.getLogger(__name__)


def run(command: str, argv: list[str]) -> int:
    """Parse the configuration, build the run, run it, and return the exit code."""
    if (key := wanted(argv)) is not None:
        print(help_text(command, key), end="")
        return DONE
    layers = read_configuration(command, argv, start_engine=True)
    log.debug("importing Lightning and the model")
    # Only now, when the configuration is known to have no wrong key: this takes many seconds.
    from lit_grpo.cli.lightning_cli import TrainingCLI
    from lit_grpo.run.stop import KEYBOARD, stop_reason

    cli = TrainingCLI(command, help_of_class(argv), layers)
    log.debug("%s has returned", command)
    reason = stop_reason(cli.trainer)
    if reason is None:
        return DONE
    if reason.monitor == KEYBOARD:
        return INTERRUPTED
    print(f"lit-grpo: stopped by {reason.monitor} at rollout {reason.step}: {reason.reason}", file=sys.stderr)
    return STOPPED


def read_configuration(
    command: str, argv: Sequence[str], own_options: Iterable[str] = (), *, start_engine: bool = False
) -> list[Layer]:
    """Read and check the configuration files of a command, and make ready for importing what is heavy.

    Puts the current folder and those of the configuration's files on the import path, for rewards and callbacks that
    lie there, and silences messages of libraries that say nothing about the run, unless ``LIT_GRPO_LOG`` is set.

    Args:
        command: fit, validate, test or predict; check and filter take what ``fit`` takes.
        argv: the arguments behind the command, without its own options.
        own_options: options of the command that are no configuration keys, without their dashes.
        start_engine: start the processes of the run's engine, if it will have some, see :func:`start_ahead`.

    Raises:
        UserError: a file cannot be read, or holds an unknown key or choice.
    """
    layers = read_layers(argv, command)
    # Before anything heavy is imported: a misspelt key is answered in a second, Lightning and torch alone take many.
    validate_fast(command, argv, layers, own_options)
    if not layers and _says_nothing(argv):
        file = next((word for word in argv if word.endswith((".yaml", ".yml")) and Path(word).is_file()), "FILE")
        raise UserError(
            f"`lit-grpo {command}` is given no configuration",
            where="command line",
            remedy=f"lit-grpo {command} --config {file}; `lit-grpo init NAME` writes a project that trains at once",
        )
    # At the end of the path: a file that is named like a package of the run must not take its place.
    for folder in [Path.cwd(), *(Path(layer.file).resolve().parent for layer in layers)]:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    quiet = not os.environ.get("LIT_GRPO_LOG")
    if quiet:
        # Warnings of torch's C++ code, such as vLLM's about memory nodes, are written to the file descriptor. Read
        # once, when torch is imported, by engine processes too.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if start_engine:
        # Before anything that takes a second.
        start_ahead(command, argv, layers)
    if quiet:
        _hide_progress_bars()
    return layers


def _says_nothing(argv: Sequence[str]) -> bool:
    """Tell whether neither the command line nor the environment says anything of a model, or asks for help."""
    words = ("--model", "--help", "-h", "--print_config")
    typed = any(word.startswith(words) or word.partition("=")[0].endswith(".help") for word in argv)
    return not typed and not any(name.startswith("LIT_GRPO_") and "__MODEL" in name for name in os.environ)


def _hide_progress_bars() -> None:
    """Switch off what transformers draws past Python's logging."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    if transformers_logging.is_progress_bar_enabled():
        transformers_logging.disable_progress_bar()
        # It has switched off those of downloads too, which may take minutes.
        enable_progress_bars()
