"""``lit-grpo fit | validate | test | predict``: LightningCLI with our defaults, files, and error screens."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import partial
from pathlib import Path

from lit_grpo.cli import INTERRUPTED, STOPPED
from lit_grpo.cli.early import check_early
from lit_grpo.cli.layers import read_layers

_CHATTER = (
    "💡",
    "Seed set to",
    "Loading `train_dataloader` to estimate",
    "Seed set to",
    "TPU available",
    "`Trainer.fit` stopped: `max_epochs=1` reached",
    "Restoring states from",
)


def run(command: str, argv: list[str]) -> int:
    """Parse, build and run; the exit code if no exception says more."""
    layers = read_layers(argv, command)
    check_early(command, argv, layers)  # before anything heavy is imported
    if str(Path.cwd()) not in sys.path:  # rewards and callbacks of the user, next to the configuration
        sys.path.append(str(Path.cwd()))
    _quiet()
    from lit_grpo.cli.lightning_cli import TrainingCLI
    from lit_grpo.run.stop import KEYBOARD, stop_reason

    cli = TrainingCLI(command, argv, layers)
    reason = stop_reason(cli.trainer)
    if reason is not None and reason.monitor == KEYBOARD:
        return INTERRUPTED
    if reason is not None:
        print(f"lit-grpo: stopped by {reason.monitor} at rollout {reason.step}: {reason.reason}", file=sys.stderr)
        return STOPPED
    return 0


def _without(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()


def _quiet() -> None:
    """Leave out what says nothing about the run."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Total length of `list` across ranks is zero.*")
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed"):
        logging.getLogger(f"lightning.{name}").addFilter(
            lambda record: not record.getMessage().lstrip().startswith(_CHATTER)
        )
    # torchao, where it is installed, speaks of kernels for other cards than there are as soon as a model is loaded.
    for name, words in (("torchao", "Failed to load"), ("torch.utils._pytree", "is an Enum subclass")):
        logging.getLogger(name).addFilter(partial(_without, words))
