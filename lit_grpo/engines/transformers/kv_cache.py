"""A key-value cache that the samples of a prompt share: they attend to it together and keep only their own tokens.

With P tokens in a prompt, G samples and t tokens sampled so far, a cache row per sample is read (and, where it grows by
concatenation, written again) at every step: G (P + t) positions. Here it is P + G t, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ATTENTION = "lit_grpo_groups"
"""Name under which transformers knows this attention."""
_FIRST_CAPACITY = 64
"""Sampled tokens of a row that are allocated at first. The capacity doubles when it is used up."""


class GroupCache:
    """Keys and values of a batch of prompts, and of the tokens that each of their samples has added.

    It takes the place of a transformers cache in a forward pass of one new token a row, within :func:`attention`.

    Args:
        prompts: keys and values of each layer, [Q, K, S, D] each: Q prompts of up to S tokens, K key-value heads.
        seen: [Q, S], 0 where a prompt is padded; None: no prompt is padded.
        group: number of the prompt of each of the R rows (samples), ascending, below Q.
    """

    def __init__(self, prompts: Sequence[tuple[Tensor, Tensor]], seen: Tensor | None, group: Sequence[int]) -> None:
        self.prompts = list(prompts)
        self.bias: Tensor | None = None
        like = self.prompts[0][0]
        if seen is not None:
            self.bias = torch.zeros_like(seen, dtype=like.dtype).masked_fill(seen == 0, float("-inf"))[:, None, None]
        self.length = 0
        """Number of tokens that every row has added so far."""

        def room(x: Tensor) -> Tensor:
            return x.new_empty(len(group), x.shape[1], _FIRST_CAPACITY, x.shape[3])

        # [R, K, capacity, D] for each layer; latent attention has values of another size than its keys.
        self.own = [(room(k), room(v)) for k, v in self.prompts]
        self._arrange(list(group))

    def _arrange(self, group: list[int]) -> None:
        """Lay the rows out as [Q, W], where W is the most rows of one prompt, and drop prompts without rows.

        All rows of a prompt then attend to it in one matrix product.
        """
        present = sorted(set(group))
        if len(present) < len(self.prompts[0][0]):
            index = torch.tensor(present, device=self.prompts[0][0].device)
            self.prompts = [(k[index], v[index]) for k, v in self.prompts]
            self.bias = None if self.bias is None else self.bias[index]
        self.group = [present.index(g) for g in group]
        counts = [self.group.count(q) for q in range(len(present))]
        self.width = max(counts)
        starts = [sum(counts[:q]) for q in range(len(present))]
        slots = [[start + min(i, n - 1) for i in range(self.width)] for start, n in zip(starts, counts, strict=True)]
        slot_of_row = [q * self.width + i - starts[q] for i, q in enumerate(self.group)]
        device = self.prompts[0][0].device
        self.slots = torch.tensor(slots, device=device)
        """Row in each slot, [Q, W]. Where a prompt has fewer than W rows, its last one is repeated."""
        self.slot_of_row = torch.tensor(slot_of_row, device=device)
        """Slot of each row among the Q * W, [R]."""

    def make_room(self) -> None:
        """Allocate space for one more token in every row, where there is none."""
        capacity = self.own[0][0].shape[2]
        if self.length == capacity:
            self.own = [(_longer(k, 2 * capacity), _longer(v, 2 * capacity)) for k, v in self.own]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of a new token in every row, [R, K, 1, D] each; the model calls it in each layer.

        Returns:
            Keys and values of all t tokens that the rows have added so far, [R, K, t, D] each.
        """
        k, v = self.own[layer]
        k[:, :, self.length] = keys[:, :, 0]
        v[:, :, self.length] = values[:, :, 0]
        return k[:, :, : self.length + 1], v[:, :, : self.length + 1]

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of positions so far, prompts with their padding included."""
        # Some models ask for it, but their position ids are given to them.
        return self.prompts[0][0].shape[2] + self.length

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.own = [(_selected(k, rows, self.length), _selected(v, rows, self.length)) for k, v in self.own]
        self._arrange([self.group[i] for i in rows.tolist()])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
        """Attend from each row's new token to its prompt and to the tokens that the row has added.

        Args:
            query: queries of the H heads, [R, H, 1, D].
            keys: keys that :meth:`update` returned, [R, K, t, D].
            values: values that :meth:`update` returned, [R, K, t, D].
            layer: number of the layer.
            scaling: factor of the scores.

        Returns:
            The attention's output, [R, 1, H, D].
        """
        rows, heads, _, size = query.shape
        count, width = self.slots.shape
        kv_heads = keys.shape[1]
        per_kv_head = heads // kv_heads
        prompt_keys, prompt_values = (x.flatten(0, 1) for x in self.prompts[layer])  # [Q K, S, D]
        q = (query[:, :, 0] * scaling).view(rows, kv_heads, per_kv_head, size)
        scores = torch.bmm(self._by_prompt(q), prompt_keys.transpose(1, 2))
        scores = scores.view(count, kv_heads, width * per_kv_head, -1)
        if self.bias is not None:
            scores = scores + self.bias
        to_prompt = self._by_row(scores, per_kv_head)
        length = to_prompt.shape[-1]
        # One softmax over prompt and own tokens: it is the same attention as with a cache row for every sample.
        weights = torch.cat([to_prompt, torch.matmul(q, keys.transpose(2, 3))], -1)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        mixed = torch.bmm(self._by_prompt(weights[..., :length]), prompt_values)
        out = self._by_row(mixed.view(count, kv_heads, width * per_kv_head, -1), per_kv_head)
        out = out + torch.matmul(weights[..., length:], values)
        return out.view(rows, 1, heads, -1)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Lay rows out by prompt: [R, K, H/K, X] -> [Q K, W H/K, X]."""
        count, width = self.slots.shape
        _, kv_heads, per_kv_head, last = x.shape
        return x[self.slots].transpose(1, 2).reshape(count * kv_heads, width * per_kv_head, last)

    def _by_row(self, x: Tensor, per_kv_head: int) -> Tensor:
        """Take rows out of the layout by prompt: [Q, K, W H/K, X] -> [R, K, H/K, X]."""
        count, kv_heads, _, last = x.shape
        return x.view(count, kv_heads, self.width, per_kv_head, last).transpose(1, 2).flatten(0, 1)[self.slot_of_row]


def _longer(x: Tensor, capacity: int) -> Tensor:
    out = x.new_empty(*x.shape[:2], capacity, x.shape[3])
    out[:, :, : x.shape[2]] = x
    return out


def _selected(x: Tensor, rows: Tensor, length: int) -> Tensor:
    # Only the positions that are filled are copied.
    out = x.new_empty(len(rows), *x.shape[1:])
    out[:, :, :length] = x[rows, :, :length]
    return out


@contextmanager
def attention(model: Any) -> Iterator[None]:
    """Let a transformers model attend through the :class:`GroupCache` that its forward pass is given."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attend through the ``GroupCache`` of the forward pass; transformers calls it in every layer.

    Raises:
        NotImplementedError: the layer needs more than plain attention (a sliding window, a soft cap, sinks, ...).
    """
    special = ("sliding_window", "softcap", "s_aux", "position_bias")
    if attention_mask is not None or any(options.get(name) is not None for name in special):
        raise NotImplementedError(f"{type(module).__name__} attends in a way of its own")
    return options["groups"].attend(query, key, value, module.layer_idx, scaling), None
