"""The strategy of the Trainer: ``fsdp`` is FSDP2, and every run can read sharded checkpoints."""

from __future__ import annotations

from typing import Any

from lit_grpo.errors import UserError


def resolve_strategy(strategy: Any) -> Any:
    """Return the strategy for the Trainer; ``fsdp`` is FSDP2, with all ranks in one data-parallel dimension.

    Raises:
        UserError: the strategy is FSDP1 or asks for tensor parallelism.
    """
    if strategy == "fsdp_cpu_offload":
        raise UserError(
            "fsdp_cpu_offload is Lightning's FSDP1, which cannot clip gradients by norm",
            where="trainer.strategy",
            remedy="use `strategy: fsdp`, which is FSDP2, and `model: {sharding: {cpu_offload: true}}`",
        )
    class_name = type(strategy).__name__
    if class_name == "FSDPStrategy":
        raise UserError(
            "FSDPStrategy is Lightning's FSDP1, which cannot clip gradients by norm",
            where="trainer.strategy",
            remedy="use `strategy: fsdp`, which is FSDP2; model.sharding has its settings",
        )
    if strategy != "fsdp" and class_name != "ModelParallelStrategy":
        return strategy
    from lit_grpo.distributed.strategy import FSDP2Strategy

    if strategy == "fsdp":
        return FSDP2Strategy()
    if strategy._tensor_parallel_size not in ("auto", 1):
        raise UserError(
            f"tensor_parallel_size is {strategy._tensor_parallel_size}, and the learner does no tensor parallelism",
            where="trainer.strategy.init_args.tensor_parallel_size",
            remedy="leave it out; rollouts have it with data.engine.name: vllm_server and args.tensor_parallel_size",
        )
    return FSDP2Strategy(strategy._process_group_backend, strategy._timeout)


def add_checkpoint_reader(plugins: Any, strategy: Any) -> Any:
    """Return the Trainer's plugins, with one that reads folders of shards where the run is not sharded itself."""
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lit_grpo.distributed.checkpoint import AnyCheckpointIO

    given = plugins if isinstance(plugins, list) else [plugins] if plugins is not None else []
    # FSDP2Strategy reads folders of shards by itself, and a CheckpointIO of the user wins.
    has_reader = any(isinstance(plugin, CheckpointIO) for plugin in given)
    return given if has_reader or isinstance(strategy, ModelParallelStrategy) else [*given, AnyCheckpointIO()]
