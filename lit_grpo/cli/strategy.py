"""What ``trainer.strategy`` means here."""

from __future__ import annotations

from typing import Any

from lit_grpo.errors import UserError


def resolve_strategy(strategy: Any) -> Any:
    """The strategy for the Trainer. ``fsdp`` is FSDP2, with all ranks in one data-parallel dimension.

    Raises:
        UserError: FSDP1, or tensor parallelism.
    """
    if strategy == "fsdp_cpu_offload":
        raise UserError(
            "fsdp_cpu_offload is Lightning's FSDP1, which cannot clip gradients by norm",
            where="trainer.strategy",
            remedy="use `strategy: fsdp`, which is FSDP2, and `model: {sharding: {cpu_offload: true}}`",
        )
    if type(strategy).__name__ == "FSDPStrategy":
        raise UserError(
            "FSDPStrategy is Lightning's FSDP1, which cannot clip gradients by norm",
            where="trainer.strategy",
            remedy="use `strategy: fsdp`, which is FSDP2; model.sharding has its settings",
        )
    named = type(strategy).__name__
    if strategy != "fsdp" and named != "ModelParallelStrategy":
        return strategy
    from lit_grpo.distributed.strategy import FSDP2Strategy

    if strategy == "fsdp":
        return FSDP2Strategy()
    if strategy._tensor_parallel_size not in ("auto", 1):
        raise UserError(
            f"tensor_parallel_size is {strategy._tensor_parallel_size}, and the learner does no tensor parallelism",
            where="trainer.strategy.init_args.tensor_parallel_size",
            remedy="leave it out; data.engine.args.tensor_parallel_size is that of vLLM's rollouts",
        )
    return FSDP2Strategy(strategy._process_group_backend, strategy._timeout)


def readers(plugins: Any, strategy: Any) -> Any:
    """The Trainer's plugins, with one that reads folders of shards where the run is not sharded itself."""
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lit_grpo.distributed.checkpoint import AnyCheckpointIO

    given = plugins if isinstance(plugins, list) else [plugins] if plugins is not None else []
    reads = any(isinstance(plugin, CheckpointIO) for plugin in given)
    return given if reads or isinstance(strategy, ModelParallelStrategy) else [*given, AnyCheckpointIO()]
