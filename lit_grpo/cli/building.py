"""The LightningCLI of commands that build what ``fit`` would build and run it in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningCLI

from lit_grpo.cli.layers import Layer
from lit_grpo.cli.lightning_cli import TrainingCLI
from lit_grpo.cli.strategy import resolve_strategy
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.module import LitGRPO


class BuildingCLI(TrainingCLI):
    """Parses as ``fit`` does and builds the same model, data, strategy and precision; its Trainer writes nothing.

    Runs nothing by itself.

    Args:
        argv: what ``fit`` would get.
        layers: the configuration files, already read.
        callbacks: the only ones.
        datamodule_class: RolloutDataModule or a subclass.
        trainer: further settings of the Trainer.
    """

    def __init__(
        self,
        argv: Sequence[str],
        layers: Sequence[Layer],
        callbacks: Sequence[Callback] = (),
        datamodule_class: type[RolloutDataModule] = RolloutDataModule,
        **trainer: Any,
    ) -> None:
        self._own_callbacks, self._own_trainer = list(callbacks), trainer
        super().__init__("fit", argv, layers, LitGRPO, datamodule_class)

    def _run_subcommand(self, subcommand: str) -> None:
        return

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        self.save_config_callback = None
        config |= {
            "logger": False, "callbacks": None, "enable_checkpointing": False, "enable_progress_bar": False,
            "strategy": resolve_strategy(config["strategy"]), **self._own_trainer,
        }  # fmt: skip
        return LightningCLI._instantiate_trainer(self, config, self._own_callbacks)
