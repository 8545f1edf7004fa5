"""Bring a policy's weights into a running vLLM model, whole or not at all.

vLLM's plain ``load_weights`` writes into the tensors of the model. Where those are what the kernels read, as they were
loaded, that is all there is to do: an unquantized dense model on a CUDA device, see :func:`weights_stay_as_loaded`.

On CPU the weights are packed after loading, and so are some on CUDA devices (mixtures of experts, latent attention,
quantized layers): there vLLM's layerwise reload puts unpacked tensors back, loads each layer, and packs again into the
old storage, which CUDA graphs still point to. It takes several times as long.

What can go silently wrong is prevented here:

* A tied output head that is not in the stream keeps its packed copy of the old embedding (CPU).
* A projection that vLLM fuses (``qkv_proj``) counts as loaded once one part of it came; the rest would be junk, or old.
* A parameter that never comes keeps its old value, with a warning in the log or without.
* Of a weight that is too long vLLM takes the beginning: a rank's share is cut out of it, also where there is one rank.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import NamedWeights
from lit_grpo.engines.vllm.load_plan import LoadNotes, LoadPlan
from lit_grpo.engines.vllm.names import BUFFER
from lit_grpo.utils.logging import log_level

# It warns at every reload of layers that hold no weights (rotary embeddings). What matters is checked here.
_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
"""Name of the logger of vLLM's layerwise reload."""
_PLAIN_CACHES = ("auto", "bfloat16", "float16", "half")
"""Number formats of keys and values that need no scales."""


def reload_weights(model: nn.Module, vllm_config: Any, weights: NamedWeights, plan: LoadPlan | None = None) -> None:
    """Replace every weight of vLLM's ``model``.

    Args:
        model: the model inside a vLLM worker.
        vllm_config: of the same engine.
        weights: (name, full tensor) on any device and in any float format, named as in a checkpoint or as parameters
            of the transformers model where vLLM knows those; buffers as :mod:`lit_grpo.engines.vllm.names` names them.
            The name of a tied output head may be in it or not.
        plan: of this model: it is made in the first load, and the next ones are made by it. None: every load is made
            by vLLM.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape, or a tied head differs from its embedding. The
            model then holds a mixture and must not be used before a reload that succeeds.
    """
    from vllm.config import set_current_vllm_config

    ties = tied_parameters(model)
    streamed: dict[str, int] = {}
    own = {name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())}
    stream = _without_ties(_known_buffers(weights, own), ties, streamed)
    plan, notes, before = plan or LoadPlan(), None, set[str]()
    with set_current_vllm_config(vllm_config), torch.no_grad():
        if plan.holds():
            rest = plan.repeat(stream, before)
            if rest is None:
                _require_all(plan.missing(streamed))
                return
            stream = rest
        if not weights_stay_as_loaded(model, vllm_config):
            sizes, loaded = _load_layerwise(model, vllm_config, stream)
        elif before or plan.useless:
            sizes, loaded = _load_in_place(model, stream)
        else:
            notes = LoadNotes(model)
            with notes:
                sizes, loaded = _load_in_place(model, notes.watched(stream))
        loaded |= before
        _require_all(sorted(sizes.keys() - ties.keys() - loaded) + _missing_parts(model, loaded, streamed))
        if vllm_config.parallel_config.tensor_parallel_size == 1 and vllm_config.model_config.quantization is None:
            _check_sizes(model, sizes, streamed)
        for name in ties:
            _repack(model.get_submodule(name.rpartition(".")[0]))
        if notes is not None:
            plan.take(notes, model)


def _require_all(missing: Sequence[str]) -> None:
    """Check that no weight is missing.

    Raises:
        ValueError: some are.
    """
    if missing:
        raise ValueError(f"the policy's weights lack {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")


def weights_stay_as_loaded(model: nn.Module, vllm_config: Any) -> bool:
    """Return whether the kernels read this model's weights from the very tensors that they are loaded into.

    Of a model with adapters no: whether its layers may be written into past vLLM's reload was not tried on a card.
    """
    return vllm_config.lora_config is None and _kept_as_loaded(model, vllm_config)


