"""Builds what ``fit`` would build, and takes away all that writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningCLI

from lit_grpo.check.preflight import Preflight
from lit_grpo.cli.layers import Layer
from lit_grpo.cli.lightning import TrainingCLI
from lit_grpo.cli.strategy import resolve_strategy


class CheckCLI(TrainingCLI):
    """Parses as ``fit`` does and builds the same model, data, strategy and precision; runs nothing by itself.

    Args:
        preflight: the only callback.
        argv: what ``fit`` would get.
        layers: the configuration files, already read.
    """

    def __init__(self, preflight: Preflight, argv: Sequence[str], layers: Sequence[Layer]) -> None:
        self._preflight = preflight
        super().__init__("fit", argv, layers)

    def _run_subcommand(self, subcommand: str) -> None:
        return

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        self.save_config_callback = None
        config |= {
            "logger": False, "callbacks": None, "enable_checkpointing": False, "enable_progress_bar": False,
            "limit_train_batches": 1, "limit_val_batches": 0, "strategy": resolve_strategy(config["strategy"]),
        }  # fmt: skip
        return LightningCLI._instantiate_trainer(self, config, [self._preflight])
