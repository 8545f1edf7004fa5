"""Low-rank adapters (LoRA, 2106.09685) by peft: the model's own weights stay, small additions to them are trained.

A layer with weights W [out, in] computes x (W + alpha / rank * B A)^T. At the start A [rank, in] is random and
B [out, rank] zero, so that an untrained adapter changes nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.errors import UserError
from lit_grpo.policy.config import LoraConfig
from lit_grpo.policy.model.quantization import dequantized, is_quantized, plain_layers
from lit_grpo.utils.random import drawn_from

KEY = "model.policy.lora"
_BASE = ".base_layer."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def check_lora(config: LoraConfig) -> None:
    """Check the settings of the adapters; imports nothing heavy.

    Raises:
        UserError: peft is not installed, or a value makes no sense.
    """
    if config.alpha <= 0:
        raise UserError(f"alpha is {config.alpha}, must be above 0", where=f"{KEY}.alpha")
    if config.dropout != 0:
        raise UserError(
            f"dropout is {config.dropout}: the learner would compute other probabilities than the engine sampled from",
            where=f"{KEY}.dropout",
            remedy="leave it at 0",
        )
    if find_spec("peft") is None:
        raise UserError(
            "LoRA needs peft, which is not installed",
            where=KEY,
            remedy="pip install 'lit-grpo[lora]' -c constraints.txt",
        )


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters into ``model``, in place, in float32, and freeze everything else. Draws no global random numbers.

    Raises:
        UserError: the named layers do not exist, are not linear, or are the output head.
    """
    import peft

    every = config.target_modules == "all-linear"
    # Before there are adapters: they show the weights of the layers that they are put around as their own.
    shared = _shared_weights(model)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type] # any number will do
        lora_dropout=0.0,
        target_modules=_linear_layers(model) if every else config.target_modules,
        bias="none",
    )
    try:
        # From a seed of their own: the run's random numbers are the same with and without adapters.
        with drawn_from(config.seed), _names_as_they_are(model) if every else nullcontext():
            # peft moves each adapter to the device of its layer.
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no adapters can be put into {type(model).__name__}: {first}",
            where=f"{KEY}.target_modules",
            remedy="all-linear, or ends of layer names like [q_proj, v_proj]",
        ) from error
    for name, parameter in model.named_parameters():
        # In bfloat16 most of an update would be rounded away.
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and id(layer.base_layer.weight) in shared:
            raise UserError(
                f"the layer {name} cannot have an adapter: another layer has the same weights",
                where=f"{KEY}.target_modules",
                remedy="all-linear, which leaves such layers out",
            )
        if hasattr(layer, "lora_A") and (name.endswith("lm_head") or not isinstance(layer.base_layer, nn.Linear)):
            raise UserError(
                f"the layer {name} cannot have an adapter: only linear layers below the output head can",
                where=f"{KEY}.target_modules",
                remedy="all-linear, or ends of layer names like [q_proj, v_proj]",
            )


@contextmanager
def _names_as_they_are(model: Any) -> Iterator[None]:
    """Keep peft from taking the names of layers for those that an earlier transformers had.

    In a mixture of experts it takes every ``gate_proj`` for one of the experts, which have since become one parameter,
    and puts an adapter there; that of a shared expert or of a dense layer is meant. It goes by ``config.model_type``.
    """
    config = vars(model).pop("config")
    try:
        yield
    finally:
        model.config = config


def _linear_layers(model: Any) -> list[str]:
    """Return the names of all linear layers below the output head that can have an adapter.

    Not peft's own list: it holds the experts of a mixture too, which are no linear layers, and layers that it refuses
    a moment later.
    """
    head = model.get_output_embeddings()
    parts = dict(model.named_modules())

    def fused(name: str) -> bool:
        # Kernels of state-space layers read the weights of these layers without calling it, so an adapter would be left
        # out.
        parent, _, child = name.rpartition(".")
        return child in ("out_proj", "dt_proj") and hasattr(parts[parent], "conv1d")

    shared = _shared_weights(model)
    names = [
        name
        for name, layer in parts.items()
        if isinstance(layer, nn.Linear)
        and _is_plain(layer)
        and layer is not head
        and not fused(name)
        and id(layer.weight) not in shared
    ]
    if not names and any(type(layer).__name__ == "Conv1D" for layer in parts.values()):
        raise UserError(
            f"the layers of {type(model).__name__} are of transformers' Conv1D, with weights [in, out], and adapters "
            "are merged into weights [out, in] alone",
            where=KEY,
            remedy="leave lora out, which trains all weights",
        )
    if not names:
        raise UserError(
            f"{type(model).__name__} has no linear layers that could have an adapter",
            where=KEY,
            remedy="leave lora out, which trains all weights",
        )
    return names


