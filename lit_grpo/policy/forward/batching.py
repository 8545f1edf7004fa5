"""Micro-batches: from ragged ids to the tensors of one forward pass, and back to a value for each completion token.

Layouts that give the same numbers, P tokens of prompt and G completions of up to L tokens each:

- :func:`pad_rows`: one completion a row, all rows as long as the longest: at least G (P + L) tokens for a group.
- :func:`share_prompts`: a prompt once, then its completions, each of which sees the prompt and itself: P + G L tokens,
  and the padding of the shorter rows.
- :func:`pack_rows`: everything in one row, with or without shared prompts, no padding at all, and without the last
  token of each completion, whose hidden state predicts nothing: P + G (L - 1).

:func:`cut` makes micro-batches of a bounded number of tokens for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lit_grpo.policy.forward.attention import Segment, Segments, to_device
from lit_grpo.utils.tensors import tensor_of

ROW_TOKENS = 1024
"""Length at which :func:`share_prompts` closes a row: attention costs the square of it."""


@dataclass
class PolicyInput:
    """One micro-batch: B rows of S tokens for the model, of whose hidden states M predict a completion token.

    The layout of the rows is free (padded, packed, shared prompts): ``source``, ``row`` and ``column`` alone say which
    hidden state predicts which token of which completion.
    """

    input_ids: Tensor
    """Ids that go through the model, [B, S] int64."""
    position_ids: Tensor
    """Position of each id in its own prompt and completion, [B, S] int64."""
    source: Tensor
    """Index into the flattened [B * S] hidden states of the position before each predicted token, [M]."""
    target: Tensor
    """Id of each predicted token, [M]."""
    row: Tensor
    """Index in the micro-batch of each predicted token's completion, 0 .. n-1, [M]."""
    column: Tensor
    """Position of each predicted token within its completion, [M]."""
    shape: tuple[int, int]
    """(n, T) of the result: completions, and positions of each."""
    owner: Tensor
    """Index of the completion that each token belongs to, for a shared prompt one of them; -1: padding. [B, S]."""
    attention_mask: Tensor | None = None
    """True where a query (third axis) sees a key (last axis), [B, 1, S, S] bool; None: causal within each row."""
    segments: Segments | None = None
    """Which tokens those of a packed row (B = 1) see, in the place of a mask; None for other rows."""

    @property
    def tokens(self) -> int:
        """Number of tokens that go through the model, padding included."""
        return self.input_ids.numel()

    def scatter(self, values: Tensor) -> Tensor:
        """Put values of the predicted tokens in their places: [M] -> [n, T], 0 where there is no token."""
        out = values.new_zeros(self.shape)
        return out.index_put((self.row, self.column), values)


def pad_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    device: torch.device | str = "cpu",
) -> PolicyInput:
    """Build rows of one completion each, prompt and completion side by side, padded on the right.

    Attention is causal, so no real position can see the padding: no mask is needed and the padding id is irrelevant
    (0 is used). Which positions count is decided by lengths alone, never by ids.

    Args:
        prompts: prompt ids of each completion.
        completions: completion ids.
        width: T of the result.
        device: where the tensors go.
    """
    _check_prompts(prompts)
    sizes = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    longest = max(sizes, default=0)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    source: list[int] = []
    target: list[int] = []
    row: list[int] = []
    column: list[int] = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : sizes[i]] = torch.tensor([*prompt, *completion], dtype=torch.long)
        first = i * longest + len(prompt) - 1
        source.extend(range(first, first + len(completion)))
        target.extend(completion)
        row.extend([i] * len(completion))
        column.extend(range(len(completion)))
    index = to_device(tensor_of(chain(source, target, row, column), torch.int64).view(4, -1), device)
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    real = positions < torch.tensor(sizes, device=device)[:, None]
    return PolicyInput(
        input_ids=to_device(ids, device),
        position_ids=positions,
        source=index[0],
        target=index[1],
        row=index[2],
        column=index[3],
        shape=(len(prompts), width),
        owner=torch.arange(len(prompts), device=device)[:, None].where(real, -1),
    )


