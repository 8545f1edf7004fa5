"""Adapters (LoRA) by themselves in a running vLLM model, whose own weights came once and stay.

vLLM reads an adapter from a folder; here its tensors go straight into the layers that vLLM puts around those of the
model. Every sync gets an adapter number that was never used before: vLLM keys its prefix cache by the adapter, so that
keys and values of two versions cannot be taken for each other.

The matrices B come multiplied by alpha / rank, which is rounded once that way, and vLLM is told a scale of 1.

What vLLM would let pass in silence is refused: an adapter of a layer around which it puts none is simply not applied.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import EngineContext, NamedWeights
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.vllm.names import ADAPTER_PARTS, is_adapter
from lit_grpo.engines.vllm.weights import own_tensors
from lit_grpo.errors import UserError

KEY = "data.engine.adapters"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter of another one takes the next larger."""
_NO_PATH = "/given-in-memory"
"""vLLM wants a folder for every adapter. It would read it only if it did not have the adapter."""
_MERGED = f"{KEY}: merged, which sends the weights with the adapters in them"


def adapter_rank(lora: Any, config: VLLMEngineConfig) -> int | None:
    """Return the rank of the adapters that come by themselves in a run; None: weights come with adapters merged in.

    Args:
        lora: the policy's :class:`lit_grpo.policy.LoraConfig`; None: all weights are trained.
        config: settings of the engine.

    Raises:
        UserError: ``hot`` is asked for, and cannot be had.
    """
    if config.adapters == "merged":
        return None
    if lora is None:
        raise UserError(
            "the policy trains all weights and has no adapters that could be sent by themselves",
            where=KEY,
            remedy="leave it out, or train adapters: model.policy.lora: {rank: 32}",
        )
    if lora.rank > RANKS[-1]:
        raise UserError(
            f"vLLM takes adapters of rank {RANKS[-1]} at most, and model.policy.lora.rank is {lora.rank}",
            where=KEY,
            remedy=_MERGED,
        )
    if config.sleep == 2:
        raise UserError(
            "sleep: 2 drops the engine's weights after every rollout, and the adapters alone would not bring them back",
            where=KEY,
            remedy="data.engine.sleep: 1, which keeps them in main memory; or " + _MERGED,
        )
    return int(lora.rank)


