"""The resolved configuration of a run, kept beside its checkpoints and in MLflow."""

from __future__ import annotations

import json
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from lit_grpo.run.folder import run_folder, run_logger
from lit_grpo.tracking.parameters import log_parameters
from lit_grpo.utils.files import OWNER_ALONE
from lit_grpo.utils.secrets import masked

OBJECTIVE_FILE = "objective.json"


class SaveRunConfig(SaveConfigCallback):
    """Callback that writes ``config.yaml`` (``config-validate.yaml``, ... for other commands) into the run folder.

    Its values are parameters in every tracker, and with a :class:`lit_grpo.tracking.RunLogger` the file is an artifact.
    The objective is
    saved as resolved, presets filled in, as ``objective.json``: the YAML only names the recipe and what differs.
    Secrets are masked in all of them (:mod:`lit_grpo.utils.secrets`), and only the owner can read the file.
    A resumed run with another configuration keeps the earlier file under a number.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **{**kwargs, "save_to_log_dir": False})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Here and not in save_config, which runs on rank 0 alone: the folder is found by all ranks together.
        self._folder = run_folder(trainer)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # What is masked would not validate.
        text = self.parser.dump(masked(self.config), skip_unset=False, skip_validation=True)
        name = self.config_filename if stage == "fit" else f"config-{getattr(stage, 'value', stage)}.yaml"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        # The earlier part of a resumed run was made with the earlier configuration, which has to stay readable.
        if path.exists() and path.read_text() != text:
            number = next(n for n in range(1, 10_000) if not path.with_stem(f"{path.stem}-{n}").exists())
            path.rename(path.with_stem(f"{path.stem}-{number}"))
        path.write_text(text)
        # A secret that no rule knows by its name is still no matter of other people on the machine.
        path.chmod(OWNER_ALONE)
        objective = _resolved_objective(pl_module)
        if objective is not None:
            (self._folder / OBJECTIVE_FILE).write_text(json.dumps(objective, indent=1, default=str) + "\n")
        if getattr(trainer, "fast_dev_run", False):
            return
        logger = run_logger(trainer)
        if logger is not None:
            logger.log_artifact(path)
            if objective is not None:
                logger.log_artifact(self._folder / OBJECTIVE_FILE)
        settings = self.config.as_dict()
        log_parameters(trainer.loggers, settings if objective is None else {**settings, "objective": objective})


def _resolved_objective(pl_module: LightningModule) -> dict[str, Any] | None:
    describe = getattr(getattr(pl_module, "objective", None), "describe", None)
    return dict(describe()) if callable(describe) else None
