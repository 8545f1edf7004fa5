"""The LightningCLI of every command that builds a run: fixed classes, our defaults, errors as one screen."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_grpo.callbacks import FlightRecorder, HealthMonitor, Monitor, RolloutCheckpoint
from lit_grpo.cli.checkpoint_places import places_in
from lit_grpo.cli.config_files import Layer
from lit_grpo.cli.config_merge_check import check_class_changes
from lit_grpo.cli.errors.class_paths import load_classes
from lit_grpo.cli.errors.error_messages import Explainer, user_error_below
from lit_grpo.cli.errors.right_values import right_value, shown_as
from lit_grpo.cli.errors.schema import PLAIN_KEYS
from lit_grpo.cli.interrupt import FirstCtrlC
from lit_grpo.cli.printed_config import with_recipe
from lit_grpo.cli.recipe_reset import reset_options
from lit_grpo.cli.resume import RunSettings, check_evaluation, check_resume, settings_of, takes_other_prompts
from lit_grpo.cli.strategy import add_checkpoint_reader, resolve_strategy
from lit_grpo.cli.text_values import TextParser, make_checked
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.distributed.launcher import check_launcher
from lit_grpo.errors import UserError
from lit_grpo.evaluation.writer import EvaluationWriter
from lit_grpo.module import LitGRPO
from lit_grpo.report import ReportWriter
from lit_grpo.run.changes import keys_in
from lit_grpo.run.folder import check_can_be_made, goes_on_from, shown
from lit_grpo.terminal.log_file import LogFile
from lit_grpo.terminal.progress import RunProgress
from lit_grpo.tracking import RunSummary
from lit_grpo.tracking.completions import CompletionTable
from lit_grpo.tracking.mlflow_logger import RunLogger
from lit_grpo.tracking.predictions import PredictionWriter
from lit_grpo.tracking.run_note import RUN_FILE
from lit_grpo.tracking.save_config import SaveRunConfig
from lit_grpo.tracking.tracked_run import TrackedRun
from lit_grpo.trainer.checkpoint_words import WORDS, Word, begins_anew, check_is_there, no_checkpoint
from lit_grpo.trainer.refused import REFUSED_ARGUMENTS, check_argument
from lit_grpo.utils.imports import from_import, line_of
from lit_grpo.utils.secrets import holds_mask, with_environment
from lit_grpo.utils.text import shorten

log = logging.getLogger(__name__)

TRAINER_DEFAULTS: dict[str, Any] = {
    # A run is one epoch over `data.rollouts` rollouts; min_epochs=0 lets a monitor end it at once.
    "max_epochs": 1,
    "min_epochs": 0,
    "accelerator": "auto",
    # A class path, not an instance, so that `--trainer.logger.run_name NAME` sets one argument of it.
    "logger": {"class_path": "lit_grpo.tracking.RunLogger", "init_args": {}},
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    # The loaders share out prompts over ranks themselves.
    "use_distributed_sampler": False,
}

_ARGUMENT_OF = {"gpu": "accelerator", "cuda": "accelerator", "timer": "max_time", "duration": "max_time"}
_WORDS_OF_ARGUMENTS = re.compile("|".join(_ARGUMENT_OF))
"""Words in Lightning's messages, and the Trainer's argument that each is about."""

_ABOVE_ZERO = ("val_check_interval", "check_val_every_n_epoch", "log_every_n_steps", "num_nodes")
"""Numbers of the Trainer that it divides by, or counts to, without a look."""


class _Parser(TextParser, LightningArgumentParser):
    """LightningCLI's parser, under which text stays text."""


