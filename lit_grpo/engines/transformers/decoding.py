"""Ways to decode token by token, from the fastest to the one that works for every model.

- ``shared``: the samples of a prompt share its keys and values, :mod:`lit_grpo.engines.transformers.kv_cache`.
- ``copies``: every sample has a row of transformers' own cache, prompts padded on the left.
- ``equal``: the same with prompts of one length in a batch, without padding: recurrent states and convolutions run over
  padding that a mask hides from attention alone.
- ``recompute``: no cache; every step runs whole rows, padded on the right, where no token sees the padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import RouterRecorder
from lit_grpo.engines.transformers.kv_cache import GroupCache, attention

Decoding = Literal["shared", "copies", "equal", "recompute"]
DECODINGS: tuple[Decoding, ...] = ("shared", "copies", "equal", "recompute")


class Decoder(Protocol):
    """What decoding goes on with after the prompts: keys and values, states, or the tokens themselves."""

    experts: list[Tensor]
    """Experts of the last pass's new tokens, [tokens, layers, K] for each row; empty where nobody records them."""

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Feed one more token [R] of every row at its position [R], and return the next logits [R, V]."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows."""


def prefill(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    group: Sequence[int],
    way: Decoding,
    routers: RouterRecorder | None = None,
) -> tuple[Tensor, Decoder, Tensor]:
    """Run each different prompt once for all its samples.

    Args:
        model: a ``*ForCausalLM``.
        prompts: the different prompts; of one length for ``equal``.
        group: number of the prompt of each of the R samples, those of a prompt side by side.
        way: how decoding goes on.
        routers: records the experts of each pass; None: nobody asks.

    Returns:
        Logits [R, V] of every sample's next token, what decoding goes on with, and the position [R] of every sample's
        last token.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompts[g]) for g in group], device=device)
    if way == "recompute":
        rows = Recompute(model, [prompts[g] for g in group], routers)
        return rows.logits(), rows, lengths - 1
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    seen = torch.zeros(len(prompts), longest, dtype=torch.long)
    # Padded on the left, so that all rows go on at the same position of the cache.
    for i, text in enumerate(prompts):
        ids[i, longest - len(text) :] = torch.tensor(text)
        seen[i, longest - len(text) :] = 1
    padded = not bool(seen.all())
    ids, seen = ids.to(device), seen.to(device)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    cache = _new_cache(model)
    if way == "equal":
        options: dict[str, Any] = {}
    else:
        options = {"position_ids": positions, "attention_mask": seen if padded else None}
    with eagerly(is_compiled(model)):
        out = model(input_ids=ids, use_cache=True, **{_cache_name(model): cache}, **_known(model, options))
    experts: list[Tensor] = []
    if routers is not None:
        seen_experts = routers.recorded().cpu().unflatten(0, ids.shape)
        experts = [seen_experts[g, longest - len(prompts[g]) :] for g in group]
    index = torch.tensor(group, device=device)
    mask = seen if padded else None
    decoder: Decoder
    if way == "shared":
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        decoder = SharedPrompts(model, GroupCache(layers, mask, group), routers)
    else:
        decoder = Copies(model, cache, mask, index, plain=way == "equal", routers=routers)
    decoder.experts = experts
    return out.logits[index, -1], decoder, positions[index, -1]


class SharedPrompts:
    """One cache for each prompt, which its samples share."""

    def __init__(self, model: Any, groups: GroupCache, routers: RouterRecorder | None) -> None:
        self.model, self.groups, self.routers = model, groups, routers
        self.experts: list[Tensor] = []
        self._compiled = is_compiled(model)

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.groups.make_room()
        with attention(self.model), eagerly(self._compiled):
            out = self.model(
                input_ids=ids[:, None],
                position_ids=positions[:, None],
                past_key_values=self.groups,
                groups=self.groups,
            )
        self.groups.length += 1
        self.experts = _one_each(self.routers)
        return cast(Tensor, out.logits[:, -1])

    def keep(self, rows: Tensor) -> None:
        self.groups.keep(rows)


class Copies:
    """A row of the model's own cache for every sample, prompt included.

    Args:
        model: the model.
        cache: that of the prompts.
        mask: [prompts, S], 0 where a prompt is padded; None: no padding.
        index: number of each sample's prompt, [R].
        plain: whether the model counts positions itself and gets no mask.
        routers: records the experts of each pass; None: nobody asks.
    """

    def __init__(
        self, model: Any, cache: Any, mask: Tensor | None, index: Tensor, *, plain: bool, routers: RouterRecorder | None
    ) -> None:
        self.model, self.cache, self.plain, self.routers = model, cache, plain, routers
        self.mask = None if mask is None else mask[index]
        self.experts: list[Tensor] = []
        self._compiled = is_compiled(model)
        # reorder_cache and not batch_select_indices: caches of recurrent states and convolutions have it too.
        cache.reorder_cache(index)

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if not self.plain:
            if self.mask is not None:
                self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], 1)
            options = {"position_ids": positions[:, None], "attention_mask": self.mask}
        options[_cache_name(self.model)] = self.cache
        with eagerly(self._compiled):
            out = self.model(input_ids=ids[:, None], use_cache=True, **_known(self.model, options))
        self.experts = _one_each(self.routers)
        return cast(Tensor, out.logits[:, -1])

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.mask = None if self.mask is None else self.mask[rows]


class Recompute:
    """No cache: whole rows at every step, for models whose states cannot be chosen from or continued."""

    def __init__(self, model: Any, rows: Sequence[tuple[int, ...]], routers: RouterRecorder | None) -> None:
        self.model, self.rows, self.routers = model, [list(row) for row in rows], routers
        self.experts: list[Tensor] = []
        self._compiled = is_compiled(model)
        self._known = [0] * len(self.rows)
        """Tokens of each row whose experts have been handed out."""

    def logits(self) -> Tensor:
        """Return the logits after the last token of every row, [R, V]."""
        device = next(self.model.parameters()).device
        longest = max(map(len, self.rows))
        ids = torch.zeros(len(self.rows), longest, dtype=torch.long)
        for i, row in enumerate(self.rows):
            ids[i, : len(row)] = torch.tensor(row)
        with eagerly(self._compiled):
            logits = self.model(input_ids=ids.to(device), use_cache=False).logits
        if self.routers is not None:
            experts = self.routers.recorded().cpu().unflatten(0, ids.shape)
            spans = zip(self._known, self.rows, strict=True)
            self.experts = [experts[i, known : len(row)] for i, (known, row) in enumerate(spans)]
            self._known = [len(row) for row in self.rows]
        last = torch.tensor([len(row) - 1 for row in self.rows], device=device)
        return cast(Tensor, logits[torch.arange(len(last), device=device), last])

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        for row, token in zip(self.rows, ids.tolist(), strict=True):
            row.append(token)
        return self.logits()

    def keep(self, rows: Tensor) -> None:
        chosen = rows.tolist()
        self.rows = [self.rows[i] for i in chosen]
        self._known = [self._known[i] for i in chosen]


def _one_each(routers: RouterRecorder | None) -> list[Tensor]:
    return [] if routers is None else list(routers.recorded().cpu().split(1))


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _cache_name(model: Any) -> str:
    """Return the argument that a model takes its cache by: state-space models have a name of their own for it."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


def _known(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Leave out arguments that mean nothing to a model; one that would matter shows in the comparison of the ways."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def is_compiled(model: nn.Module) -> bool:
    """Tell whether blocks of a model were compiled for the learner. It walks over all modules: not for every token."""
    return any(part._compiled_call_impl is not None for part in model.modules())


def eagerly(compiled: bool) -> AbstractContextManager[Any]:
    """Run blocks uncompiled that were compiled for the learner."""
    # Decoding has another shape at every step, and another attention: each would be compiled anew. The policy has the
    # same as compiling.eagerly, which engines may not import.
    if compiled:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