def _kept_as_loaded(model: nn.Module, vllm_config: Any) -> bool:
    """Return whether nothing was made of a model's weights since they were loaded; layers of adapters are taken off.

    Every module that does anything after loading must be one of which it is known that it does nothing to weights on a
    CUDA device, and every parameter must still be of the class, shape, strides and number format that vLLM noted before
    it loaded the model.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if not _on_cuda() or vllm_config.model_config.quantization is not None:
        return False
    # The scales of a quantized cache are set by a reload.
    if vllm_config.cache_config.cache_dtype not in _PLAIN_CACHES:
        return False
    device = vllm_config.device_config.device_type
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if hasattr(module, "process_weights_after_loading") and not (
            type(module) is Attention and _attends_without_weights(module.impl)
        ):
            return False
        noted = get_layerwise_info(module).restore_metadata[0]
        own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        # Some versions of vLLM note no bias.
        if noted.keys() - own.keys() or own.keys() - noted.keys() - {"bias"}:
            return False
        if any(t.device.type != device or getattr(t, "_vllm_is_uva_offloaded", False) for t in own.values()):
            return False
        if any(_form(own[name]) != _form(tensor) for name, tensor in noted.items()):
            return False
    return True


def _on_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _attends_without_weights(impl: Any) -> bool:
    """Return whether an attention backend keeps nothing that it makes of weights."""
    from vllm.v1.attention.backend import AttentionImplBase

    if type(impl).process_weights_after_loading is AttentionImplBase.process_weights_after_loading:
        return True
    # FlashInfer's converts attention sinks, if there are any.
    return type(impl).__name__ == "FlashInferImpl" and getattr(impl, "_sinks_source", impl) is None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype


def _load_in_place(model: nn.Module, stream: NamedWeights) -> tuple[dict[str, int], set[str]]:
    """Load ``stream`` into the model's tensors.

    Returns:
        The number of elements of every parameter of the model, and the names of those that were loaded.
    """
    loaded = own_names(model, model.load_weights(stream))  # type: ignore[operator]
    return _sizes(model), loaded


def _load_layerwise(model: nn.Module, vllm_config: Any, stream: NamedWeights) -> tuple[dict[str, int], set[str]]:
    """Load ``stream`` into a model that packs its weights; returns what :func:`_load_in_place` does."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    on_cpu = vllm_config.device_config.device_type == "cpu"
    with log_level(_RELOAD, logging.ERROR), _experts_packed_again(model) if on_cpu else contextlib.nullcontext():
        initialize_layerwise_reload(model)
        try:
            sizes = _sizes(model)
            loaded = own_names(model, model.load_weights(stream))  # type: ignore[operator]
            _check_loaded(model, loaded)
        except BaseException:
            _drop_waiting_weights(model)
            raise
        finally:
            # Also after a failure: it puts the model's tensors back, so that a later reload finds it whole.
            finalize_layerwise_reload(model, vllm_config.model_config)
    return sizes, loaded


def own_names(model: nn.Module, reported: Collection[str]) -> set[str]:
    """Return the names of parameters that a model says it has loaded, as the model has them.

    vLLM 0.26 reports the experts of a mixture without the module that holds them: ``experts.w13_weight`` for
    ``experts.routed_experts.w13_weight``.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = set()
    for name in reported:
        path, _, leaf = name.rpartition(".")
        held = f"{path}.routed_experts.{leaf}"
        names.add(held if name not in own and held in own else name)
    return names


def _check_loaded(model: nn.Module, loaded: Collection[str]) -> None:
    """Check that what the model says it has loaded went into its layers.

    Some models write into their parameters past the loaders that the layerwise reload gave them (gpt-oss). During it
    these are no tensors in memory, so that nothing is written, and the old weights come back afterwards.

    Raises:
        ValueError: a layer got nothing of the weights that came for it.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    ties = tied_parameters(model)
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or info.load_numel > 0:
            continue
        names = (f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False))
        for name in names:
            if name in loaded and name not in ties:
                raise ValueError(
                    f"vLLM's {type(model).__name__} does not take {name} over into a running model, and keeps the old"
                )


@contextlib.contextmanager
def _experts_packed_again(model: nn.Module) -> Iterator[None]:
    """Make the reload inside pack the weights of experts, as loading did.

    vLLM packs them where it builds the kernel of a mixture of experts, and a kernel that is there already stays, since
    CUDA graphs point to it. On CPU the kernel would go on to read packed weights from tensors that are not, and every
    sync would leave wrong ones. There are no graphs on CPU, so that the kernel can be built anew.
    """
    methods = [m for module in model.modules() if (m := getattr(module, "quant_method", None)) is not None]
    kernels = {id(m): (m, m.moe_kernel) for m in methods if getattr(m, "moe_kernel", None) is not None}
    for method, _ in kernels.values():
        method.moe_kernel = None
    try:
        yield
    finally:
        # Of a layer that got no weights.
        for method, kernel in kernels.values():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _sizes(model: nn.Module) -> dict[str, int]:
    return {name: getattr(p, "weight_loader_numel", p.numel()) for name, p in model.named_parameters()}


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return the parameters that are the same tensor as one with an earlier name: {later name: earlier name}."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            ties[name] = earlier
    return ties


