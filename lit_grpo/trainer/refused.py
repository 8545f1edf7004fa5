"""Arguments and callbacks of Lightning's Trainer that a run cannot follow, each with what to set in its place.

One table for the command line, which asks before anything is built, and for Python, where the module asks when it meets
the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class RefusedArgument:
    """One argument of the Trainer that is taken with some values only.

    Attributes:
        name: name of the argument.
        takes: tells whether a value is taken.
        why: what is wrong with another value, without it.
        remedy: maps the value to what to type instead.
    """

    name: str
    takes: Callable[[Any], bool]
    why: str
    remedy: Callable[[Any], str]

    def error(self, value: Any) -> UserError | None:
        """Return the error of a value; None if it is taken."""
        if self.takes(value):
            return None
        plain = isinstance(value, str | int | float | bool)
        shown = getattr(value, "value", value) if plain else type(value).__name__
        return UserError(
            f"trainer.{self.name} is {shown}: {self.why}", where=f"trainer.{self.name}", remedy=self.remedy(value)
        )


_PRECISION_REMEDIES = {
    "bf16-true": "model.policy.dtype: bfloat16 holds the weights in bfloat16; trainer.precision: bf16-mixed computes "
    "in bfloat16 and keeps float32 weights",
    "16-mixed": "set trainer.precision: bf16-mixed, which needs no loss scaling",
    "16-true": "set trainer.precision: bf16-mixed, or model.policy.dtype: bfloat16 for the weights",
    "64-true": "leave it at 32-true: losses, log-probabilities of whole sequences and statistics are summed in float64",
    "transformer-engine": "set trainer.precision: bf16-mixed; data.engine.args has vLLM's own 8-bit formats",
}
_ALIASES = {"bf16": "bf16-mixed", "16": "16-mixed", "64": "64-true"}
_PRECISIONS = (None, 32, "32", "32-true", "bf16", "bf16-mixed")


def _precision_remedy(value: Any) -> str:
    name = _ALIASES.get(str(value), str(value))
    known = next((remedy for key, remedy in _PRECISION_REMEDIES.items() if name.startswith(key)), None)
    return known or "set trainer.precision: 32-true or bf16-mixed"


_SHARDED = "use `strategy: fsdp`, which is FSDP2 and splits weights, gradients and optimizer states as ZeRO-3 does"
_FSDP1 = "use `strategy: fsdp`, which is FSDP2; this is Lightning's FSDP1, which cannot clip gradients by norm"
_SPAWNED = "use `strategy: ddp`, whose processes begin from the command and not from a copy of this one"
_NO_XLA = "use a CUDA device or a CPU"
_STRATEGIES = {"deepspeed": _SHARDED, "DeepSpeedStrategy": _SHARDED,
               "FSDPStrategy": f"{_FSDP1}. model.sharding has its settings",
               "fsdp_cpu_offload": f"{_FSDP1}. model.sharding.cpu_offload: true moves what is not in use to memory",
               "ddp_spawn": _SPAWNED, "ddp_fork": _SPAWNED, "ddp_notebook": _SPAWNED, "xla": _NO_XLA,
               "XLAStrategy": _NO_XLA}  # fmt: skip


def _strategy_remedy(value: Any) -> str | None:
    """Return what to take in the place of a strategy; None if it is taken."""
    name = value if isinstance(value, str) else type(value).__name__
    if (found := next((remedy for key, remedy in _STRATEGIES.items() if name.startswith(key)), None)) is not None:
        return found
    method = getattr(value, "_start_method", "popen")
    return None if method == "popen" else _SPAWNED


REFUSED_ARGUMENTS = (
    RefusedArgument(
        "gradient_clip_val",
        lambda value: value is None,
        "a rollout takes several optimizer steps, each of which clips for itself",
        lambda value: f"set model.max_grad_norm: {value}, and leave it out",
    ),
    RefusedArgument(
        "gradient_clip_algorithm",
        lambda value: value is None,
        "gradients are clipped by the module, by their global norm",
        lambda value: "leave it out; model.max_grad_norm is the norm",
    ),
    RefusedArgument(
        "accumulate_grad_batches",
        lambda value: value in (None, 1),
        "one batch is one rollout, and its micro-batches are accumulated already",
        lambda value: (
            "set data.prompts_per_rollout for more completions in a step, model.micro_batch_tokens for less memory"
        ),
    ),
    RefusedArgument(
        "reload_dataloaders_every_n_epochs",
        lambda value: not value,
        "rollouts are made anew at every step, and the loader holds where the run is in its prompts",
        lambda value: "leave it out",
    ),
    RefusedArgument(
        "precision",
        lambda value: value in _PRECISIONS,
        "weights, prompts and samples are not converted by the Trainer",
        _precision_remedy,
    ),
    RefusedArgument(
        "strategy",
        lambda value: value is None or _strategy_remedy(value) is None,
        "it is not one that the learner and the rollout engine work with",
        lambda value: _strategy_remedy(value) or "",
    ),
    RefusedArgument(
        "barebones",
        lambda value: not value,
        "it takes away the metrics, checkpoints and callbacks that guard a run",
        lambda value: (
            "for a bare measurement: --trainer.logger false --trainer.enable_checkpointing false "
            "--trainer.enable_progress_bar false"
        ),
    ),
)

REFUSED_CALLBACKS = {
    "LearningRateFinder": (
        "it fits a curve to a loss that says nothing of progress here",
        "set model.optimizer.lr, and try some values: policy/approx_kl_k3 and policy/clip_frac tell too large from "
        "too small",
    ),
    "BatchSizeFinder": (
        "the batch is a rollout, whose size changes what is learned",
        "set model.micro_batch_tokens, which bounds memory and changes no gradient",
    ),
    "GradientAccumulationScheduler": (
        "one batch is one rollout, and its micro-batches are accumulated already",
        "set data.prompts_per_rollout",
    ),
    "StochasticWeightAveraging": (
        "it averages once an epoch, and a run is one epoch",
        "use EMAWeightAveraging, which averages after every rollout",
    ),
    "BaseFinetuning": (
        "it freezes layers of a backbone that the module has not",
        "set model.policy.lora, which trains a part of the weights",
    ),
    "ModelPruning": (
        "the engine samples from whole weights, and masks would be lost on the way",
        "prune the model that `lit-grpo export` writes",
    ),
}
"""By name of the class, also of one that it derives from: (what is wrong with it, what to take instead)."""


def check_argument(name: str, value: Any) -> None:
    """Refuse a value of one argument of the Trainer.

    Raises:
        UserError: a run cannot follow it; it says what to set instead.
    """
    for refused in REFUSED_ARGUMENTS:
        if refused.name == name and (error := refused.error(value)) is not None:
            raise error


def refuse_spawning() -> None:
    """Refuse to be sent to a process that is being spawned, as ``strategy: ddp_spawn`` does with the module.

    Raises:
        UserError: the object is being pickled for a new process.
    """
    from multiprocessing.context import get_spawning_popen

    if get_spawning_popen() is not None:
        check_argument("strategy", "ddp_spawn")


def no_data_module(command: str) -> UserError:
    """Return the error of a Trainer's method that was called without a data module.

    Args:
        command: name of the method, ``fit`` for instance.
    """
    return UserError(
        "there is no data module, which samples and scores completions",
        where=f"trainer.{command}",
        remedy=f"trainer.{command}(module, datamodule=RolloutDataModule(prompts=ROWS, rewards=[FUNCTION]))",
    )


def check_callback(callback: object) -> None:
    """Refuse a callback of Lightning that cannot work here.

    Raises:
        UserError: it is one of :data:`REFUSED_CALLBACKS`, or derives from one.
    """
    for cls in type(callback).__mro__:
        if cls.__name__ in REFUSED_CALLBACKS and cls.__module__.startswith(("lightning", "pytorch_lightning")):
            why, remedy = REFUSED_CALLBACKS[cls.__name__]
            raise UserError(f"{type(callback).__name__}: {why}", where="trainer.callbacks", remedy=remedy)


def check_trainer(trainer: Trainer) -> None:
    """Refuse a Trainer with arguments or callbacks that a run cannot follow.

    Raises:
        UserError: the first of them, with what to set instead.
    """
    values = {
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "reload_dataloaders_every_n_epochs": getattr(trainer, "reload_dataloaders_every_n_epochs", 0),
        "precision": trainer.precision,
        "strategy": trainer.strategy,
        "barebones": trainer.barebones,
    }
    for name, value in values.items():
        check_argument(name, value)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        check_callback(callback)
