"""AdamW with a warm-up and one of three schedules."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from lit_grpo.errors import UserError
from lit_grpo.policy.config import OptimizerConfig


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, total_steps: int, where: str = "model.optimizer"
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Optimizer over every trainable parameter and its schedule, counted in optimizer steps.

    Vectors and scalars (norms, biases) get no weight decay.
    """
    if config.lr <= 0:
        raise UserError(f"the learning rate is {config.lr}, must be above 0", where=f"{where}.lr")
    total_steps = config.total_steps or total_steps
    if config.schedule != "constant" and total_steps < 1:
        raise UserError(
            f"the {config.schedule} schedule needs the length of the run, which only RolloutDataModule tells",
            where=f"{where}.total_steps",
            remedy="set total_steps to the number of optimizer steps",
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, step, total_steps))


def clip_gradients(optimizer: torch.optim.Optimizer, limit: float | None) -> Tensor:
    """Clip the global gradient norm of everything the optimizer holds; the norm before, float64, on the CPU."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return cast(Tensor, norm.detach().double().cpu())


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Share of the peak rate at optimizer step ``step`` (counted from 0).

    The warm-up rises to the peak at step ``warmup_steps``; the first step is never at rate 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    fall = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * fall
