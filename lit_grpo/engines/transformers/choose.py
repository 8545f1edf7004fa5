"""Choose how to decode: the fastest way that gives what the model's own forward pass gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_grpo.engines.transformers.decoding import DECODINGS, Decoding, eagerly, is_compiled, prefill
from lit_grpo.errors import UserError
from lit_grpo.utils.windows import narrowed

_STEPS = 3
_LENGTHS = (2, 12)
"""Lengths of the probe's prompts: below and above narrowed windows and the usual convolutions."""


@torch.no_grad()
def choose_decoding(model: Any) -> Decoding:
    """Try the ways on a few tokens, and return the first that agrees with the model's own forward pass.

    Raises:
        UserError: not even whole rows without a cache do.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    config = model.config.get_text_config()
    vocabulary = int(config.vocab_size)
    room = (getattr(config, "max_position_embeddings", None) or 4096) - _STEPS
    lengths = [max(1, min(length, room)) for length in _LENGTHS]
    draw = [(i * i + 3 * i + 1) % vocabulary for i in range(sum(lengths) + 4 * _STEPS)]
    prompts = [tuple(draw[: lengths[0]]), tuple(draw[lengths[0] : sum(lengths)])]
    tokens = torch.tensor(draw[sum(lengths) :]).view(4, _STEPS)
    reasons: list[str] = []
    with narrowed(model):
        expected = _own_logprobs(model, prompts, tokens)
        # Rounding is small beside what differs between rows; wrong states are not.
        spread = float((expected - expected.mean(0)).abs().max())
        exact = min(1e-3, max(2e-5, 1e-2 * spread)) if model.dtype == torch.float32 else 0.1
        if float((_own_logprobs(model, prompts, tokens) - expected).abs().max()) > exact:
            # Dropout, say: nothing can be told by comparing, and the guards of the run name what two passes differ by.
            return DECODINGS[0]
        for way in DECODINGS:
            try:
                gap = float((_decoded(model, prompts, tokens, way) - expected).abs().max())
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # Caches and masks of a family may fail in as many ways as there are families.
                reasons.append(f"{way}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}")
                continue
            # Written so that NaN, which compares false, is no agreement.
            if gap <= exact:
                if way == "recompute":
                    rank_zero_info("Sampling computes whole rows anew for every token: no cache of the model is exact.")
                elif reasons:
                    rank_zero_info(f"Sampling decodes by {way!r}; {'; '.join(reasons)}.")
                return way
            reasons.append(f"{way}: log-probabilities differ by {gap:.2g}")
    raise UserError(
        f"{type(model).__name__} cannot be sampled from by the transformers engine ({'; '.join(reasons)})",
        where="data.engine.name",
        remedy="set name: vllm, or give a causal language model",
    )


def _own_logprobs(model: Any, prompts: Sequence[tuple[int, ...]], tokens: Tensor) -> Tensor:
    """Return the log-probabilities after each fed token by plain forward passes, a row at a time, [4, steps, V]."""
    device = next(model.parameters()).device
    rows = []
    for row, fed in enumerate(tokens.tolist()):
        ids = torch.tensor([[*prompts[row // 2], *fed]], device=device)
        with eagerly(is_compiled(model)):
            logits = model(input_ids=ids, use_cache=False).logits
        rows.append(logits[0, -_STEPS:].float().log_softmax(-1))
    return torch.stack(rows)


def _decoded(model: Any, prompts: Sequence[tuple[int, ...]], tokens: Tensor, way: Decoding) -> Tensor:
    """Return the same by a way of decoding, two samples a prompt."""
    device = next(model.parameters()).device
    batches = [[0], [1]] if way == "equal" else [[0, 1]]
    out = []
    for batch in batches:
        group = [g for g in range(len(batch)) for _ in range(2)]
        fed = tokens[[2 * i + k for i in batch for k in range(2)]].to(device)
        _, decoder, positions = prefill(model, [prompts[i] for i in batch], group, way)
        steps = []
        for step in range(_STEPS):
            positions = positions + 1
            # Out of order once, so that a cache that cannot be chosen from is noticed here.
            decoder.keep(torch.arange(len(group), device=device))
            steps.append(decoder.step(fed[:, step], positions).float().log_softmax(-1))
        out.append(torch.stack(steps, 1))
    return torch.cat(out)
