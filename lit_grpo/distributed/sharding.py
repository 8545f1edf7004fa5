"""Weights in shards, one on each rank: FSDP2 (``fully_shard``) on every transformer block and then on the whole model.

A model is made once with weights, on rank 0, and everywhere as a skeleton on the meta device. The skeleton is sharded,
and rank 0 hands out one parameter at a time, so no other rank ever holds a whole model, and all end with the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import Tensor, nn

from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)

_COMPUTE_DTYPES: WeakKeyDictionary[nn.Module, torch.dtype] = WeakKeyDictionary()
"""Number format in which each sharded model computes. A model that is not in it is not sharded."""


@dataclass
class ShardingConfig:
    """How ``trainer.strategy: fsdp`` (FSDP2) splits policy, critic and reference over ranks.

    Other strategies ignore it. Weights, gradients and optimizer states are held in ``policy.dtype``, in shards;
    gradients of several ranks are summed in float32, whatever ``param_dtype`` is.

    Attributes:
        param_dtype: number format in which weights are gathered and forward and backward computed; ``auto``: bfloat16
            on CUDA, float32 on CPU.
        cpu_offload: shards, gradients and optimizer live in main memory, and the optimizer steps there: slower, for
            models that do not fit otherwise.
        reshard_after_forward: give a block's gathered weights back after its forward pass and gather them again in the
            backward pass: less memory, more traffic. False: they are gathered once for all micro-batches of an
            optimizer step.
    """

    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    cpu_offload: bool = False
    reshard_after_forward: bool = True


def compute_dtype(config: ShardingConfig, mesh: DeviceMesh | None) -> torch.dtype | None:
    """Resolve ``param_dtype`` for the devices of a mesh; None without one, where nothing is sharded."""
    if mesh is None:
        return None
    if config.param_dtype == "auto":
        return torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    return cast(torch.dtype, getattr(torch, config.param_dtype))


def make_sharded(mesh: DeviceMesh, config: ShardingConfig, make: Callable[[], Model]) -> Model:
    """Return the model that ``make`` gives on rank 0, in shards. All ranks of the mesh must call it.

    Args:
        mesh: one dimension, all ranks.
        config: how to shard.
        make: makes the model with its weights; under ``torch.device("meta")`` the same model without.

    Raises:
        UserError: what ``make`` raised on rank 0, on every rank; or a model that has no transformer blocks.
    """
    source, plan = _on_first_rank(make)
    with torch.device("meta"):
        model = make()
    _fit_skeleton(model, plan)
    shard(model, mesh, config)
    _fill(model, source, plan, mesh, config)
    return model


def shard(model: nn.Module, mesh: DeviceMesh, config: ShardingConfig) -> None:
    """Apply ``fully_shard`` to each block and to the root, in place. Tied weights stay with the root."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    dtype = compute_dtype(config, mesh)
    # One rank has nothing to sum: its gradients lose nothing in the format of the passes, and need half the memory.
    summed = torch.float32 if mesh.size() > 1 else None
    # Nothing has to be cast on the way in: ids go in, and the embedding's output already has the weights' format.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=summed, cast_forward_inputs=False)
    pin = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin) if config.cpu_offload else OffloadPolicy()
    options: Any = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
        # What is kept for the backward pass is kept for the next micro-batch too, which takes no more memory than the
        # end of a forward pass does. `reshard` lets go of it before weights change.
        cast(Any, block).set_reshard_after_backward(config.reshard_after_forward, recurse=False)
    # The root's own weights (embedding, last norm, head) are needed again at once when the backward pass begins, and
    # when the next micro-batch does.
    fully_shard(model, reshard_after_forward=False, **options)
    cast(Any, model).set_reshard_after_backward(False, recurse=False)
    # These methods call parts of the model that need the root's weights.
    for method in ("verify_against_model_forward", "values"):
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)
    _COMPUTE_DTYPES[model] = cast(torch.dtype, dtype)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks.

    Raises:
        UserError: transformers names no block class of the model.
    """
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found = [part for part in model.modules() if type(part).__name__ in names]
    if not found:
        raise UserError(
            f"{type(model).__name__} names no transformer blocks, so it cannot be sharded block by block",
            where="trainer.strategy",
            remedy="use `strategy: ddp`",
        )
    return found


def is_sharded(model: nn.Module) -> bool:
    return model in _COMPUTE_DTYPES


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the number format that the model computes in; its weights may be held in a finer one."""
    sharded = _COMPUTE_DTYPES.get(model)
    return sharded if sharded is not None else next(model.parameters()).dtype


