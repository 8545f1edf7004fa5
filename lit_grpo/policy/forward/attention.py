"""Attention of packed rows: a token sees its own prompt and completion and nothing else, and padding costs nothing.

A packed micro-batch is one row of tokens, cut into *segments*: a prompt, a completion, or, where prompts are not
shared, a prompt and its completion in one. All layers but attention treat tokens one by one and see the row as it is.
Attention is computed segment by segment, in one of two exact forms:

- ``sdpa``, on every device: segments of like length are put side by side, padded, and given to torch's
  ``scaled_dot_product_attention``. Only this product is padded, and only a little; its cost grows with the squares of
  the segments, not of the row.
- ``varlen``, CUDA in bfloat16: torch's variable-length flash attention, without any padding.

The keys of a completion are those of its prompt, gathered, and its own, so that a shared prompt costs its tokens once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.errors import UserError

ALIKE = 0.75
"""A segment joins the others of a padded product if its length is at least this share of the longest one's."""
NAMES = {"sdpa": "lit_grpo_sdpa", "varlen": "lit_grpo_varlen"}
"""``policy.attention`` -> the name under which transformers knows our form of it."""


_ROUND = 256
"""Bounds on lengths are rounded up to multiples of it, so that compiled code sees few different ones."""


class Segment(NamedTuple):
    """A stretch of a packed row whose tokens see the tokens before them in it and, if it has one, a whole prompt."""

    start: int
    length: int
    prompt_start: int = 0
    prompt_length: int = 0
    """0: no prompt before it, it is one or holds its own."""


@dataclass
class _Product:
    """Segments of like length, side by side: one padded attention product."""

    queries: Tensor
    """[b, Q] places in the row; padding repeats a place of the row."""
    keys: Tensor
    """[b, K]"""
    visible: Tensor | None
    """[b, 1, Q, K], None: causal."""


