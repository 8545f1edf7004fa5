"""FSDP2 under Lightning: the strategy behind ``trainer.strategy: fsdp``, and what a sharded run must keep to."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from lit_grpo.distributed.optimizer_state import full_tensor, to_quantized
from lit_grpo.distributed.sharding import ShardingConfig, compute_dtype
from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PRECISIONS = ("32-true", "bf16-mixed")


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, all ranks in the data-parallel dimension: ``trainer.strategy: fsdp``.

    It adds that ``model.sharding.cpu_offload`` works, that a run can be resumed from a checkpoint in one file, as a run
    without sharding writes it, and that shards which are to be saved are left where they are.

    Args:
        process_group_backend: backend of collectives; None: nccl on CUDA (and gloo for offloaded tensors), gloo on CPU.
        timeout: longest time that a collective may take.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        # Not in __init__: the number of processes is known only now.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self._offloads and self.root_device.type == "cuda":
            # Norms and gathered weights of offloaded shards are CPU tensors.
            return "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    def model_to_device(self) -> None:
        if not self._offloads:
            super().model_to_device()
        elif self.lightning_module is not None:
            # Offloaded shards stay where they are, and everything else was made on the device.
            self.lightning_module._device = self.root_device

    # Lightning copies all shards into fresh main memory, which takes seconds while the training waits, and before
    # anybody knows what they are wanted for: the writer of checkpoints copies them into memory that it keeps.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of all weights themselves, no copies; on rank 0 whole ones, for one file."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.model is not None
        return get_model_state_dict(self.model, options=StateDictOptions(cpu_offload=False))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's shards of an optimizer's state, likewise."""
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        own = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return cast(
            dict[str, Any], get_optimizer_state_dict(self.model, own, options=StateDictOptions(cpu_offload=False))
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill model and optimizers in place from a folder of shards, of any number of ranks, or from one file."""
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        assert self.model is not None
        load_whole_model(self.model, content.pop("state_dict"))
        states = content.pop("optimizer_states", [])
        # In evaluation there are states and no optimizers.
        for optimizer, state in zip(self.optimizers, states, strict=False):
            load_whole_optimizer(optimizer, state)
        return cast(dict[str, Any], content)

    @property
    def _offloads(self) -> bool:
        config = getattr(self.lightning_module, "sharding_config", None)
        return config is not None and config.cpu_offload


@torch.no_grad()
def load_whole_model(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Fill this rank's shards from whole tensors, which every rank has read; nothing is sent.

    Raises:
        UserError: the weights are not those of the model.
    """
    own = model.state_dict(keep_vars=True)
    if own.keys() != weights.keys():
        different = sorted(own.keys() ^ weights.keys())
        raise UserError(
            f"the checkpoint holds other weights than the model: {', '.join(different[:3])} ({len(different)} differ)",
            where="ckpt_path",
            remedy="go on with the model settings that the run began with",
        )
    for name, tensor in own.items():
        tensor.copy_(_like(weights[name], tensor))


def load_whole_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Fill an optimizer's shards from a whole ``state_dict``, which numbers parameters in the order of its groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {
        number: {name: _like(full_tensor(value), parameters[number]) for name, value in values.items()}
        for number, values in to_quantized(state)["state"].items()
    }
    optimizer.load_state_dict({"state": states, "param_groups": state["param_groups"]})


def _like(value: Any, parameter: Any) -> Any:
    """Return the shard of a tensor if ``parameter`` is sharded and of the same whole shape, else the value itself."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, torch.Tensor) or not hasattr(parameter, "placements") or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    # No source rank: every rank has read the whole tensor and cuts its own shard, so nothing is sent.
    piece = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return piece.to(parameter.to_local().device)


def compute_dtype_and_device(
    trainer: pl.Trainer | None, mesh: DeviceMesh | None, config: ShardingConfig, *, full_precision: bool
) -> tuple[torch.dtype | None, str]:
    """Return the number format of forward passes, None where it is that of the weights, and the type of their device.

    Args:
        trainer: the run's trainer; None: there is no run, and models are on the CPU.
        mesh: devices over which models are sharded; None: they are not.
        config: settings of the shards.
        full_precision: whether the weights are float32, and those of a model large enough to make that slow.
    """
    device = "cpu" if trainer is None else trainer.strategy.root_device.type
    plain = trainer is not None and trainer.precision == "32-true"
    if device == "cuda" and mesh is None and plain and full_precision:
        rank_zero_info(
            "The passes compute in float32, several times slower than a GPU can: `trainer.strategy: fsdp` computes in "
            "bfloat16 and keeps float32 weights, also on one card."
        )
    return compute_dtype(config, mesh), device


def data_mesh(
    trainer: pl.Trainer | None, config: ShardingConfig, *, quantized: bool, needs_score_norms: bool
) -> DeviceMesh | None:
    """Return the mesh over which models are sharded; None: they are not.

    Args:
        trainer: the run's trainer; None: there is no run, and nothing is sharded.
        config: settings of the shards.
        quantized: whether the weights are held in 4 bits.
        needs_score_norms: whether the objective needs the gradient norm of single completions.

    Raises:
        UserError: FSDP1, tensor parallelism, or a setting that does not go with shards.
    """
    if trainer is None or not isinstance(strategy := trainer.strategy, ModelParallelStrategy):
        return None
    mesh = strategy.device_mesh
    if mesh["tensor_parallel"].size() != 1:
        raise UserError(
            f"the strategy splits the model over {mesh['tensor_parallel'].size()} devices by tensor parallelism, which "
            "the learner does not do",
            where="trainer.strategy",
            remedy=f"FSDP2Strategy() of lit_grpo.distributed.strategy, or ModelParallelStrategy(data_parallel_size="
            f"{trainer.world_size}, tensor_parallel_size=1)",
        )
    if quantized:
        raise UserError(
            "weights in 4 bits are not split into shards",
            where="model.policy.quantization",
            remedy="use `strategy: auto` or `ddp`, or leave quantization out",
        )
    if not strategy._save_distributed_checkpoint:
        raise UserError(
            "save_distributed_checkpoint=False would mix up the optimizer's parameter groups",
            where="trainer.strategy",
            remedy="save in shards, and make one folder of it with `lit-grpo export`",
        )
    if needs_score_norms:
        raise UserError(
            "optimal_baseline_weights: given needs the gradient norm of every single completion, which sharded "
            "weights do not have: their gradients are summed over ranks as they are made",
            where="model.objective.optimal_baseline_weights",
            remedy="set optimal_baseline_weights to length, logit or token_level, or use `strategy: ddp`",
        )
    plain = not isinstance(strategy, FSDP2Strategy)
    if plain and config.cpu_offload:
        raise UserError(
            "Lightning's ModelParallelStrategy moves offloaded shards to the device",
            where="model.sharding.cpu_offload",
            remedy="use FSDP2Strategy() of lit_grpo.distributed.strategy",
        )
    if plain and trainer.ckpt_path is not None and Path(trainer.ckpt_path).is_file():
        raise UserError(
            "Lightning's ModelParallelStrategy would mix up the optimizer's parameter groups of a checkpoint in a file",
            where="ckpt_path",
            remedy="use FSDP2Strategy() of lit_grpo.distributed.strategy",
        )
    if trainer.precision not in PRECISIONS:
        raise UserError(
            f"precision {trainer.precision} does not go with shards, whose weights are held in float32",
            where="trainer.precision",
            remedy="leave it at 32-true: model.sharding.param_dtype says in which format is computed",
        )
    return mesh["data_parallel"]