def reshard(*models: nn.Module | None) -> None:
    """Put every gathered weight back into shards. Does nothing to models that are not sharded.

    A forward pass without a backward pass leaves the root's weights gathered. Weights that change then (an optimizer
    step) would not reach the gathered copy, and what walks over parameters (syncing) would find whole tensors.
    ``state_dict`` and ``load_state_dict``, and so saving, loading and rollback, reshard by themselves: FSDP2
    hooks them.
    """
    for model in models:
        if model is not None:
            for part in model.modules():
                if hasattr(part, "reshard"):
                    cast(Any, part).reshard()


def why_not_repeatable(model: nn.Module) -> str | None:
    """Say why a pass that broke off cannot be done again, in a clause that follows "and"; None: it can."""
    if not is_sharded(model):
        return None
    if torch.distributed.get_world_size() > 1:
        return (
            "it cannot be done again: ranks that hold shards of one model wait for one another within a pass, and one "
            "that broke off leaves the others there"
        )
    if not hasattr(model, "reset_iter_state"):
        return "it cannot be done again: torch brings a sharded model back in order from version 2.13 on"
    return None


def recover(*models: nn.Module | None) -> None:
    """Bring sharded models back in order after a pass that broke off; gradients of shards stay for the optimizer."""
    for model in models:
        if model is None or not is_sharded(model):
            continue
        cast(Any, model).reset_iter_state()
        # What the backward pass had come to is left with the gathered weights (torch 2.13), and would be added to the
        # gradient of the next one.
        for part in model.modules():
            if hasattr(part, "unshard"):
                cast(Any, part).unshard()
                for weight in part.parameters():
                    if not hasattr(weight, "to_local"):
                        weight.grad = None
                cast(Any, part).reshard()