def _without_ties(
    weights: NamedWeights, ties: dict[str, str], streamed: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights without the tied names, and note the number of elements of each in ``streamed``.

    Raises:
        ValueError: a tied weight differs from its original, where both came.
    """
    originals: dict[str, Tensor] = {}
    for name, tensor in weights:
        tensor = tensor.detach()
        if name in ties:
            original = originals.get(ties[name])
            if original is not None and not _same(original, tensor):
                raise ValueError(f"{name} differs from {ties[name]}, but the engine's model ties the two")
            continue
        if name in ties.values():
            originals[name] = tensor
        streamed[name] = tensor.numel()
        yield name, tensor


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers; what is no number is the same as another such."""
    if one.shape != other.shape:
        return False
    # A view of the same memory may have another order.
    if (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride()) or torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _known_buffers(weights: NamedWeights, own: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, and of the buffers among them those that the model, whose names are ``own``, has too."""
    for name, tensor in weights:
        known = name.removeprefix(BUFFER)
        if known == name or known in own:
            yield known, tensor


def _missing_parts(model: nn.Module, loaded: set[str], streamed: Collection[str]) -> list[str]:
    """Return the transformers names of parts that did not come, of fused projections that vLLM reports as loaded."""
    missing = []
    for name in sorted(loaded):
        parts = _parts(model, name)
        # Where no part came under its name, vLLM translates this model's names, and there is nothing to compare.
        if any(part in streamed for part in parts):
            missing += [part for part in parts if part not in streamed]
    return missing


def _parts(model: nn.Module, name: str) -> list[str]:
    """Return the transformers names of what a parameter is fused from; empty where it is not fused."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    return [f"{parent}.{part}.{leaf}" for part in packed.get(module, ())]


def _check_sizes(model: nn.Module, sizes: Mapping[str, int], streamed: Mapping[str, int]) -> None:
    """Check that every parameter has as many elements as the weights that go into it, which holds on one rank.

    Raises:
        ValueError: a parameter is larger or smaller than its weights.
    """
    for name, size in sizes.items():
        parts = [name] if name in streamed else _parts(model, name)
        counts = [streamed.get(part) for part in parts]
        # An embedding is padded; its loader checks the shape. Where names are translated there is nothing to compare.
        if not counts or None in counts or hasattr(model.get_submodule(name.rpartition(".")[0]), "org_vocab_size"):
            continue
        if sum(n for n in counts if n) != size:
            raise ValueError(f"{', '.join(parts)}: {counts} elements, but {name} takes {size}")


def _drop_waiting_weights(model: nn.Module) -> None:
    """Drop what came for incomplete layers, as the tensor that made the reload fail is among it."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _repack(module: nn.Module) -> None:
    """Pack a tied head's weight again, on CPU."""
    # It was filled through the embedding, and the head's own packed copy still holds the old weights.
    if hasattr(module, "cpu_linear"):
        module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]


def own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what vLLM's model holds, parameters and buffers, each tensor once under the first of its names."""
    seen: set[int] = set()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        # Equal addresses are one memory; empty tensors have none.
        if tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor.detach()


def copy_from_twin(model: nn.Module, vllm_config: Any, tensors: NamedWeights) -> None:
    """Fill vLLM's ``model`` with what :func:`own_tensors` gave of the same model in another process.

    Layers of adapters are taken off on both sides.

    Raises:
        ValueError: this model keeps more than its tensors show, or the twin's are not those of the same model. The
            model then must not be used before a reload.
    """
    if not _kept_as_loaded(model, vllm_config):
        raise ValueError("the model packs its weights after loading, so that they cannot be taken from another process")
    own = dict(own_tensors(model))
    with torch.no_grad():
        for name, tensor in tensors:
            mine = own.pop(name, None)
            if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                raise ValueError(f"the other process's model has another {name}")
            mine.copy_(tensor)
    if own:
        raise ValueError(f"the other process's model has no {next(iter(own))}")
