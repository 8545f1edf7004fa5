"""Bring a policy's weights into a running vLLM model, whole or not at all.

vLLM's plain ``load_weights`` writes into the tensors that the kernels read. On CPU those are packed, so it fails there.
vLLM's layerwise reload puts unpacked tensors back, loads each layer, and packs again into the old storage, which CUDA
graphs still point to. Three things can go silently wrong in it, and each is prevented here:

* A tied output head that is not in the stream keeps its packed copy of the old embedding (CPU).
* A projection that vLLM fuses (``qkv_proj``) counts as loaded once one part of it came; the rest would be junk.
* A parameter that never comes keeps its old value, with a warning in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import NamedWeights
from lit_grpo.quiet import at_level

_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
"""Warns at every reload of layers that hold no weights (rotary embeddings); what matters is checked here."""


def reload_weights(model: nn.Module, vllm_config: Any, weights: NamedWeights) -> None:
    """Replace every weight of vLLM's ``model``.

    Args:
        model: the model inside a vLLM worker.
        vllm_config: of the same engine.
        weights: (transformers parameter name, full tensor) on any device and in any float format. The name of a tied
            output head may be in it or not.

    Raises:
        ValueError: a weight is missing, unknown, or of another shape, or a tied head differs from its embedding. The
            model then holds a mixture and must not be used before a reload that succeeds.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    ties = tied_parameters(model)
    streamed: set[str] = set()
    with at_level(_RELOAD, logging.ERROR), set_current_vllm_config(vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        try:
            expected = {name for name, _ in model.named_parameters()} - ties.keys()
            loaded: set[str] = model.load_weights(_without_ties(weights, ties, streamed))  # type: ignore[operator]
        except BaseException:
            _drop_waiting_weights(model)
            raise
        finally:
            # Also after a failure: it puts the model's tensors back, so that a later reload finds it whole.
            finalize_layerwise_reload(model, vllm_config.model_config)
        if missing := sorted(expected - loaded) + _missing_parts(model, loaded, streamed):
            raise ValueError(f"the policy's weights lack {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")
        for name in ties:
            _repack(model.get_submodule(name.rpartition(".")[0]))


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are the same tensor as one with an earlier name: {later name: earlier name}."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            ties[name] = earlier
    return ties


def _without_ties(weights: NamedWeights, ties: dict[str, str], streamed: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Pass the weights on, less tied names, which are only checked; note the names in ``streamed``."""
    originals: dict[str, Tensor] = {}
    for name, tensor in weights:
        tensor = tensor.detach()
        if name in ties:
            original = originals.get(ties[name])
            same = original is None or original.data_ptr() == tensor.data_ptr() or torch.equal(original, tensor)
            if not same:
                raise ValueError(f"{name} differs from {ties[name]}, but the engine's model ties the two")
            continue
        if name in ties.values():
            originals[name] = tensor
        streamed.add(name)
        yield name, tensor


def _missing_parts(model: nn.Module, loaded: set[str], streamed: set[str]) -> list[str]:
    """Transformers names of parts that did not come, of fused projections that vLLM reports as loaded."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    missing = []
    for name in sorted(loaded):
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        parts = [f"{parent}.{part}.{leaf}" for part in packed.get(module, ())]
        # None at all: a model whose names vLLM translates; there is nothing to compare.
        if any(part in streamed for part in parts):
            missing += [part for part in parts if part not in streamed]
    return missing


def _drop_waiting_weights(model: nn.Module) -> None:
    """Forget what came for layers that are not complete: among it is the tensor that made the reload fail."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _repack(module: nn.Module) -> None:
    """Pack a tied head again: its weight was filled through the embedding, which leaves the head's own copy behind."""
    if hasattr(module, "cpu_linear"):
        module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
