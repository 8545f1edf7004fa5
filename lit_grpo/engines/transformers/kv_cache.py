"""Decoding with one key-value cache per prompt: its samples attend to it together and keep only their own tokens.

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
"""Name of the attention among those of transformers."""
_FIRST_ROOM = 64
"""Sampled tokens that there is room for at first; doubled when it is used up."""


class GroupCache:
    """Keys and values of some prompts, and of what each of their samples has added.

    It takes the place of a transformers cache in a forward pass of one new token a row, within :func:`attention`.

    Args:
        prompts: keys and values of each layer, [Q, K, S, D] each: Q prompts of up to S tokens, K key-value heads.
        seen: [Q, S], 0 where a prompt is padded; None: nowhere.
        group: prompt of each row, R ascending numbers below Q.
    """

    def __init__(self, prompts: Sequence[tuple[Tensor, Tensor]], seen: Tensor | None, group: Sequence[int]) -> None:
        self.prompts = list(prompts)
        self.bias: Tensor | None = None
        like = self.prompts[0][0]
        if seen is not None:
            self.bias = torch.zeros_like(seen, dtype=like.dtype).masked_fill(seen == 0, float("-inf"))[:, None, None]
        self.length = 0
        """Tokens that every row has added."""
        shape = (len(group), like.shape[1], _FIRST_ROOM, like.shape[3])
        self.own = [(k.new_empty(shape), v.new_empty(shape)) for k, v in self.prompts]
        self._arrange(list(group))

    def _arrange(self, group: list[int]) -> None:
        """Where the rows of a prompt stand when they are laid out as [Q, most rows of one prompt]."""
        present = sorted(set(group))
        if len(present) < len(self.prompts[0][0]):  # no sample of a prompt is left
            index = torch.tensor(present, device=self.prompts[0][0].device)
            self.prompts = [(k[index], v[index]) for k, v in self.prompts]
            self.bias = None if self.bias is None else self.bias[index]
        self.group = [present.index(g) for g in group]
        counts = [self.group.count(q) for q in range(len(present))]
        self.width = max(counts)
        starts = [sum(counts[:q]) for q in range(len(present))]
        slots = [[start + min(i, n - 1) for i in range(self.width)] for start, n in zip(starts, counts, strict=True)]
        place = [q * self.width + i - starts[q] for i, q in enumerate(self.group)]
        device = self.prompts[0][0].device
        self.slots = torch.tensor(slots, device=device)
        """[Q, W] rows; where a prompt has fewer than W, its last one again."""
        self.place = torch.tensor(place, device=device)
        """[R] of each row among the Q * W."""

    def make_room(self) -> None:
        """For one more token in every row."""
        room = self.own[0][0].shape[2]
        if self.length == room:
            self.own = [(_longer(k, 2 * room), _longer(v, 2 * room)) for k, v in self.own]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the new token, [R, K, 1, D]; what the rows have added so far, [R, K, t, D]. Called by the model."""
        k, v = self.own[layer]
        k[:, :, self.length] = keys[:, :, 0]
        v[:, :, self.length] = values[:, :, 0]
        return k[:, :, : self.length + 1], v[:, :, : self.length + 1]

    def get_seq_length(self, *_: Any) -> int:
        """Positions so far. Called by some models, which are given their position ids all the same."""
        return self.prompts[0][0].shape[2] + self.length

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, in this order."""
        self.own = [(_selected(k, rows, self.length), _selected(v, rows, self.length)) for k, v in self.own]
        self._arrange([self.group[i] for i in rows.tolist()])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
        """Attention of each row's new token to its prompt and to what the row has added.

        Args:
            query: [R, H, 1, D].
            keys: what :meth:`update` gave, [R, K, t, D].
            values: likewise.
            layer: number of the layer.
            scaling: of the scores.

        Returns:
            [R, 1, H, D].
        """
        rows, heads, _, size = query.shape
        count, width = self.slots.shape
        kv_heads = keys.shape[1]
        share = heads // kv_heads
        prompt_keys, prompt_values = (x.flatten(0, 1) for x in self.prompts[layer])  # [Q K, S, D]
        q = (query[:, :, 0] * scaling).view(rows, kv_heads, share, size)
        together = self._by_prompt(q)
        scores = torch.bmm(together, prompt_keys.transpose(1, 2)).view(count, kv_heads, width * share, -1)
        if self.bias is not None:
            scores = scores + self.bias
        to_prompt = self._by_row(scores, share)
        length = to_prompt.shape[-1]
        weights = torch.cat([to_prompt, torch.matmul(q, keys.transpose(2, 3))], -1)
        weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
        mixed = torch.bmm(self._by_prompt(weights[..., :length]), prompt_values)
        out = self._by_row(mixed.view(count, kv_heads, width * share, size), share)
        out = out + torch.matmul(weights[..., length:], values)
        return out.view(rows, 1, heads, size)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[R, K, share, X] -> [Q K, W share, X]."""
        count, width = self.slots.shape
        _, kv_heads, share, last = x.shape
        return x[self.slots].transpose(1, 2).reshape(count * kv_heads, width * share, last)

    def _by_row(self, x: Tensor, share: int) -> Tensor:
        """[Q, K, W share, X] -> [R, K, share, X]."""
        count, kv_heads, _, last = x.shape
        return x.view(count, kv_heads, self.width, share, last).transpose(1, 2).flatten(0, 1)[self.place]


def _longer(x: Tensor, room: int) -> Tensor:
    out = x.new_empty(*x.shape[:2], room, x.shape[3])
    out[:, :, : x.shape[2]] = x
    return out


def _selected(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """Some rows; only what is filled is copied."""
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
    """What transformers calls in every layer.

    Raises:
        NotImplementedError: the layer attends in a way of its own.
    """
    special = ("sliding_window", "softcap", "s_aux", "position_bias")
    if attention_mask is not None or any(options.get(name) is not None for name in special):
        raise NotImplementedError(f"{type(module).__name__} attends in a way of its own")
    return options["groups"].attend(query, key, value, module.layer_idx, scaling), None
