"""From ragged ids to the tensors of one forward pass, and back to one value per completion token."""

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
    """None: causal within each row."""

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
    source, target, row, column = [], [], [], []
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