def engine_arguments(rank: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs`` for one adapter of a rank at a time."""
    # No lora_target_modules: vLLM 0.26 knows layers that it fuses (qkv_proj) by its own names alone.
    return {
        "enable_lora": True,
        "max_lora_rank": next(known for known in RANKS if known >= rank),
        "max_loras": 1,
        "max_cpu_loras": 1,
    }


def adapted_layers(context: EngineContext) -> tuple[str, ...]:
    """Return the transformers names of the layers of a run's policy that have an adapter; every rank calls it."""
    names = [name for name, _ in context.policy.named_weights("adapters")]
    return tuple(name.removesuffix(ADAPTER_PARTS[0]) for name in names if name.endswith(ADAPTER_PARTS[0]))


class HotAdapters:
    """The adapters of a vLLM engine that are brought by themselves, and whether the weights below them have come.

    Args:
        llm: the engine, started with :func:`engine_arguments`.
        layers: transformers names of the layers that have an adapter.

    Raises:
        UserError: vLLM has no place for the adapter of a layer, or the model is a mixture of experts.
    """

    def __init__(self, llm: Any, layers: Sequence[str]) -> None:
        self._llm = llm
        self._numbers = itertools.count(1)
        self._tensors: dict[str, Tensor] = {}
        self.request: Any = None
        """What tells vLLM to sample with the present adapters; None: there are none."""
        self.holds_base = False
        """Whether the weights below the adapters have come, so that a sync needs no more than the adapters."""
        if experts := llm.collective_rpc(_experts)[0]:
            raise UserError(
                f"vLLM puts layers for adapters around the experts of a mixture ({experts[0]}) too, and with these in "
                "place it does not take over the experts' weights",
                where=KEY,
                remedy=_MERGED,
            )
        if missing := llm.collective_rpc(lambda worker: _without_place(worker, layers))[0]:
            raise UserError(
                f"vLLM has no place for adapters of {len(missing)} of {len(layers)} layers of this model, the first of "
                f"which is {missing[0]}",
                where=KEY,
                remedy=_MERGED,
            )

    def load(self, load: Callable[[Any, Any, NamedWeights], None], weights: NamedWeights, version: int) -> None:
        """Take over adapters, and the weights below them where they come first.

        Args:
            load: loads weights into (the model, its configuration) and reads all of the stream.
            weights: in the form ``apart`` or ``adapters``.
            version: of the policy; below 0 it is none of a run, and the weights below do not stay what they are.

        Raises:
            ValueError: what came is not whole.
        """
        came: dict[str, Tensor] = {}
        config, stream = self._llm.llm_engine.vllm_config, iter(weights)
        first = next(stream, None)
        self.request, self._tensors = None, {}
        whole = split(itertools.chain([] if first is None else [first], stream), came)
        if first is None or not is_adapter(first[0]):
            self.holds_base = False
            self._llm.apply_model(lambda model: _load_bare(load, model, config, whole))
        elif not self.holds_base:
            raise ValueError("the adapters came without the weights below them, which the engine does not have")
        for name, _ in whole:
            raise ValueError(f"{name} came beside the adapters, and is none")
        number = next(self._numbers)
        self._llm.collective_rpc(lambda worker: _put(worker, came, number))
        self.request, self.holds_base, self._tensors = _request(number), version >= 0, came

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what :meth:`load` with :func:`lit_grpo.engines.vllm.weights.copy_from_twin` takes in another process.

        The adapters are those that came, and not copies.
        """
        with bare(self._llm.apply_model(lambda model: model)[0]) as model:
            yield from own_tensors(model)
        yield from self._tensors.items()


def _load_bare(load: Callable[[Any, Any, NamedWeights], None], model: Any, config: Any, weights: NamedWeights) -> None:
    with bare(model):
        load(model, config, weights)


def _request(number: int) -> Any:
    """Return what tells vLLM to sample with an adapter that it has."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"lit-grpo-{number}", number, f"{_NO_PATH}/{number}")


def split(weights: NamedWeights, adapters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that belong to no adapter, and put the others into ``adapters``."""
    for name, tensor in weights:
        if is_adapter(name):
            adapters[name] = tensor.detach()
        else:
            yield name, tensor


@contextlib.contextmanager
def bare(model: nn.Module) -> Iterator[nn.Module]:
    """Take the layers of adapters off a vLLM model inside, so that its weights have their own names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    taken: list[tuple[nn.Module, str, nn.Module]] = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in taken:
        parent._modules[name] = cast(nn.Module, child.base_layer)
    try:
        yield model
    finally:
        for parent, name, child in taken:
            parent._modules[name] = child


def _put(worker: Any, tensors: Mapping[str, Tensor], number: int) -> None:
    """Make adapters the only ones of a vLLM worker, under a number that requests then name.

    Args:
        worker: the worker.
        tensors: ``<layer>.lora_A.weight`` [rank, in] and ``<layer>.lora_B.weight`` [out, rank] of every layer with an
            adapter, B multiplied by its scale.
        number: of the adapters, above 0.

    Raises:
        ValueError: there are none, or vLLM has no layer for one of them. The model then has no adapters.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager._adapter_manager
    manager.remove_all_adapters()
    if not tensors:
        raise ValueError("no adapters came")
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(ADAPTER_PARTS[0]))
    adapters = LoRAModel.from_lora_tensors(
        number,
        # vLLM would multiply B in place by any scale but 1, and B may be the learner's own.
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=sorted({_layer(name) for name in tensors})),
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renaming(manager.model),
    )
    expected = {name: (one.lora_a, one.lora_b) for name, one in adapters.loras.items()}
    places = _places(manager)
    if missing := sorted(expected.keys() - places.keys()):
        raise ValueError(
            f"vLLM's {type(manager.model).__name__} has no place for an adapter of {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. {_MERGED}"
        )
    manager.add_adapter(adapters)
    manager.activate_adapter(number)
    _check_arrived(expected, places)


def _layer(name: str) -> str:
    return name.removesuffix(ADAPTER_PARTS[0]).removesuffix(ADAPTER_PARTS[1])


def _renaming(model: Any) -> Any:
    """Return the mapping from transformers' names of layers to vLLM's, where they differ."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # Without what goes into one fused layer, which is the adapter manager's. vLLM 0.26 calls it by the second name.
    for part in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, part):
            return getattr(mapper, part)()
    return mapper


def _places(manager: Any) -> dict[str, tuple[Any, int]]:
    """Return layer of the policy -> (vLLM's layer of its adapter, number of its part there)."""
    places: dict[str, tuple[Any, int]] = {}
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name)
        places.update({name: (layer, 0)} if parts is None else {part: (layer, i) for i, part in enumerate(parts)})
    return places


@torch.no_grad()
def _check_arrived(expected: Mapping[str, tuple[Tensor, Tensor]], places: Mapping[str, tuple[Any, int]]) -> None:
    """Check that the layers hold what was sent.

    Raises:
        ValueError: one holds something else.
    """
    wrong: dict[str, Tensor] = {}
    for name, matrices in expected.items():
        layer, part = places[name]
        # One matrix for a layer of several parts is cut by vLLM (fused projections of a checkpoint).
        if part == 0 and matrices[1].shape[0] != layer.lora_b_stacked[0].shape[2]:
            continue
        for stacked, sent in zip((layer.lora_a_stacked, layer.lora_b_stacked), matrices, strict=True):
            held = stacked[part][0, 0, : sent.shape[0], : sent.shape[1]]
            wrong[name] = (held != sent.to(held)).any() | wrong.get(name, torch.zeros((), device=held.device).bool())
    # One answer from the card for all of them.
    if wrong and bool(torch.stack(list(wrong.values())).any()):
        name = next(name for name, bad in wrong.items() if bool(bad))
        raise ValueError(f"vLLM did not take over the adapter of {name}")


def _experts(worker: Any) -> list[str]:
    """Return the names of vLLM's layers of experts that it has put a layer for adapters around."""
    return [name for name in worker.model_runner.lora_manager._adapter_manager.modules if name.endswith(".experts")]


def _without_place(worker: Any, layers: Sequence[str]) -> list[str]:
    """Return the layers of the policy, by their transformers names, for whose adapters vLLM has no place."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = worker.model_runner.lora_manager._adapter_manager
    places, mapper = _places(manager), _renaming(manager.model)
    return [layer for layer in layers if parse_fine_tuned_lora_name(layer + ADAPTER_PARTS[0], mapper)[0] not in places]
