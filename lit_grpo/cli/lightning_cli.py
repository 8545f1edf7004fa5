"""The LightningCLI of the training commands: fixed classes, our defaults, errors as one screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.cli.explain import Explainer
from lit_grpo.cli.interrupt import FirstCtrlC
from lit_grpo.cli.layers import Layer
from lit_grpo.cli.leaks import refuse_leaks
from lit_grpo.cli.recipe_reset import reset_options
from lit_grpo.cli.strategy import readers, resolve_strategy
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.errors import UserError
from lit_grpo.evaluation.writer import EvaluationWriter
from lit_grpo.module import LitGRPO
from lit_grpo.report import ReportWriter
from lit_grpo.tracking import RunSummary
from lit_grpo.tracking.mlflow_logger import RUN_FILE, RunLogger
from lit_grpo.tracking.predictions import PredictionWriter
from lit_grpo.tracking.progress import LineProgress
from lit_grpo.tracking.save_config import SaveRunConfig

TRAINER_DEFAULTS: dict[str, Any] = {
    # A run is one epoch over `data.rollouts` rollouts; min_epochs=0 lets a monitor end it at once.
    "max_epochs": 1,
    "min_epochs": 0,
    "accelerator": "auto",
    "logger": {"class_path": "lit_grpo.tracking.RunLogger", "init_args": {}},
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}

# Arguments of the Trainer that LitGRPO's manual optimization cannot follow, and what to use.
_NOT_OURS = {
    "gradient_clip_val": (None, "set model.max_grad_norm"),
    "accumulate_grad_batches": (1, "set model.micro_batch_tokens, which bounds memory and leaves the gradient alone"),
    "max_steps": (-1, "set data.rollouts: a run is bounded by rollouts"),
    "reload_dataloaders_every_n_epochs": (0, "leave it out: rollouts are made anew at every step"),
}


class TrainingCLI(LightningCLI):
    """Model and data module are fixed classes with typed arguments: short YAML, and errors that name one key.

    Always present, whatever ``trainer.callbacks`` lists: a :class:`RolloutCheckpoint`, configured by the top-level key
    ``checkpoint:``, a :class:`RunSummary` and, for ``fit``, a :class:`lit_grpo.report.ReportWriter`. One of the same
    class in ``trainer.callbacks`` takes its place;
    ``trainer.enable_checkpointing: false`` leaves the checkpoint out.

    Args:
        command: fit, validate, test or predict.
        argv: what follows it on the command line.
        layers: the configuration files, already read.
        model_class: LitGRPO or a subclass.
        datamodule_class: RolloutDataModule or a subclass.
    """

    def __init__(
        self,
        command: str,
        argv: Sequence[str],
        layers: Sequence[Layer],
        model_class: type[LitGRPO] = LitGRPO,
        datamodule_class: type[RolloutDataModule] = RolloutDataModule,
    ) -> None:
        self._command, self._argv, self._layers = command, list(argv), list(layers)
        # Only the parser that is asked for: each of the four takes a noticeable time to build.
        only = {command: LightningCLI.subcommands()[command]}
        self.subcommands = lambda: only  # type: ignore[method-assign]
        try:
            super().__init__(
                model_class,
                datamodule_class,
                save_config_callback=SaveRunConfig,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                parser_kwargs={"default_env": True, "env_prefix": "LIT_GRPO"},
                auto_configure_optimizers=False,
                args=[command, *argv, *reset_options(command, argv, layers)],
            )
        except UserError as error:
            raise self._explainer().locate(error) from error

    # Parsing.

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # A shortened key would be taken for the one it begins, and a misspelt one start a run.
        return super().init_parser(exit_on_error=False, allow_abbrev=False, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RolloutCheckpoint, "checkpoint")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in ("validate", "test"):
            parser.set_defaults({"verbose": False})  # our table says it, by set and with standard errors
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self._explainer().check_keys()
        refuse_leaks(self._layers, self._argv)
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            if (inner := _user_error(error)) is not None:
                raise inner from error
            raise self._explainer().explain(str(error)) from error

    def _explainer(self) -> Explainer:
        parser = self._subcommand_parsers[self._command]
        dests = (action.dest for action in parser._actions)
        keys = [dest for dest in dests if not dest.endswith(".help") and dest not in ("help", "print_config")]
        return Explainer(self._command, self._argv, self._layers, keys)

    def _parse_ckpt_path(self) -> None:
        # Lightning lets the checkpoint's arguments win over the given ones, silently. Here what is given holds.
        path = self.config[self._command].get("ckpt_path")
        if path is not None and (path in ("last", "best", "hpc") or not Path(path).exists()):
            raise UserError(
                f"there is no checkpoint {path}",
                where="ckpt_path",
                remedy="give the path of one, for example runs/NAME/checkpoints/last.ckpt",
            )

    # Building.

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise UserError(f"this is no seed: {error}", where="seed_everything") from error

    def before_instantiate_classes(self) -> None:
        trainer = self.config[self._command].trainer
        for name, (value, remedy) in _NOT_OURS.items():
            if trainer.get(name, value) != value:
                raise UserError(
                    f"trainer.{name} does not work with manual optimization", where=f"trainer.{name}", remedy=remedy
                )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            # What a class says in its constructor comes wrapped if it is one of a list, or one of several types.
            if not isinstance(error, UserError) and (inner := _user_error(error)) is not None:
                raise inner from error
            raise

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        # The report comes before the summary, which names it.
        closing: list[Callback] = [ReportWriter(), RunSummary()] if self._command == "fit" else [RunSummary()]
        ending = [PredictionWriter()] if self._command == "predict" else [EvaluationWriter(), *closing]
        ours = [*callbacks, *ending, FirstCtrlC()]
        if config.get("enable_progress_bar") is not False and not sys.stdout.isatty():
            ours.append(LineProgress())
        if any(isinstance(callback, ProgressBar) for callback in given):
            ours = [callback for callback in ours if not isinstance(callback, ProgressBar)]
        if config.get("enable_checkpointing") is False:
            ours = [callback for callback in ours if not isinstance(callback, Checkpoint)]
        ours = [callback for callback in ours if not any(isinstance(other, type(callback)) for other in given)]
        config["strategy"] = resolve_strategy(config["strategy"])
        config["plugins"] = readers(config.get("plugins"), config["strategy"])
        self._continue_run(config.get("logger"))
        try:
            return super()._instantiate_trainer(config, ours)
        except UserError:
            raise
        except (MisconfigurationException, ValueError) as error:
            text = str(error).partition(" Find a complete list of options")[0]
            raise UserError(f"the Trainer refuses this: {text}", where="trainer") from error

    def _continue_run(self, logger: Any) -> None:
        """Let a run that is resumed from its own folder go on there, unless the logger is told where to write."""
        path = self.config[self._command].get("ckpt_path")
        if self._command == "fit" and path is not None and isinstance(logger, RunLogger):
            folder = Path(path).absolute().parent.parent
            if (folder / RUN_FILE).is_file():
                logger.continue_run(folder)


def _user_error(error: BaseException | None) -> UserError | None:
    """A UserError that a class raised while it was checked, from under the parser's wrapping."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None