@dataclass
class Segments:
    """What the tokens of a packed row see. Made once for a micro-batch, used in every layer.

    Args:
        parts: of the row, in order; together they are the whole row.
        device: of the row.
    """

    parts: Sequence[Segment]
    device: torch.device | str = "cpu"
    _products: list[_Product] | None = field(default=None, repr=False)
    _place: Tensor | None = field(default=None, repr=False)
    _lengths: tuple[Tensor, Tensor, Tensor, int, int] | None = field(default=None, repr=False)

    @property
    def longest(self) -> int:
        """Tokens that the last token of the longest segment sees, itself included."""
        return max((s.length + s.prompt_length for s in self.parts), default=0)

    @functools.cached_property
    def asks_for_gqa(self) -> bool:
        """Whether torch's variable-length attention wants to be told of grouped queries, which older ones just do."""
        from torch.nn.attention.varlen import varlen_attn

        return "enable_gqa" in inspect.signature(varlen_attn).parameters

    def mask(self) -> Tensor:
        """[1, 1, S, S] bool, True where a query (third axis) sees a key: for attentions that know masks alone."""
        size = sum(s.length for s in self.parts)
        sees = torch.zeros(size, size, dtype=torch.bool)
        for s in self.parts:
            own = slice(s.start, s.start + s.length)
            sees[own, own] = torch.ones(s.length, s.length, dtype=torch.bool).tril()
            sees[own, s.prompt_start : s.prompt_start + s.prompt_length] = True
        return to_device(sees[None, None], self.device)

    def products(self) -> tuple[list[_Product], Tensor]:
        """The padded products, and for each token of the row its place in their concatenated outputs, [S]."""
        if self._products is None or self._place is None:
            products: list[_Product] = []
            place = torch.zeros(sum(s.length for s in self.parts), dtype=torch.long)
            offset = 0
            for bucket in _buckets(self.parts):
                products.append(_product(bucket, self.device))
                wide = products[-1].queries.shape[1]
                for s in bucket:
                    place[s.start : s.start + s.length] = torch.arange(offset, offset + s.length)
                    offset += wide
            self._products, self._place = products, to_device(place, self.device)
        return self._products, self._place

    def cumulative(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """For variable-length kernels: places of all keys, cumulated lengths of queries and keys (int32), two bounds
        on the longest.

        A segment without tokens is left out. Queries stand in the row as they are.
        """
        if self._lengths is None:
            some = [s for s in self.parts if s.length]
            keys = [i for s in some for i in _keys(s)]
            queries = torch.tensor([0, *(s.length for s in some)]).cumsum(0)
            seen = torch.tensor([0, *(s.length + s.prompt_length for s in some)]).cumsum(0)
            self._lengths = (
                to_device(torch.tensor(keys), self.device),
                to_device(queries.to(torch.int32), self.device),
                to_device(seen.to(torch.int32), self.device),
                -(-max(s.length for s in some) // _ROUND) * _ROUND,
                -(-self.longest // _ROUND) * _ROUND,
            )
        return self._lengths


def _keys(segment: Segment) -> list[int]:
    prompt = range(segment.prompt_start, segment.prompt_start + segment.prompt_length)
    return [*prompt, *range(segment.start, segment.start + segment.length)]


def _buckets(parts: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that share a padded product, longest first; those with a prompt before them apart from the others."""
    buckets: list[list[Segment]] = []
    for with_prompt in (False, True):
        chosen = [s for s in parts if s.length and (s.prompt_length > 0) == with_prompt]
        chosen.sort(key=lambda s: (-s.length - s.prompt_length, -s.length, s.start))
        bucket: list[Segment] = []
        for s in chosen:
            if not bucket or s.length + s.prompt_length < ALIKE * (bucket[0].length + bucket[0].prompt_length):
                bucket = []
                buckets.append(bucket)
            bucket.append(s)
    return buckets


def _product(bucket: list[Segment], device: torch.device | str) -> _Product:
    most_queries = max(s.length for s in bucket)
    most_keys = max(s.length + s.prompt_length for s in bucket)
    queries = torch.empty(len(bucket), most_queries, dtype=torch.long)
    keys = torch.empty(len(bucket), most_keys, dtype=torch.long)
    for b, s in enumerate(bucket):
        queries[b] = s.start
        queries[b, : s.length] = torch.arange(s.start, s.start + s.length)
        keys[b] = s.start
        keys[b, : s.length + s.prompt_length] = torch.tensor(_keys(s))
    visible = None
    if any(s.prompt_length for s in bucket):
        last = torch.tensor([s.prompt_length for s in bucket])[:, None] + torch.arange(most_queries)  # [b, Q]
        visible = to_device((torch.arange(most_keys) <= last[:, :, None])[:, None], device)
    return _Product(to_device(queries, device), to_device(keys, device), visible)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy from main memory without waiting: a plain copy to a GPU waits until the GPU has done all it was given."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def register(*, compiles: bool = False) -> None:
    """Make transformers know both forms; a call without segments (sampling, padded rows) is its own sdpa.

    Args:
        compiles: layers that call them will be compiled.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def form(packed: Any) -> Any:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
        ) -> tuple[Tensor, None]:
            segments = options.pop("segments", None)
            if segments is None:
                return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
            window = options.get("sliding_window")
            if window is not None and segments.longest > window:
                raise UserError(
                    f"the model attends to the last {window} tokens only, and packed rows do not know such a window",
                    where="model.policy.pack",
                    remedy="set pack: false and share_prompts: false",
                )
            return packed(query, key, value, segments, options.get("scaling")), None

        return attention

    forms = {"sdpa": form(padded_products), "varlen": form(variable_length)}
    if compiles:  # it cannot follow the padded products, of which every micro-batch has others
        forms["sdpa"] = torch.compiler.disable(forms["sdpa"])
    for name, attention in forms.items():
        AttentionInterface.register(NAMES[name], attention)
        AttentionMaskInterface.register(NAMES[name], sdpa_mask)


def padded_products(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """[1, heads, S, d], [1, key heads, S, d] twice -> [1, S, heads, d]."""
    heads, _, d = query.shape[1:]
    products, place = segments.products()
    q = query[0].transpose(0, 1)  # [S, heads, d]
    both = torch.cat([key[0], value[0]]).transpose(0, 1)  # [S, 2 key heads, d]: gathered in one go
    outputs = []
    for product in products:
        b, wide = product.queries.shape
        mine = q.index_select(0, product.queries.flatten()).view(b, wide, heads, d).transpose(1, 2)
        seen = both.index_select(0, product.keys.flatten()).view(b, product.keys.shape[1], both.shape[1], d)
        k, v = seen.transpose(1, 2).chunk(2, 1)
        groups = heads // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            mine, k, v, attn_mask=product.visible, is_causal=product.visible is None, scale=scale
        )
        outputs.append(out.transpose(1, 2).reshape(b * wide, heads, d))
    return torch.cat(outputs).index_select(0, place)[None]


def variable_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """The same by torch's flash attention; causal there means that last query and last key stand side by side."""
    from torch.nn.attention.varlen import varlen_attn  # seconds, the first time

    places, queries, keys, most_queries, most_keys = segments.cumulative()
    options: Any = {"enable_gqa": True} if segments.asks_for_gqa and query.shape[1] != key.shape[1] else {}
    out: Any = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).index_select(0, places),
        value[0].transpose(0, 1).index_select(0, places),
        queries,
        keys,
        most_queries,
        most_keys,
        scale=scale,
        window_size=(-1, 0),
        **options,
    )
    return out[None]
