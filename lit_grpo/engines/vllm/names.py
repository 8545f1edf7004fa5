"""A policy's weights under the names that vLLM reads: those of a checkpoint on disk.

Inside transformers a model's weights may have other names than in its files (Mixtral's experts), and vLLM was written
for the files. What a file holds besides, buffers that are saved (the bias by which the routers of GLM 4.5 and DeepSeek
choose experts), no stream of weights contains.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from lit_grpo.engines.base import NamedWeights

ADAPTER_PARTS = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of an adapter's two matrices."""
BUFFER = "buffer:"
"""Prefix of the names of buffers, which are taken over where vLLM's model has a tensor of that name."""


def is_adapter(name: str) -> bool:
    """Tell whether a tensor of a stream of weights is one of an adapter's two matrices."""
    return name.endswith(ADAPTER_PARTS)


def as_in_checkpoint(model: Any, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a policy as a checkpoint on disk has them, and then its saved buffers.

    Adapters come as they are; where they come alone, there are no buffers either.

    Args:
        model: the policy's transformers model, which says what its names are on disk.
        weights: (transformers parameter name, full tensor), one at a time.
    """
    saved_as = _names_on_disk(model)
    alone = True
    for name, tensor in weights:
        adapter = is_adapter(name)
        alone &= adapter
        # Adapters are named by the layers of the transformers model, on disk too.
        if saved_as is None or adapter:
            yield name, tensor
        else:
            yield from saved_as(name, tensor)
    if alone:
        return
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                yield BUFFER + (f"{path}.{name}" if path else name), buffer


def _names_on_disk(model: Any) -> Any:
    """Return a function of one weight that yields its parts as they are saved; None where names do not differ."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    # As transformers does when it saves a model that was made from a configuration.
    known = [c for c in get_model_conversion_mapping(model, add_legacy=False) or () if not isinstance(c, PrefixChange)]
    # Experts that are one tensor in memory and many on disk some versions of vLLM know both ways, and 0.26 does not.
    if not known:
        return None
    # What was found once: looking for it again for every weight would take as long as the sync.
    stand_in: Any = SimpleNamespace(_weight_conversions=known, config=model.config)

    def saved_as(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from revert_weight_conversion(stand_in, {name: tensor}).items()

    return saved_as