def _shared_weights(model: nn.Module) -> set[int]:
    """Return the ids of weights that belong to several layers, as those of Zamba2's shared blocks do.

    Every layer would get an adapter of its own, and no single weight could hold them all when they are merged.
    """
    weights = Counter(
        id(layer.weight) for layer in model.modules() if isinstance(getattr(layer, "weight", None), nn.Parameter)
    )
    return {weight for weight, layers in weights.items() if layers > 1}


def _is_plain(layer: nn.Linear) -> bool:
    """Tell whether a layer computes the product with its weights and nothing else.

    Routers of some mixtures (Llama 4, PhiMoE) are linear layers by name and return scores and choices, which no adapter
    can be added to.
    """
    return type(layer).forward is nn.Linear.forward or is_quantized(layer.weight)


def has_adapters(model: nn.Module) -> bool:
    return any(name.endswith(_A) for name, _ in model.named_parameters())


def scaling(model: nn.Module) -> float:
    """Return alpha / rank of the adapters in ``model``."""
    layer: Any = next(layer for layer in model.modules() if hasattr(layer, "lora_A"))
    return float(layer.scaling["default"])


def merged(parameters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model whose adapters are merged into its weights, one at a time.

    Args:
        parameters: names and tensors of a model with adapters; sharded ones are gathered when their turn comes, and
            quantized ones dequantized.
        scale: alpha / rank.
    """
    for name, parameter in parameters.items():
        if ".lora_" in name:
            continue
        layer, has_adapter, leaf = name.rpartition(_BASE)
        tensor = full(parameter)
        if not has_adapter:
            yield name, tensor
            continue
        # Merged in float32: the product of the adapters is small beside the weight, and is rounded only once.
        if leaf == "weight":
            a, b = full(parameters[layer + _A]).float(), full(parameters[layer + _B]).float()
            tensor = (tensor.float() + (b @ a) * scale).to(tensor.dtype)
        yield f"{layer}.{leaf}", tensor


def below(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the model below the adapters, one at a time, as :func:`merged` does."""
    for name, parameter in parameters.items():
        if ".lora_" not in name:
            yield name.replace(_BASE, "."), full(parameter)


def adapters(parameters: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters alone: ``<layer>.lora_A.weight`` [rank, in] and ``<layer>.lora_B.weight`` [out, rank].

    Args:
        parameters: names and tensors of a model with adapters, as of :func:`merged`.
        scale: alpha / rank, by which B is multiplied, so that whoever uses it need not know of it.
    """
    for name, parameter in parameters.items():
        if (layer := name.removesuffix(_A)) != name:
            yield f"{layer}.lora_A.weight", full(parameter)
            yield f"{layer}.lora_B.weight", full(parameters[layer + _B]) * scale


def full(parameter: Tensor) -> Tensor:
    """Return the whole of a parameter that may be sharded or quantized, without gradient."""
    if is_quantized(parameter):
        return dequantized(parameter)
    tensor: Any = parameter.detach()
    if not hasattr(tensor, "full_tensor"):
        return parameter.detach()
    # A mesh of one rank: its shard is the whole. ``full_tensor`` comes to the same tensor ten times as slowly.
    whole: Tensor = tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()
    return whole


def without_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of a model with plain layers and merged weights in the place of layers with adapters."""
    plain = copy.deepcopy(model)
    weights = dict(merged(dict(model.named_parameters()), scaling(model)))
    for name, layer in list(plain.named_modules()):
        if hasattr(layer, "lora_A"):
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.base_layer)
    plain_layers(plain)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    return plain