def share_prompts(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    row_tokens: int = ROW_TOKENS,
    device: torch.device | str = "cpu",
) -> PolicyInput:
    """Build rows that neighbouring completions of one prompt share: ``prompt, completion, completion, ...``.

    Position ids go on from the prompt's length in every completion, and a mask lets a completion see the prompt and
    itself alone, so each token sees exactly what it would see in a row of its own. The first token of every completion
    is predicted by the prompt's last position.

    Args:
        prompts: prompt ids of each completion.
        completions: completion ids.
        width: T of the result.
        row_tokens: a row is closed when it would grow beyond this; attention costs grow with its square.
        device: where the tensors go.
    """
    _check_prompts(prompts)
    rows = _shared_rows(prompts, completions, row_tokens)
    longest = max((_row_size(r, prompts, completions) for r in rows), default=0)
    # Segment 0 of a row is the prompt, 1, 2, ... are its completions, -1 is padding.
    ids, positions, segments, owners = [], [], [], []
    source: list[int] = []
    target: list[int] = []
    row_of: list[int] = []
    column: list[int] = []
    for b, members in enumerate(rows):
        prompt = prompts[members[0]]
        length = len(prompt)
        row, position, segment, owner = [*prompt], [*range(length)], [0] * length, [members[0]] * length
        for k, i in enumerate(members, 1):
            count = len(completions[i])
            if not count:
                continue
            start = b * longest + len(row)
            source += [b * longest + length - 1, *range(start, start + count - 1)]
            row += completions[i]
            position += range(length, length + count)
            segment += [k] * count
            owner += [i] * count
            target += completions[i]
            row_of += [i] * count
            column += range(count)
        padding = longest - len(row)
        ids.append(row + [0] * padding)
        positions.append(position + [0] * padding)
        segments.append(segment + [-1] * padding)
        owners.append(owner + [-1] * padding)
    index = to_device(tensor_of(chain(source, target, row_of, column), torch.int64).view(4, -1), device)
    tokens = to_device(torch.tensor([ids, positions, segments, owners], dtype=torch.long), device)  # [4, B, S]
    segment_of = tokens[2]
    visible = (segment_of[:, :, None] == segment_of[:, None, :]) | (segment_of[:, None, :] == 0)
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    return PolicyInput(
        input_ids=tokens[0],
        position_ids=tokens[1],
        source=index[0],
        target=index[1],
        row=index[2],
        column=index[3],
        shape=(len(prompts), width),
        owner=tokens[3],
        attention_mask=(visible & causal)[:, None],
    )


def pack_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    share: bool = True,
    device: torch.device | str = "cpu",
) -> PolicyInput:
    """Build one row of all completions, without padding; :mod:`lit_grpo.policy.forward.attention` keeps them apart.

    Position ids begin at 0 with every prompt; those of a completion go on from its prompt's length. The first token of
    every completion is predicted by its prompt's last position.

    Args:
        prompts: prompt ids of each completion.
        completions: completion ids.
        width: T of the result.
        share: whether neighbouring completions of one prompt share its tokens.
        device: where the tensors go.
    """
    _check_prompts(prompts)
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    segments: list[Segment] = []
    index: tuple[list[int], ...] = ([], [], [], [])  # source, target, row, column
    prompt_start, length = 0, 0
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        count = len(completion)
        if not share or not i or prompts[i - 1] != prompt:
            prompt_start, length = len(ids), len(prompt)
            ids += prompt
            positions += range(length)
            owners += [i] * length
            segments.append(Segment(prompt_start, length if share else length + max(0, count - 1)))
        start = len(ids)
        # The hidden state of a completion's last token predicts nothing, so the token need not be computed.
        ids += completion[:-1]
        positions += range(length, length + count - 1)
        owners += [i] * max(0, count - 1)
        if share and count > 1:
            segments.append(Segment(start, count - 1, prompt_start, length))
        if count:
            index[0].extend([prompt_start + length - 1, *range(start, start + count - 1)])
            index[1].extend(completion)
            index[2].extend([i] * count)
            index[3].extend(range(count))
    source, target, row, column = to_device(tensor_of(chain(*index), torch.int64).view(4, -1), device)
    tokens = to_device(tensor_of(chain(ids, positions, owners), torch.int64).view(3, -1), device)  # [3, S]
    return PolicyInput(
        input_ids=tokens[:1],
        position_ids=tokens[1:2],
        source=source,
        target=target,
        row=row,
        column=column,
        shape=(len(prompts), width),
        owner=tokens[2:],
        segments=Segments(segments, device),
    )


@dataclass(frozen=True)
class Layout:
    """The layout that micro-batches are built in: packed or padded, with or without shared prompts."""

    pack: bool = True
    share: bool = True

    def build(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        width: int,
        device: torch.device | str = "cpu",
    ) -> PolicyInput:
        """Build the model input of one micro-batch; arguments as of :func:`pack_rows`."""
        if self.pack:
            return pack_rows(prompts, completions, width=width, share=self.share, device=device)
        build = share_prompts if self.share else pad_rows
        return build(prompts, completions, width=width, device=device)