@torch.no_grad()
def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a sharded model as its forward passes compute with it: whole, in ``param_dtype``.

    All ranks must ask for all. Each tensor is a copy and may be kept.
    """
    reshard(model)
    if all(_is_whole(weight) for weight in model.parameters()):
        # One rank holds all of each weight: there is nothing to gather, and every launch that is spared counts.
        dtype = dtype_of(model)
        for name, weight in model.named_parameters():
            # The shard first: what is asked of a DTensor takes torch many times as long.
            yield name, local(weight).detach().to(dtype, copy=True)
        return
    # One block after the other, each in one gather: on GPUs a gather of a single weight is mostly latency.
    units: dict[str, Any] = {name: part for name, part in model.named_modules() if hasattr(part, "unshard")}

    def owner(name: str) -> str:
        return max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)

    for unit, names in itertools.groupby([name for name, _ in model.named_parameters()], owner):
        units[unit].unshard()
        try:
            for name in names:
                yield name, model.get_parameter(name).detach().clone()
        finally:
            units[unit].reshard()


def _is_whole(weight: Any) -> bool:
    """Return whether a shard is the whole weight, and lies where it is computed with."""
    mesh = getattr(weight, "device_mesh", None)
    return mesh is not None and mesh.size() == 1 and weight.device.type == mesh.device_type


def largest_counts(counts: Sequence[int], device: torch.device) -> list[int]:
    """Return the largest of each count over all ranks, so that all can make equally many passes."""
    most = torch.tensor(counts, device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return cast(list[int], most.tolist())


class _Plan(dict[str, Any]):
    """Description of the model that rank 0 sends: name -> (shape, dtype) of parameters and buffers."""


def _on_first_rank(make: Callable[[], Model]) -> tuple[Model | None, _Plan]:
    """Make the model on rank 0 alone, and its plan on all ranks.

    All ranks fail together, and all go on with the random state that rank 0 has then.
    """
    source: Model | None = None
    failure: Exception | None = None
    message: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            source = make()
            plan = _Plan(
                parameters={n: (tuple(p.shape), p.dtype) for n, p in source.named_parameters()},
                buffers={n: (tuple(b.shape), b.dtype) for n, b in source.named_buffers()},
                random=torch.get_rng_state(),
            )
            message = [plan]
        except Exception as error:
            failure = error
            message = [error if isinstance(error, UserError) else f"{type(error).__name__} on rank 0: {error}"]
    # An error is sent as well: without a message the other ranks would wait for the model for ever.
    torch.distributed.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    received: Any = message[0]
    if isinstance(received, UserError):
        raise received
    if isinstance(received, str):
        raise RuntimeError(received)
    torch.set_rng_state(received["random"])
    return source, received


def _fit_skeleton(model: nn.Module, plan: _Plan) -> None:
    """Check the skeleton against the model on rank 0, and give it the same number formats."""
    own = dict(model.named_parameters())
    shapes = {name: shape for name, (shape, _) in plan["parameters"].items()}
    different = sorted(n for n in own.keys() | shapes if n not in own or shapes.get(n) != tuple(own[n].shape))
    if different:
        raise UserError(
            f"{type(model).__name__} made without weights differs from the one with them: {', '.join(different[:3])}",
            where="model.policy",
            remedy="use `strategy: ddp`; a model whose layers change while it is loaded (quantized) cannot be sharded",
        )
    for name, parameter in own.items():
        parameter.data = parameter.data.to(plan["parameters"][name][1])


@torch.no_grad()
def _fill(model: nn.Module, source: nn.Module | None, plan: _Plan, mesh: DeviceMesh, config: ShardingConfig) -> None:
    """Send rank 0's weights to the shards, one at a time; rank 0 frees each as it is sent."""
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    given: dict[str, Tensor] = {}
    if source is not None:
        given = {n: t.detach() for n, t in (*source.named_parameters(), *source.named_buffers())}
        _forget(source)

    def whole(name: str, kind: str) -> Tensor:
        shape, dtype = plan[kind][name]
        return given.pop(name).to(device) if source is not None else torch.empty(shape, dtype=dtype, device=device)

    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    filled: dict[str, nn.Parameter] = {}
    for parameter, aliases in names.items():
        piece = _my_shard(whole(aliases[0], "parameters"), parameter)
        new = nn.Parameter(piece.cpu() if config.cpu_offload else piece, requires_grad=parameter.requires_grad)
        # The same object under each name: tied weights stay tied.
        filled |= dict.fromkeys(aliases, new)
    model.load_state_dict(filled, strict=False, assign=True)
    for name in list(plan["buffers"]):
        tensor = whole(name, "buffers")
        torch.distributed.broadcast(tensor, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensor)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise RuntimeError(f"no weights came for {', '.join(left[:3])}")


def _my_shard(tensor: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements)


def _forget(model: nn.Module) -> None:
    """Let go of every tensor of a model, so that each is freed with its last use elsewhere."""
    for part in model.modules():
        part._parameters = dict.fromkeys(part._parameters)
        part._buffers = dict.fromkeys(part._buffers)


def local(parameter: Tensor) -> Tensor:
    """Return the shard that this rank holds of a parameter, or the whole of one that is not sharded."""
    return cast(Any, parameter).to_local() if hasattr(parameter, "to_local") else parameter
