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
"""A segment joins a padded product if its length is at least this share of that of the longest one in it."""
NAMES = {"sdpa": "lit_grpo_sdpa", "varlen": "lit_grpo_varlen"}
"""``policy.attention`` -> the name under which transformers knows our form of it."""
# Compiled code is made anew for each bound on the longest segment: rounded up to multiples of this, few are different.
_BOUND_MULTIPLE = 256


class Segment(NamedTuple):
    """A stretch of a packed row whose tokens see the tokens before them in it and, if it has one, a whole prompt."""

    start: int
    length: int
    prompt_start: int = 0
    prompt_length: int = 0
    """Tokens of the shared prompt before it; 0: the segment is a prompt, or holds its own."""


@dataclass
class _Product:
    """Segments of like length, side by side: one padded attention product."""

    queries: Tensor
    """Positions of queries in the row, [b, Q]; padding repeats one of them."""
    keys: Tensor
    """Positions of keys in the row, those of the shared prompt first, [b, K]; padding repeats one of them."""
    visible: Tensor | None
    """True where a query sees a key, [b, 1, Q, K] bool; None: causal."""


@dataclass
class Segments:
    """The segments of a packed row, and what every layer's attention needs of them, made once for a micro-batch.

    Args:
        segments: in the order of the row; together they are the whole row.
        device: where the row lies.
    """

    segments: Sequence[Segment]
    device: torch.device | str = "cpu"
    _products: list[_Product] | None = field(default=None, repr=False)
    _output_index: Tensor | None = field(default=None, repr=False)
    _cumulative: tuple[Tensor, Tensor, Tensor, int, int] | None = field(default=None, repr=False)

    @property
    def longest(self) -> int:
        """The most tokens that any token sees, itself included."""
        return max((s.length + s.prompt_length for s in self.segments), default=0)

    @functools.cached_property
    def asks_for_gqa(self) -> bool:
        """Whether torch's variable-length attention takes ``enable_gqa``; older versions group queries unasked."""
        from torch.nn.attention.varlen import varlen_attn

        return "enable_gqa" in inspect.signature(varlen_attn).parameters

    def mask(self) -> Tensor:
        """Build a mask for attentions that take one: [1, 1, S, S], True where a query (third axis) sees a key."""
        size = sum(s.length for s in self.segments)
        visible = torch.zeros(size, size, dtype=torch.bool)
        for s in self.segments:
            own = slice(s.start, s.start + s.length)
            visible[own, own] = torch.ones(s.length, s.length, dtype=torch.bool).tril()
            visible[own, s.prompt_start : s.prompt_start + s.prompt_length] = True
        return to_device(visible[None, None], self.device)

    def products(self) -> tuple[list[_Product], Tensor]:
        """Return the padded products, and each token's index in their concatenated outputs, [S]."""
        if self._products is None or self._output_index is None:
            products: list[_Product] = []
            index = torch.zeros(sum(s.length for s in self.segments), dtype=torch.long)
            offset = 0
            for bucket in _buckets(self.segments):
                products.append(_product(bucket, self.device))
                padded_length = products[-1].queries.shape[1]
                for s in bucket:
                    index[s.start : s.start + s.length] = torch.arange(offset, offset + s.length)
                    offset += padded_length
            self._products, self._output_index = products, to_device(index, self.device)
        return self._products, self._output_index

    def cumulative(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return what variable-length kernels take, of all segments that have tokens.

        Returns:
            positions of all keys in the row (queries stand in it as they are), cumulated lengths of queries and of keys
            (int32), a bound on the longest stretch of queries and one on that of keys.
        """
        if self._cumulative is None:
            nonempty = [s for s in self.segments if s.length]
            keys = [i for s in nonempty for i in _key_positions(s)]
            query_lengths = torch.tensor([0, *(s.length for s in nonempty)]).cumsum(0)
            key_lengths = torch.tensor([0, *(s.length + s.prompt_length for s in nonempty)]).cumsum(0)
            self._cumulative = (
                to_device(torch.tensor(keys), self.device),
                to_device(query_lengths.to(torch.int32), self.device),
                to_device(key_lengths.to(torch.int32), self.device),
                -(-max(s.length for s in nonempty) // _BOUND_MULTIPLE) * _BOUND_MULTIPLE,
                -(-self.longest // _BOUND_MULTIPLE) * _BOUND_MULTIPLE,
            )
        return self._cumulative


def _key_positions(segment: Segment) -> list[int]:
    prompt = range(segment.prompt_start, segment.prompt_start + segment.prompt_length)
    return [*prompt, *range(segment.start, segment.start + segment.length)]


def _buckets(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group the segments that share a padded product, longest first.

    Those with a shared prompt before them are kept apart: the others are causal and need no mask.
    """
    buckets: list[list[Segment]] = []
    for with_prompt in (False, True):
        chosen = [s for s in segments if s.length and (s.prompt_length > 0) == with_prompt]
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
        # Padding repeats a position that exists: its output is never read, and a gather needs a valid index.
        queries[b] = s.start
        queries[b, : s.length] = torch.arange(s.start, s.start + s.length)
        keys[b] = s.start
        keys[b, : s.length + s.prompt_length] = torch.tensor(_key_positions(s))
    visible = None
    if any(s.prompt_length for s in bucket):
        last = torch.tensor([s.prompt_length for s in bucket])[:, None] + torch.arange(most_queries)  # [b, Q]
        visible = to_device((torch.arange(most_keys) <= last[:, :, None])[:, None], device)
    return _Product(to_device(queries, device), to_device(keys, device), visible)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on ``device``, copied from main memory without waiting for the GPU."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A plain copy waits until the GPU has done all that it was given.
    return tensor.pin_memory().to(device, non_blocking=True)


def register(*, compiles: bool = False) -> None:
    """Register both forms with transformers. A call without segments (sampling, padded rows) is transformers' sdpa.

    Args:
        compiles: whether the layers that call them will be compiled.
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
    # The compiler cannot follow the padded products: every micro-batch has others.
    if compiles:
        forms["sdpa"] = torch.compiler.disable(forms["sdpa"])
    for name, attention in forms.items():
        AttentionInterface.register(NAMES[name], attention)
        AttentionMaskInterface.register(NAMES[name], sdpa_mask)


def padded_products(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Attend by padded products: [1, heads, S, d], [1, key heads, S, d] twice -> [1, S, heads, d]."""
    heads, _, d = query.shape[1:]
    products, output_index = segments.products()
    q = query[0].transpose(0, 1)  # [S, heads, d]
    # Keys and values in one tensor, [S, 2 key heads, d]: one gather instead of two.
    keys_and_values = torch.cat([key[0], value[0]]).transpose(0, 1)
    outputs = []
    for product in products:
        b, padded_length = product.queries.shape
        queries = q.index_select(0, product.queries.flatten()).view(b, padded_length, heads, d).transpose(1, 2)
        gathered = keys_and_values.index_select(0, product.keys.flatten())
        gathered = gathered.view(b, product.keys.shape[1], keys_and_values.shape[1], d)
        k, v = gathered.transpose(1, 2).chunk(2, 1)
        groups = heads // k.shape[1]
        # Query heads that share a key head: each gets a copy of it.
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, k, v, attn_mask=product.visible, is_causal=product.visible is None, scale=scale
        )
        outputs.append(out.transpose(1, 2).reshape(b * padded_length, heads, d))
    return torch.cat(outputs).index_select(0, output_index)[None]


def variable_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Attend by torch's variable-length flash attention; shapes are those of :func:`padded_products`."""
    # The first import takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    positions, queries, keys, most_queries, most_keys = segments.cumulative()
    options: Any = {"enable_gqa": True} if segments.asks_for_gqa and query.shape[1] != key.shape[1] else {}
    out: Any = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).index_select(0, positions),
        value[0].transpose(0, 1).index_select(0, positions),
        queries,
        keys,
        most_queries,
        most_keys,
        scale=scale,
        # Causal: the last query of a segment is aligned with its last key.
        window_size=(-1, 0),
        **options,
    )
    return out[None]
