"""The configuration of a run as the parameters of its trackers, each in the form that it shows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

from lit_grpo.run.changes import flat
from lit_grpo.run.folder import RunRecord
from lit_grpo.utils.secrets import masked

log = logging.getLogger(__name__)


def log_parameters(loggers: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """Give a configuration to all trackers; one that refuses it is warned of, and never ends a run.

    Args:
        loggers: the Trainer's loggers.
        settings: nested, with secrets: they are masked here.
    """
    nested = masked(dict(settings))
    for logger in loggers:
        # Names with dots where a tracker shows a list of names; as they are where it shows what is below a name.
        dotted = isinstance(logger, MLFlowLogger | TensorBoardLogger)
        values = {k: v for part, value in nested.items() for k, v in flat(value, part).items()} if dotted else nested
        try:
            logger.log_hyperparams(values)
        except Exception as error:
            if isinstance(logger, RunRecord):
                raise
            log.warning("%s takes no parameters: %s: %s", type(logger).__name__, type(error).__name__, error)


def settings_of_module(pl_module: LightningModule, datamodule: Any) -> dict[str, Any]:
    """Return what a fit in Python is made of, in the sections of a configuration file.

    Args:
        pl_module: its hyperparameters are the section ``model``.
        datamodule: its settings are the section ``data``: plain values, dataclasses, and the names of other classes.
    """
    data = {
        name.removesuffix("_config"): _plain(value)
        for name, value in vars(datamodule or object).items()
        if not name.startswith("_") and name not in ("trainer", "allow_zero_length_dataloader_with_multiple_devices")
    }
    return {"model": dict(pl_module.hparams), **({"data": data} if datamodule is not None else {})}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        try:
            return {name: _plain(inner) for name, inner in asdict(value).items()}
        # A field may hold what cannot be copied.
        except TypeError:
            return type(value).__name__
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return type(value).__name__
