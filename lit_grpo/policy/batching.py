"""From ragged ids to the tensors of one forward pass, and back to one value per completion token.

Two layouts that give the same numbers: :func:`pad_rows` (one completion a row) and :func:`share_prompts` (a prompt
once, then its completions, each of which sees the prompt and itself), which costs P + G L tokens and not G (P + L).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PolicyInput:
    """One micro-batch. B rows of S tokens go through the model; M of the hidden states predict a completion token.

    The layout of the rows is free (padded, packed, shared prompts): ``source``, ``row`` and ``column`` alone say which
    hidden state predicts which token of which completion.
    """

    input_ids: Tensor
    """[B, S]"""
    position_ids: Tensor
    """[B, S]"""
    source: Tensor
    """[M] index into the flattened [B * S] hidden states: the position before the token."""
    target: Tensor
    """[M] the token."""
    row: Tensor
    """[M] completion of the micro-batch, 0 .. n-1."""
    column: Tensor
    """[M] position within the completion."""
    shape: tuple[int, int]
    """(n, T) of the result."""
    attention_mask: Tensor | None = None
    """None: causal within each row. Else [B, 1, S, S], True where a query (third axis) sees a key (last axis)."""

    def scatter(self, values: Tensor) -> Tensor:
        """[M] -> [n, T]; 0 where there is no token."""
        out = values.new_zeros(self.shape)
        return out.index_put((self.row, self.column), values)


def pad_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    device: torch.device | str = "cpu",
) -> PolicyInput:
    """One completion a row, prompt and completion side by side, padded on the right.

    Attention is causal, so no real position can see the padding: no mask is needed and the padding id is irrelevant
    (0 is used). Which positions count is decided by lengths alone, never by ids.

    Args:
        prompts: prompt ids of each completion.
        completions: completion ids.
        width: T of the result.
        device: where the tensors go.
    """
    sizes = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    longest = max(sizes, default=0)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    source: list[int] = []
    target: list[int] = []
    row: list[int] = []
    column: list[int] = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise ValueError(f"completion {i} has an empty prompt: nothing predicts its first token")
        ids[i, : sizes[i]] = torch.tensor([*prompt, *completion], dtype=torch.long)
        first = i * longest + len(prompt) - 1
        source.extend(range(first, first + len(completion)))
        target.extend(completion)
        row.extend([i] * len(completion))
        column.extend(range(len(completion)))
    index = torch.tensor([source, target, row, column], dtype=torch.long).to(device)
    return PolicyInput(
        input_ids=ids.to(device),
        position_ids=torch.arange(longest, device=device).expand(len(prompts), longest),
        source=index[0],
        target=index[1],
        row=index[2],
        column=index[3],
        shape=(len(prompts), width),
    )


def share_prompts(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    width: int,
    row_tokens: int = 1024,
    device: torch.device | str = "cpu",
) -> PolicyInput:
    """Neighbouring completions of one prompt share a row: ``prompt, completion, completion, ...``.

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
    rows: list[list[int]] = []  # completions of each row
    size = 0
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise ValueError(f"completion {i} has an empty prompt: nothing predicts its first token")
        if rows and prompts[rows[-1][0]] == prompt and size + len(completion) <= row_tokens:
            rows[-1].append(i)
        else:
            rows.append([i])
            size = len(prompt)
        size += len(completion)
    longest = max((len(prompts[r[0]]) + sum(len(completions[i]) for i in r) for r in rows), default=0)
    ids, positions, segments = [], [], []  # segment 0 is the prompt, 1, 2, ... its completions, -1 padding
    source: list[int] = []
    target: list[int] = []
    row_of: list[int] = []
    column: list[int] = []
    for b, members in enumerate(rows):
        prompt = prompts[members[0]]
        length = len(prompt)
        row, place, segment = [*prompt], [*range(length)], [0] * length
        for k, i in enumerate(members, 1):
            count = len(completions[i])
            if not count:
                continue
            start = b * longest + len(row)
            source += [b * longest + length - 1, *range(start, start + count - 1)]
            row += completions[i]
            place += range(length, length + count)
            segment += [k] * count
            target += completions[i]
            row_of += [i] * count
            column += range(count)
        rest = longest - len(row)
        ids.append(row + [0] * rest)
        positions.append(place + [0] * rest)
        segments.append(segment + [-1] * rest)
    index = torch.tensor([source, target, row_of, column], dtype=torch.long).to(device)
    tokens = torch.tensor([ids, positions, segments], dtype=torch.long).to(device)  # [3, B, S]
    part = tokens[2]
    sees = (part[:, :, None] == part[:, None, :]) | (part[:, None, :] == 0)
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    return PolicyInput(
        input_ids=tokens[0],
        position_ids=tokens[1],
        source=index[0],
        target=index[1],
        row=index[2],
        column=index[3],
        shape=(len(prompts), width),
        attention_mask=(sees & causal)[:, None],
    )
