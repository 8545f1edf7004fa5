"""``lit-grpo fit | validate | test | predict``, and the steps that every command with a configuration begins with."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_grpo.cli.config_files import Layer, read_layers
from lit_grpo.cli.errors.fast_validation import validate_fast
from lit_grpo.cli.help import help_text, wanted
from lit_grpo.cli.main import DONE, INTERRUPTED, STOPPED

log = logging.getLogger(__name__)


def run(command: str, argv: list[str]) -> int:
    """Parse the configuration, build the run, run it, and return the exit code."""
    if (key := wanted(argv)) is not None:
        print(help_text(command, key), end="")
        return DONE
    layers = read_configuration(command, argv)
    log.debug("importing Lightning and the model")
    # Only now, when the configuration is known to have no wrong key: this takes many seconds.
    from lit_grpo.cli.lightning_cli import TrainingCLI
    from lit_grpo.run.stop import KEYBOARD, stop_reason

    cli = TrainingCLI(command, argv, layers)
    log.debug("%s has returned", command)
    reason = stop_reason(cli.trainer)
    if reason is None:
        return DONE
    if reason.monitor == KEYBOARD:
        return INTERRUPTED
    print(f"lit-grpo: stopped by {reason.monitor} at rollout {reason.step}: {reason.reason}", file=sys.stderr)
    return STOPPED


def read_configuration(command: str, argv: Sequence[str], own_options: Iterable[str] = ()) -> list[Layer]:
    """Read and check the configuration files of a command, and make ready for importing what is heavy.

    Puts the current folder on the import path, for rewards and callbacks that lie next to the configuration, and
    silences messages of libraries that say nothing about the run.

    Args:
        command: fit, validate, test or predict; check and filter take what ``fit`` takes.
        argv: the arguments behind the command, without its own options.
        own_options: options of the command that are no configuration keys, without their dashes.

    Raises:
        UserError: a file cannot be read, or holds an unknown key or choice.
    """
    layers = read_layers(argv, command)
    # Before anything heavy is imported: a misspelt key is answered in a second, Lightning and torch alone take many.
    validate_fast(command, argv, layers, own_options)
    # At the end of the path: a file that is named like a package of the run must not take its place.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    _silence_libraries()
    return layers


def _silence_libraries() -> None:
    """Switch off what libraries draw and write past Python's logging and warnings, unless LIT_GRPO_LOG is set."""
    if os.environ.get("LIT_GRPO_LOG"):
        return
    # Warnings of torch's C++ code, such as vLLM's about memory nodes, are written to the file descriptor. Read once,
    # when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    if transformers_logging.is_progress_bar_enabled():
        transformers_logging.disable_progress_bar()
        # It has switched off those of downloads too, which may take minutes.
        enable_progress_bars()