def cut(
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    tokens: int | None,
    size: int | None = None,
) -> list[list[int]]:
    """Divide completions into micro-batches of a bounded number of tokens, deterministically.

    What counts are the tokens that go through the model in the layout: shared prompts once for a micro-batch, padding
    included where there is any. A completion that alone is longer than the budget is a micro-batch by itself.

    Args:
        layout: the one that the micro-batches will be built in.
        prompts: prompt ids of each completion.
        completions: completion ids.
        tokens: most tokens of a micro-batch; None: no bound.
        size: most completions of a micro-batch; None: no bound.

    Returns:
        indices of the completions of each micro-batch; every index is in one of them.
    """
    max_tokens = float("inf") if tokens is None else tokens
    max_size = len(completions) if size is None else size
    number: dict[tuple[int, ...], int] = {}
    groups = [number.setdefault(tuple(prompt), len(number)) for prompt in prompts]
    # Packed rows cost the sum of their lengths, so any mixture fills a micro-batch. Padded ones cost their longest, so
    # completions of like length belong together.
    fit = _first_fit if layout.pack else _next_fit
    return fit(prompts, completions, groups, max_tokens, max_size, layout.share)


def _first_fit(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    groups: Sequence[int],
    max_tokens: float,
    max_size: int,
    share: bool,
) -> list[list[int]]:
    """Put whole groups, longest first, into the first micro-batch with room; cut only a group that is too large."""
    items: list[tuple[int, list[int]]] = []  # tokens, members
    members_of: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members_of.setdefault(group if share else i, []).append(i)
    for members in members_of.values():
        prompt = len(prompts[members[0]])
        members.sort(key=lambda i: (-len(completions[i]), i))
        pieces: list[tuple[int, list[int]]] = []
        for i in members:
            cost = max(0, len(completions[i]) - 1)
            for k, (used, piece) in enumerate(pieces):
                if used + cost <= max_tokens and len(piece) < max_size:
                    pieces[k] = (used + cost, [*piece, i])
                    break
            else:
                pieces.append((prompt + cost, [i]))
        items += pieces
    # Longest first, so that short groups fill the room that long ones leave; ties by place, so that cuts repeat.
    items.sort(key=lambda item: (-item[0], min(item[1])))
    bins: list[tuple[int, list[int]]] = []
    for cost, members in items:
        for k, (used, inside) in enumerate(bins):
            if used + cost <= max_tokens and len(inside) + len(members) <= max_size:
                bins[k] = (used + cost, inside + members)
                break
        else:
            bins.append((cost, members))
    return [sorted(members, key=lambda i: (groups[i], i)) for _, members in bins]


def _next_fit(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    groups: Sequence[int],
    max_tokens: float,
    max_size: int,
    share: bool,
) -> list[list[int]]:
    """Put completions of like length together, longest first, those of a group side by side where they share a row."""

    def tokens(members: list[int]) -> int:
        of_members = [prompts[i] for i in members], [completions[i] for i in members]
        rows = _shared_rows(*of_members, ROW_TOKENS) if share else [[k] for k in range(len(members))]
        return len(rows) * max(_row_size(row, *of_members) for row in rows)

    longest: dict[int, int] = {}
    for i, group in enumerate(groups):
        size = len(prompts[i]) + len(completions[i])
        longest[group] = max(size, longest.get(group, 0)) if share else 0

    def sort_key(i: int) -> tuple[int, int, int]:
        size = longest[groups[i]] if share else len(prompts[i]) + len(completions[i])
        return -size, groups[i] if share else 0, i

    batches: list[list[int]] = []
    for i in sorted(range(len(groups)), key=sort_key):
        if batches and len(batches[-1]) < max_size and tokens([*batches[-1], i]) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _shared_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    row_tokens: int,
) -> list[list[int]]:
    """Group neighbours with one prompt into rows, each closed before it grows beyond ``row_tokens``."""
    rows: list[list[int]] = []
    size = 0
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if rows and prompts[rows[-1][0]] == prompt and size + len(completion) <= row_tokens:
            rows[-1].append(i)
        else:
            rows.append([i])
            size = len(prompt)
        size += len(completion)
    return rows


def _row_size(row: Sequence[int], prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> int:
    return len(prompts[row[0]]) + sum(len(completions[i]) for i in row)


def _check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"completion {i} has an empty prompt: nothing predicts its first token")