class TrainingCLI(LightningCLI):
    """LightningCLI whose model and data module are fixed classes with typed arguments, for short YAML and exact errors.

    Always present, whatever ``trainer.callbacks`` lists: a :class:`RolloutCheckpoint`, configured by the top-level key
    ``checkpoint:``, a :class:`RunSummary`, a :class:`RunProgress` and, for ``fit``, a
    :class:`lit_grpo.report.ReportWriter`. One of the same class in ``trainer.callbacks`` replaces the one from here,
    and any progress bar replaces ours; ``trainer.enable_checkpointing: false`` leaves the checkpoint out,
    ``trainer.enable_progress_bar: false`` the progress.

    Args:
        command: fit, validate, test or predict.
        argv: the arguments that follow it on the command line.
        layers: the configuration files, already read.
        model_class: LitGRPO or a subclass.
        datamodule_class: RolloutDataModule or a subclass.

    Raises:
        UserError: the configuration is wrong; it names the key, where it stands, and a remedy.
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
        self._begun: Path | None = None
        """Folder of the named run that begins anew there, since it has no checkpoint to go on from."""
        load_classes()
        # Only the parser that is needed: each of the four takes a noticeable time to build.
        chosen = {command: LightningCLI.subcommands()[command]}
        self.subcommands = lambda: chosen  # type: ignore[method-assign]
        try:
            super().__init__(
                model_class,
                datamodule_class,
                save_config_callback=SaveRunConfig,
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                parser_kwargs={"default_env": True, "env_prefix": "LIT_GRPO"},
                auto_configure_optimizers=False,
                parser_class=_Parser,
                args=[command, *argv, *reset_options(command, argv, layers)],
            )
        # The parts of a run name a wrong argument, and only here it is known in which file and line that stands.
        except UserError as error:
            raise self._explainer().locate(error) from error

    # Parsing.

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        # Last, for all classes that LightningCLI has nothing of its own for.
        self.parser.add_instantiator(make_checked, object)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # A shortened key would be taken for the one it begins, and a misspelt one start a run.
        return super().init_parser(exit_on_error=False, allow_abbrev=False, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RolloutCheckpoint, "checkpoint")
        parser.add_lightning_class_args(CompletionTable, "completions")
        parser.add_argument(
            "--monitors",
            type=bool,
            default=True,
            help=PLAIN_KEYS["monitors"],
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in ("validate", "test"):
            # EvaluationWriter prints a table by set and with standard errors; Lightning's would say the same again.
            parser.set_defaults({"verbose": False})
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        log.debug("parsing the configuration")
        self._explainer().check_keys()
        check_class_changes(self._layers, self._argv)
        printed = io.StringIO() if any(w.partition("=")[0] == "--print_config" for w in self._argv) else None
        try:
            with contextlib.nullcontext() if printed is None else contextlib.redirect_stdout(printed):
                self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            if (cause := user_error_below(error)) is not None:
                raise cause from error
            raise self._explainer().explain(str(error)) from error
        except UserError:
            raise
        # What the command line and the environment give is YAML too, which only the parser reads; and it imports the
        # modules of classes, where a person's own code runs. `--help` ends with SystemExit from no such module.
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not from_import(error):
                if printed is not None:
                    print(with_recipe(printed.getvalue()), end="")
                raise
            what = "a module cannot be imported" if from_import(error) else "a value cannot be read"
            raise UserError(
                f"{what}: {type(error).__name__}: {shorten(str(error), 300)}",
                where=line_of(error) if from_import(error) else self._explainer().sources(),
                remedy="LIT_GRPO_DEBUG=1 shows the whole traceback",
            ) from error

        self._restore_secrets()

    def _restore_secrets(self) -> None:
        """Take what a run has masked in its configuration from the environment, and refuse what is not there."""
        config = with_environment(self.config[self._command], os.environ)
        self.config[self._command] = config
        if (key := holds_mask(config)) is not None:
            raise UserError(
                f"`{key}` was masked when the run wrote its configuration, and has to be given again",
                where=self._explainer().place(key),
                remedy="set the environment variable of that name, where it is one; or give a file of your own behind "
                f"this one, --config secrets.yaml; or --{key.replace('init_args.', '')} on the command line",
            )

    def _explainer(self) -> Explainer:
        parser = self._subcommand_parsers[self._command]
        dests = (action.dest for action in parser._actions)
        keys = [dest for dest in dests if not dest.endswith(".help") and dest not in ("help", "print_config")]
        types = {
            action.dest: (typehint, action.default)
            for action in parser._actions
            if action.dest in keys and (typehint := getattr(action, "_typehint", None)) is not None
        }
        return Explainer(self._command, self._argv, self._layers, keys, types=types)

    def _parse_ckpt_path(self) -> None:
        # Lightning lets the hyperparameters in the checkpoint silently win over the configuration. Here they do not.
        config = self.config[self._command]
        if config.get("ckpt_path") in WORDS:
            config["ckpt_path"] = self._checkpoint_of(config.ckpt_path)
        path = config.get("ckpt_path")
        if path is not None:
            check_is_there(path)
        if path is not None and self._command != "fit":
            check_evaluation(Path(path))

    def _checkpoint_of(self, word: Word) -> str | None:
        """Return the path that ``last`` or ``best`` stands for; None where a fit with ``last`` begins anew."""
        config = self.config[self._command]
        places = places_in(config.trainer, config.get("checkpoint"))
        found = places.find(word)
        if found is not None:
            newer = places.newer_without(found)
            more = f"; the newest run, {shown(newer)}, has no checkpoint" if newer is not None else ""
            print(f"ckpt_path: {word} is {shown(found)}{more}", file=sys.stderr)
            return str(found)
        if word == "best" or self._command != "fit":
            raise no_checkpoint(word, places)
        # As Lightning has it: a job that is started again and again with `last` begins where there is nothing yet.
        print(begins_anew(places), file=sys.stderr)
        self._begun = places.begun()
        return None

    # Building.

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise UserError(f"this is no seed: {error}", where="seed_everything") from error

    def before_instantiate_classes(self) -> None:
        self._check_resume()
        trainer = self.config[self._command].trainer
        for name in _ABOVE_ZERO:
            if (number := trainer.get(name)) is not None and number <= 0:
                raise UserError(f"{name} is {number}, must be above 0", where=f"trainer.{name}", remedy="leave it out")
        for name in ("min_epochs", "min_steps"):
            if (number := trainer.get(name)) is not None and number < 0:
                raise UserError(f"{name} is {number}, must be at least 0", where=f"trainer.{name}")
        checkpoint = self.config[self._command].get("checkpoint")
        for key, folder in (
            ("checkpoint.dirpath", checkpoint.get("dirpath") if checkpoint else None),
            ("trainer.default_root_dir", trainer.get("default_root_dir")),
        ):
            # A place that is no path of this machine is one of a remote store.
            if folder is not None and "://" not in str(folder):
                check_can_be_made(Path(str(folder)), key)
        for refused in REFUSED_ARGUMENTS:
            check_argument(refused.name, trainer.get(refused.name))

    def _check_resume(self) -> None:
        # Before the model is built, which takes longer than to say no.
        config = self.config[self._command]
        parser = self._subcommand_parsers[self._command]
        self._settings = settings_of(parser.dump(config, skip_unset=False)) if self._command == "fit" else {}
        self._changed: list[str] = []
        # For this one start: in the configuration that the run leaves behind, it would let later changes pass unseen.
        self._accepted = keys_in(config.checkpoint.accept_changes)
        config["checkpoint"]["accept_changes"] = None
        if self._command == "fit" and config.get("ckpt_path") is not None:
            self._changed = check_resume(Path(config.ckpt_path), self._settings, self._accepted)

    def instantiate_classes(self) -> None:
        log.debug("building trainer, model and data")
        try:
            super().instantiate_classes()
            self.datamodule.other_prompts = takes_other_prompts(self._changed)
            for callback in self.trainer.checkpoint_callbacks:
                if isinstance(callback, RolloutCheckpoint) and self._accepted:
                    callback.accepted = self._accepted
            log.debug("trainer, model and data are built")
        except ValueError as error:
            # jsonargparse wraps the error of a constructor in its own where the class is one of a list or of a union.
            if not isinstance(error, UserError) and (cause := user_error_below(error)) is not None:
                raise cause from error
            raise

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        configured = config.get("callbacks") or []
        configured = configured if isinstance(configured, list) else [configured]
        # It comes first: where a run has to end soon, it is saved before anything else is written.
        added = [FirstCtrlC(), LogFile(), *callbacks, *self._result_writers(), TrackedRun()]
        if self._command == "fit":
            added += [*self._watchers(configured), RunSettings(self._settings)]
        if config.get("enable_progress_bar") is not False:
            added.append(RunProgress())
        if any(isinstance(callback, ProgressBar) for callback in configured):
            added = [callback for callback in added if not isinstance(callback, ProgressBar)]
        if config.get("enable_checkpointing") is False:
            added = [callback for callback in added if not isinstance(callback, Checkpoint)]
        added = [callback for callback in added if not any(isinstance(other, type(callback)) for other in configured)]
        # The Trainer would take `fsdp` for FSDP1.
        config["strategy"] = resolve_strategy(config["strategy"])
        config["plugins"] = add_checkpoint_reader(config.get("plugins"), config["strategy"])
        # Before anything asks the logger for its folder, which is made at the first use.
        self._continue_run(config.get("logger"))
        try:
            trainer = super()._instantiate_trainer(config, added)
            check_launcher(trainer)
            # With a logger of Lightning's, too, a run goes on in its folder, and is evaluated there.
            if (path := self.config[self._command].get("ckpt_path")) is not None:
                goes_on_from(trainer, Path(path).absolute())
            return trainer
        except UserError:
            raise
        # Lightning checks many of its arguments by using them.
        except (MisconfigurationException, ValueError, TypeError, ArithmeticError) as error:
            text = str(error).partition(" Find a complete list of options")[0]
            key, explainer = self._argument_named_in(text), self._explainer()
            right = right_value(key, None, None) if key.startswith("trainer.") else None
            remedy = None if right is None else f"for example {shown_as(key, right, explainer.place(key))}"
            raise UserError(f"the Trainer refuses this: {text}", where=key, remedy=remedy) from error

    def _argument_named_in(self, text: str) -> str:
        """Return the key of the Trainer's argument that a message of Lightning is about, as far as it can be told."""
        trainer, defaults = self.config[self._command].trainer, self._subcommand_parsers[self._command].get_defaults()
        words = re.findall(r"[a-z_]+", _WORDS_OF_ARGUMENTS.sub(lambda word: _ARGUMENT_OF[word[0]], text.lower()))
        given = [name for name in trainer.keys() if trainer.get(name) != defaults.trainer.get(name)]  # noqa: SIM118
        named = [name for name in given if name in words]
        # Of several the one that is named first; where none is, the only one that was given.
        if named:
            return f"trainer.{min(named, key=words.index)}"
        return f"trainer.{given[0]}" if len(given) == 1 else self._explainer().sources()

    def _watchers(self, configured: list[Any]) -> list[Callback]:
        """Return what watches every fit: the monitors, unless there are some, and a small flight record."""
        config = self.config[self._command]
        added: list[Callback] = []
        if config.get("monitors") and not any(isinstance(one, HealthMonitor | Monitor) for one in configured):
            added.append(HealthMonitor(actions={"critical": "log"}))
        # A few completions token by token, for the report.
        if config.completions.every:
            added.append(FlightRecorder(steps=2, landmarks=6, groups=config.completions.groups))
        return added

    def _result_writers(self) -> list[Callback]:
        if self._command == "predict":
            return [PredictionWriter()]
        # The report comes before the summary, which names its file.
        report: list[Callback] = [ReportWriter()] if self._command == "fit" else []
        return [EvaluationWriter(), *report, RunSummary()]

    def _continue_run(self, logger: Any) -> None:
        # A run that is resumed from a checkpoint in its own folder goes on there, unless the logger names another one;
        # the name of that run itself stands in the configuration that it has left behind.
        path = self.config[self._command].get("ckpt_path")
        folder = self._begun if path is None else Path(path).absolute().parent.parent
        fit = self._command == "fit" and isinstance(logger, RunLogger)
        if fit and folder is not None and (folder / RUN_FILE).is_file():
            logger.continue_run(folder.absolute())


