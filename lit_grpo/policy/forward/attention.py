"""Attention of packed rows: a token sees its own prompt and completion and nothing else, and padding costs nothing.

A packed micro-batch is one row of tokens, cut into *segments*: a prompt, a completion, or, where prompts are not
shared, a prompt and its completion in one. All layers but attention treat tokens one by one and see the row as it is.
Attention is computed segment by segment, in one of two exact forms:

- ``sdpa``, on every device: segments of like length are put side by side, padded, and given to torch's
  ``scaled_dot_product_attention``. Only this product is padded, and only a little; its cost grows with the squares of
  the segments, not of the row.
- ``varlen``, CUDA in bfloat16: torch's variable-length flash attention, without any padding.

The keys of a completion are those of its prompt, gathered, and its own, so that a shared prompt costs its tokens once.

Layers with a sliding window pass it with each call, and both forms keep to it. Attentions that are given a mask instead
(eager) get one for each kind of layer, :func:`masks_by_layer_type`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.utils.tensors import tensor_of

ALIKE = 0.75
"""A segment joins a padded product if its length is at least this share of that of the longest one in it."""
NOT_COMPUTED = {"softcap": "a soft cap on its scores", "s_aux": "sinks", "position_bias": "a bias by position"}
"""Options of a call that change what attention computes, and that neither of our forms knows."""
MOST_PROBED = 4100
"""Most tokens of a probe: one more than the usual window of 4,096, and not so many that the check takes long."""
_PROBED_COMPLETION = 6
NAMES = {"sdpa": "lit_grpo_sdpa", "varlen": "lit_grpo_varlen"}
"""``policy.attention`` -> the name under which transformers knows our form of it."""
_REACH = "lit_grpo_reach"
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
    _products: dict[tuple[int | None, int | None], list[_Product]] = field(default_factory=dict, repr=False)
    """The padded products, by the window and the chunk of the layers that they are for."""
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

    def narrows(self, window: int | None) -> bool:
        """Tell whether a layer that sees the last ``window`` tokens alone sees less than one without a window."""
        return window is not None and window < self.longest

    def products(self, window: int | None = None, chunk: int | None = None) -> tuple[list[_Product], Tensor]:
        """Return the padded products, and each token's index in their concatenated outputs, [S].

        Args:
            window: most tokens that a token sees, itself included; None: all before it.
            chunk: tokens, counted from the beginning of the prompt, that see none before their chunk; None: no chunks.
        """
        key = (window if self.narrows(window) else None, chunk if self.narrows(chunk) else None)
        buckets = _buckets(self.segments) if key not in self._products or self._output_index is None else []
        if key not in self._products:
            self._products[key] = [_product(bucket, self.device, *key) for bucket in buckets]
        if self._output_index is None:
            index = torch.zeros(sum(s.length for s in self.segments), dtype=torch.long)
            offset = 0
            for bucket in buckets:
                padded_length = max(s.length for s in bucket)
                for s in bucket:
                    index[s.start : s.start + s.length] = torch.arange(offset, offset + s.length)
                    offset += padded_length
            self._output_index = to_device(index, self.device)
        return self._products[key], self._output_index

    def cumulative(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Return what variable-length kernels take, of all segments that have tokens.

        Returns:
            positions of all keys in the row (queries stand in it as they are), cumulated lengths of queries and of keys
            (int32), a bound on the longest stretch of queries and one on that of keys.
        """
        if self._cumulative is None:
            nonempty = [s for s in self.segments if s.length]
            keys = tensor_of((i for s in nonempty for i in _key_positions(s)), torch.int64)
            query_lengths = torch.tensor([0, *(s.length for s in nonempty)]).cumsum(0)
            key_lengths = torch.tensor([0, *(s.length + s.prompt_length for s in nonempty)]).cumsum(0)
            self._cumulative = (
                to_device(keys, self.device),
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


def _product(
    bucket: list[Segment], device: torch.device | str, window: int | None = None, chunk: int | None = None
) -> _Product:
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
    if window is not None or chunk is not None or any(s.prompt_length for s in bucket):
        # Both count from the beginning of the prompt.
        query = torch.tensor([s.prompt_length for s in bucket])[:, None, None] + torch.arange(most_queries)[:, None]
        key = torch.arange(most_keys)
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        if chunk is not None:
            visible &= key // chunk == query // chunk
        if window is not None or chunk is not None:
            # Padding must see something, or its softmax is NaN, which the backward pass would spread.
            visible |= ~visible.any(-1, keepdim=True)
        visible = to_device(visible[:, None], device)
    return _Product(to_device(queries, device), to_device(keys, device), visible)


def masks_by_layer_type(config: Any, mask: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """Narrow a mask to what each kind of layer sees, for attentions that are given a mask.

    Args:
        config: of the text model.
        mask: True where a query sees a key, if there were no windows and chunks, [B, 1, S, S] bool.
        positions: position of each token in its own prompt and completion, [B, S].

    Returns:
        The mask of all layers or, where the model has layers of several kinds, one by the name of each kind.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    apart = (positions[:, :, None] - positions[:, None, :])[:, None]
    if not kinds & {"sliding_attention", "chunked_attention"}:
        # Where layers have no kinds, a window is that of all of them.
        return mask if kinds or window is None else mask & (apart < window)
    masks = dict.fromkeys(kinds, mask)
    if "sliding_attention" in kinds and window is not None:
        masks["sliding_attention"] = mask & (apart < window)
    if "chunked_attention" in kinds:
        chunks = positions // config.attention_chunk_size
        masks["chunked_attention"] = mask & (chunks[:, :, None] == chunks[:, None, :])[:, None]
    return masks


def probe_ids(config: Any, reach: bool = False) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the ids of a prompt and of two completions on which two ways to compute a model can be compared.

    Args:
        config: of the text model.
        reach: whether the prompt is longer than the windows and chunks of the model, up to :data:`MOST_PROBED`, so that
            what lies outside of them has to be left out.

    Returns:
        the prompt and the completions; a prompt of 0 tokens where ``reach`` is asked for and nothing is narrowed.
    """
    vocabulary = int(config.vocab_size)
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    sizes = [
        getattr(config, name, None)
        for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention"))
        if kind in kinds
    ]
    longest = max((size for size in sizes if size), default=0)
    positions = getattr(config, "max_position_embeddings", None) or MOST_PROBED
    length = min(longest + 2, MOST_PROBED, positions - _PROBED_COMPLETION) if reach and longest else 0
    if not reach:
        length = max(1, min(9, positions - _PROBED_COMPLETION))
    draw = [(i * i + 3 * i + 1) % vocabulary for i in range(length + 2 * _PROBED_COMPLETION)]
    completions = [tuple(draw[length : length + 3]), tuple(draw[length + 3 : length + 3 + _PROBED_COMPLETION])]
    return tuple(draw[:length]), completions


def implementation(cls: Any, backend: str) -> str:
    """Return the attention that transformers is asked for: one of ours, where the family's code can call it.

    Args:
        cls: the class of the model; None if it is not known before it is loaded (code of its own).
        backend: ``policy.attention``.

    Raises:
        UserError: the family's code computes attention in one way alone, and not in this one.
    """
    if backend not in NAMES or cls is None or cls._can_set_attn_implementation():
        if backend == "sdpa" and not getattr(cls, "_supports_sdpa", True):
            raise _only_eager(cls, backend)
        return NAMES.get(backend, backend)
    # Families with attention classes of their own (Falcon) know transformers' names alone, and take a mask.
    if backend == "sdpa" and cls._supports_sdpa:
        return "sdpa"
    raise _only_eager(cls, backend)


def _only_eager(cls: Any, backend: str) -> UserError:
    return UserError(
        f"{cls.__name__} cannot compute {backend} attention",
        where="model.policy.attention",
        remedy="set attention: eager" if not cls._supports_sdpa else "set attention: sdpa",
    )


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
            # Not in transformers' own sdpa either, which leaves them out without a word.
            for name, meaning in NOT_COMPUTED.items():
                if options.get(name) is not None:
                    raise UserError(
                        f"{type(module).__name__} attends with {meaning}, which this attention does not compute",
                        where="model.policy.attention",
                        remedy="set attention: eager",
                    )
            # The mask that goes with segments is a placeholder of one bool. A layer that makes more of it (Doge adds
            # weights that it learns) would lose that here, and the parameters behind it their gradient.
            if segments is not None and attention_mask is not None and attention_mask.numel() > 1:
                raise UserError(
                    f"{type(module).__name__} makes a mask of its own, which this attention does not compute",
                    where="model.policy.attention",
                    remedy="set attention: eager",
                )
            if segments is None:
                return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
            return packed(query, key, value, segments, options.get("scaling"), *reach(module, options)), None

        return attention

    forms = {"sdpa": form(padded_products), "varlen": form(variable_length)}
    # The compiler cannot follow the padded products: every micro-batch has others.
    if compiles:
        forms["sdpa"] = torch.compiler.disable(forms["sdpa"])
    for name, attention in forms.items():
        AttentionInterface.register(NAMES[name], attention)
        AttentionMaskInterface.register(NAMES[name], sdpa_mask)


def reach(module: Any, options: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the window and the chunk of a layer, from the options of its call or from its configuration.

    Some families give their layers a window by the mask alone, which packed rows do without.
    """
    # The compiler makes code for what it reads. With the number of the layer it would make that of one block again for
    # each; what it reads here is alike in all layers of a kind.
    noted = getattr(module, _REACH, None) if torch.compiler.is_compiling() else None
    own, chunk = _own_reach(module) if noted is None else noted
    window = options.get("sliding_window")
    return own if window is None else window, chunk


def note_reach(model: Any) -> None:
    """Note at each attention of a model which window and chunk it has, for compiled code to read."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _REACH, _own_reach(module))


def _own_reach(module: Any) -> tuple[int | None, int | None]:
    config, window = getattr(module, "config", None), None
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and layer is not None and layer < len(kinds) else None
    if kind == "sliding_attention" or not kinds:
        window = getattr(config, "sliding_window", None)
    return window, getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None


def padded_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attend by padded products: [1, heads, S, d], [1, key heads, S, d], [1, key heads, S, e] -> [1, S, heads, e]."""
    heads, _, d = query.shape[1:]
    products, output_index = segments.products(window, chunk)
    q = query[0].transpose(0, 1)  # [S, heads, d]
    # Latent attention has values of another size than its keys.
    alike = key.shape == value.shape
    # Keys and values in one tensor, [S, 2 key heads, d]: one gather instead of two.
    sources = [torch.cat([key[0], value[0]])] if alike else [key[0], value[0]]
    outputs = []
    for product in products:
        b, padded_length = product.queries.shape
        queries = q.index_select(0, product.queries.flatten()).view(b, padded_length, heads, d).transpose(1, 2)
        gathered = [
            x.transpose(0, 1).index_select(0, product.keys.flatten()).unflatten(0, product.keys.shape).transpose(1, 2)
            for x in sources
        ]
        k, v = gathered[0].chunk(2, 1) if alike else gathered
        groups = heads // k.shape[1]
        # Query heads that share a key head: each gets a copy of it.
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, k, v, attn_mask=product.visible, is_causal=product.visible is None, scale=scale
        )
        outputs.append(out.transpose(1, 2).reshape(b * padded_length, heads, out.shape[-1]))
    return torch.cat(outputs).index_select(0, output_index)[None]


def variable_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attend by torch's variable-length flash attention; shapes are those of :func:`padded_products`.

    Raises:
        UserError: the layer attends in chunks, or has values of another size than its keys.
    """
    if segments.narrows(chunk) or key.shape != value.shape:
        raise UserError(
            "varlen attention knows no "
            + ("chunks" if segments.narrows(chunk) else "values of another size than their keys"),
            where="model.policy.attention",
            remedy="set attention: sdpa",
        )
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
        # Causal: the last query of a segment is aligned with its last key. A window counts the token itself, and the
        # kernel those before it.
        window_size=(window - 1 if window is not None else -1, 0),
        **options,
    )
    return out[None]
