"""The optimizer and its schedule: AdamW with a warm-up and one of three shapes, or any other by import path."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lit_grpo.distributed.optimizer_state import PACKAGE
from lit_grpo.errors import UserError
from lit_grpo.policy.config import OptimizerConfig
from lit_grpo.policy.optimizer.quantized_state import check_compiler, prepare, rounding_seed, rounds_stochastically
from lit_grpo.utils.bounds import check_fields
from lit_grpo.utils.imports import import_by_path

ROUNDS_TO_NEAREST = ("torch.", "bitsandbytes.", "torchao.")
"""Packages whose optimizers round to the nearest number unless they are told to do otherwise."""
_SAMPLED = 4096
"""Elements of each weight that :func:`lost_share` looks at."""


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, total_steps: int, where: str = "model.optimizer"
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make the optimizer over every trainable parameter of a model, and its schedule.

    Vectors and scalars (norms, biases) get no weight decay.

    Args:
        model: the model that is trained.
        config: optimizer and schedule.
        total_steps: optimizer steps of the run, over which a schedule falls unless ``config.total_steps`` is set.
        where: key of the configuration, for errors.

    Raises:
        UserError: see :func:`check_optimizer`; or a class refuses its arguments, or the schedule needs the length of
            the run.
    """
    check_optimizer(config, where)
    total_steps = config.total_steps or total_steps
    if config.scheduler is None and (config.schedule != "constant" or config.warmup_ratio) and total_steps < 1:
        what = f"{config.schedule} schedule" if config.schedule != "constant" else "warmup_ratio"
        raise UserError(
            f"the {what} needs the length of the run, which only RolloutDataModule tells",
            where=f"{where}.total_steps",
            remedy="set total_steps to the number of optimizer steps",
        )
    # Told apart by dimensions: what has fewer than two is a norm or a bias.
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer_class = _imported(config.type, f"{where}.type")
    try:
        with_parameters = [group for group in groups if group["params"]]
        optimizer = optimizer_class(with_parameters, **_arguments(config, optimizer_class))
    except (TypeError, ValueError, RuntimeError) as error:
        # Muon steps along orthogonal matrices, and a model has norms and biases too.
        matrices = "2D" in str(error)
        raise UserError(
            f"{config.type} refuses its arguments: {error}",
            where=f"{where}.type" if matrices else f"{where}.args",
            remedy="choose one that takes vectors too, for example torch.optim.AdamW" if matrices else None,
        ) from error
    _warn_of_lost_updates(optimizer, config)
    prepare(optimizer, where)
    if config.scheduler is None:
        factor = partial(lr_factor, config, total_steps=total_steps)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    scheduler = _imported(config.scheduler, f"{where}.scheduler")
    try:
        return optimizer, scheduler(optimizer, **config.scheduler_args)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config.scheduler} refuses its arguments: {error}", where=f"{where}.scheduler_args"
        ) from error


def check_optimizer(config: OptimizerConfig, where: str = "model.optimizer") -> None:
    """Check all settings of the optimizer that can be checked without a model.

    Raises:
        UserError: a class does not exist or is no optimizer or scheduler, it does not take a setting, or two schedules
            are set.
    """
    check_fields(config, where)
    optimizer_class = _imported(config.type, f"{where}.type")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UserError(f"{config.type} is no torch.optim.Optimizer", where=f"{where}.type")
    check_compiler(optimizer_class.__module__.partition(".")[0], f"{where}.type")
    parameters = _parameter_names(optimizer_class)
    defaults = OptimizerConfig()
    for name in ("betas", "eps", "weight_decay"):
        if name not in parameters and getattr(config, name) != getattr(defaults, name):
            raise UserError(f"{config.type} has no {name}", where=f"{where}.{name}", remedy="leave it out")
    if duplicates := sorted(set(config.args) & {"lr", "betas", "eps", "weight_decay", "params"}):
        raise UserError(
            f"{duplicates[0]} is no further argument: it has a key of its own",
            where=f"{where}.args",
            remedy=f"set {where}.{duplicates[0]}",
        )
    if config.warmup_steps and config.warmup_ratio:
        raise UserError(
            f"both warmup_steps ({config.warmup_steps}) and warmup_ratio ({config.warmup_ratio:g}) are set",
            where=f"{where}.warmup_ratio",
            remedy="leave one out",
        )
    if config.scheduler is None:
        if config.scheduler_args:
            raise UserError("arguments for a scheduler, but none is named", where=f"{where}.scheduler_args")
        return
    if config.schedule != defaults.schedule or config.warmup_steps or config.warmup_ratio:
        warmup = f"{config.warmup_ratio:g} of all" if config.warmup_ratio else str(config.warmup_steps)
        raise UserError(
            f"both a schedule ({config.schedule}, {warmup} steps of warm-up) and the scheduler "
            f"{config.scheduler} are set",
            where=f"{where}.scheduler",
            remedy="leave one out",
        )
    scheduler = _imported(config.scheduler, f"{where}.scheduler")
    # Stepped with a metric, which nothing here gives it.
    needs_metric = torch.optim.lr_scheduler.ReduceLROnPlateau
    if not (isinstance(scheduler, type) and issubclass(scheduler, torch.optim.lr_scheduler.LRScheduler)) or issubclass(
        scheduler, needs_metric
    ):
        raise UserError(
            f"{config.scheduler} is no scheduler that is stepped without a figure", where=f"{where}.scheduler"
        )