class ParseOnlyCLI(TrainingCLI):
    """CLI that parses the configuration of ``fit``, has it read, and builds nothing of it.

    Args:
        argv: the arguments that ``fit`` would get.
        layers: the configuration files, already read.
        read: is given the configuration, with every default filled in, as nested dictionaries. What it refuses is told
            with file and line.
    """

    def __init__(self, argv: Sequence[str], layers: Sequence[Layer], read: Callable[[dict[str, Any]], None]) -> None:
        self._read = read
        super().__init__("fit", argv, layers)

    def instantiate_classes(self) -> None:
        self._read(dict(self.config["fit"].as_dict()))

    def _run_subcommand(self, subcommand: str) -> None:
        return


class BuildOnlyCLI(TrainingCLI):
    """CLI that builds the model, data, strategy and precision of ``fit`` and runs nothing; its Trainer writes nothing.

    It is the base of commands that run what ``fit`` would run in their own way.

    Args:
        argv: the arguments that ``fit`` would get.
        layers: the configuration files, already read.
        callbacks: the Trainer's only callbacks; those of the configuration are left out.
        datamodule_class: RolloutDataModule or a subclass.
        before: is given the configuration, with every default filled in, as nested dictionaries, before anything is
            built.
        trainer_settings: further arguments of the Trainer, over those of the configuration.
    """

    def __init__(
        self,
        argv: Sequence[str],
        layers: Sequence[Layer],
        callbacks: Sequence[Callback] = (),
        datamodule_class: type[RolloutDataModule] = RolloutDataModule,
        before: Callable[[dict[str, Any]], None] | None = None,
        **trainer_settings: Any,
    ) -> None:
        self._own_callbacks, self._own_settings, self._before = list(callbacks), trainer_settings, before
        super().__init__("fit", argv, layers, LitGRPO, datamodule_class)

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        if self._before is not None:
            self._before(dict(self.config["fit"].as_dict()))

    def _run_subcommand(self, subcommand: str) -> None:
        return

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        self.save_config_callback = None
        config |= {
            "logger": False, "callbacks": None, "enable_checkpointing": False, "enable_progress_bar": False,
            "strategy": resolve_strategy(config["strategy"]), **self._own_settings,
        }  # fmt: skip
        # Not TrainingCLI's, which would add the callbacks that write.
        return LightningCLI._instantiate_trainer(self, config, self._own_callbacks)


class _ParserIsBuiltError(Exception):
    """Carries a parser out of the constructor that would go on and build a run."""

    def __init__(self, parser: LightningArgumentParser) -> None:
        super().__init__("the parser is built")
        self.parser = parser


class _ParserOnlyCLI(TrainingCLI):
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        raise _ParserIsBuiltError(self._subcommand_parsers[self._command])


def build_parser(command: str) -> LightningArgumentParser:
    """Build the parser of fit, validate, test or predict, which knows every key of a configuration, and no more."""
    try:
        _ParserOnlyCLI(command, [], [])
    except _ParserIsBuiltError as built:
        return built.parser
    raise RuntimeError("LightningCLI has built a parser and not called parse_arguments")