def _arguments(config: OptimizerConfig, optimizer_class: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    if optimizer_class in (torch.optim.AdamW, torch.optim.Adam) and not {"fused", "foreach"} & set(config.args):
        # One pass over weights and moments, in shards too: a quarter of the time on CPU, and no copy of anything, where
        # the default on GPUs makes temporary lists of the size of all weights.
        arguments["fused"] = True
    names = _parameter_names(optimizer_class)
    return {"lr": config.lr} | {name: value for name, value in arguments.items() if name in names} | config.args


def _parameter_names(optimizer_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(optimizer_class.__init__).parameters)


def _imported(path: str, where: str) -> Any:
    optional = path.partition(".")[0] in ("bitsandbytes", PACKAGE)
    install = "pip install 'lit-grpo[quantized]' -c constraints.txt"
    example = "torch.optim.lr_scheduler.StepLR" if where.endswith("scheduler") else "torch.optim.AdamW"
    return import_by_path(path, where, remedy=install if optional else f"for example {example}")


@torch.no_grad()
def lost_share(weights: Iterable[Tensor], step: float) -> float:
    """Measure which share of the weights stays as it is when ``step`` is added and the sum rounded to the nearest.

    bfloat16 has 8 significant bits: a weight w is moved by no less than about |w| / 512. Measured on up to 4096
    elements of each weight, or of this rank's shard of it; the two signs of the step count half each.
    """
    unmoved = total = 0.0
    for weight in weights:
        flat = cast(Any, weight).to_local().flatten() if hasattr(weight, "to_local") else weight.flatten()
        # A rank's shard may be empty.
        if not len(flat):
            continue
        sample = flat[:: max(1, len(flat) // _SAMPLED)]
        for sign in (step, -step):
            unmoved += 0.5 * float(((sample.double() + sign).to(sample.dtype) == sample).double().mean()) * len(flat)
        total += len(flat)
    return unmoved / total if total else 0.0


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    # An Adam step moves a weight by about the learning rate, which bfloat16 rarely resolves.
    coarse = [p for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.bfloat16]
    if not coarse or "betas" not in optimizer.param_groups[0] or rounds_stochastically(optimizer):
        return
    if not type(optimizer).__module__.startswith(ROUNDS_TO_NEAREST):
        return
    share = lost_share(coarse, config.lr)
    if share < 0.1:
        return
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    rank_zero_warn(
        f"The weights are trained in bfloat16 and {config.type} rounds every step to the nearest: a step of the "
        f"learning rate {config.lr:g} leaves {share:.0%} of the weights exactly what they are. Remedies: "
        "`trainer.strategy: fsdp` with `model.policy.dtype: float32`, which computes in bfloat16 on CUDA, on one card "
        "too; or `model.optimizer.type: torchao.optim.AdamW8bit` with `args: {bf16_stochastic_round: true}`, which "
        "keeps the update on average (extra `quantized`)."
    )


def clip_gradients(optimizer: torch.optim.Optimizer, limit: float | None) -> Tensor:
    """Clip the global gradient norm of all that the optimizer holds, and return the norm before, float64 on the CPU.

    With ``limit`` None it is measured and not clipped.
    """
    # Of shards the norm is a DTensor of partial sums, which full_tensor adds up over ranks.
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return cast(Tensor, norm.detach().double().cpu())


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate at optimizer step ``step``, counted from 0.

    The warm-up rises to the peak at step :func:`warmup_steps`; the first step is never at rate 0.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * share


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the optimizer steps of the warm-up: as given, or a share of ``total_steps``, rounded up."""
    # Rounded first: 0.07 x 100 is a little above 7 in floating point.
    return config.warmup_steps or math.ceil(round(config.warmup_ratio * total_steps, 9))


def initialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that a first step would make, without moving a weight or counting a step."""
    # Saving in shards needs a state. torch.distributed.checkpoint would make one by a step at learning rate 0, which it
    # then counts: a run that was saved before its first step would differ from one that was not.
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for weight in group["params"]:
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)
    with rounding_seed(optimizer, 0):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0
