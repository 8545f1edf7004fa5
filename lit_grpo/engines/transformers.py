"""Sampling with transformers: works on every device and shares the learner's own weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import EngineError, NamedWeights
from lit_grpo.types import Completion, Request, Sampling


@dataclass
class _Row:
    """One completion in the making."""

    request: int
    sample: int
    prompt: tuple[int, ...]
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersEngine:
    """Batched sampling with a key-value cache, each prompt prefilled once for all its samples.

    Every completion draws from its own stream of uniform numbers, made from its seed alone. What it samples therefore
    does not depend on the other completions of the batch (up to the rounding of differently shaped matrix products).

    Args:
        model: a ``*ForCausalLM``; used by reference, so that its weights are always the learner's.
        end_token_ids: ids that end a completion.
        batch_size: completions sampled at once.
        own_weights: sample from a copy of the model, brought up to date by ``sync`` alone: for sampling in a thread
            while the learner changes its weights. Costs the model's memory once more.
    """

    def __init__(
        self, model: nn.Module, end_token_ids: Sequence[int], batch_size: int = 512, own_weights: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, is {batch_size}")
        self.own_weights = own_weights
        self.model: Any = copy.deepcopy(model).requires_grad_(False) if own_weights else model
        self.end_token_ids = tuple(end_token_ids)
        self.batch_size = batch_size
        self._version = -1

    @property
    def policy_version(self) -> int:
        return self._version

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Copy the weights, or, where they are the learner's own, note the version alone."""
        if self.own_weights:
            self._version = -1
            self._copy(weights)
        self._version = version

    @torch.no_grad()
    def _copy(self, weights: NamedWeights) -> None:
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            if name not in own and name not in self.model.state_dict():
                raise EngineError(f"the model has no weight {name!r}")
            if name in own:  # the second name of a tied weight is none of the parameters
                own.pop(name).copy_(weight)
        if own:
            raise EngineError(f"no weights came for {', '.join(sorted(own)[:3])}")

    def close(self) -> None:
        """Nothing is held."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """See :class:`lit_grpo.engines.base.RolloutEngine`."""
        rows = [_Row(r.index, s, r.token_ids, seed) for r in requests for s, seed in enumerate(r.seeds)]
        # Prompts of like length share a batch, which saves padding; samples of a prompt stay side by side.
        rows.sort(key=lambda row: (len(row.prompt), row.request, row.sample))
        for start in range(0, len(rows), self.batch_size):
            try:
                yield from self._decode(rows[start : start + self.batch_size], sampling)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                raise EngineError(
                    f"no memory for {self.batch_size} samples at once: {error}", transient=True
                ) from error

    @torch.no_grad()
    def _decode(self, rows: list[_Row], sampling: Sampling) -> Iterator[Completion]:
        device = next(self.model.parameters()).device
        ends = torch.tensor([*self.end_token_ids, *sampling.stop_token_ids], device=device)
        uniforms = torch.stack([_uniforms(row.seed, sampling.max_new_tokens) for row in rows]).to(device)
        logits, cache, mask, positions = self._prefill(rows, device)
        for step in range(sampling.max_new_tokens):
            ids, logprobs = draw(logits, uniforms[:, step], sampling)
            for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
            ended = torch.isin(ids, ends)
            if step + 1 == sampling.max_new_tokens:
                for row, stop in zip(rows, ended.tolist(), strict=True):
                    yield self._completion(row, "stop" if stop else "length")
                return
            if bool(ended.any()):
                for row, stop in zip(rows, ended.tolist(), strict=True):
                    if stop:
                        yield self._completion(row, "stop")
                alive = (~ended).nonzero()[:, 0]
                if not len(alive):
                    return
                rows = [rows[i] for i in alive.tolist()]
                cache.batch_select_indices(alive)
                ids, uniforms, positions = ids[alive], uniforms[alive], positions[alive]
                mask = None if mask is None else mask[alive]
            positions = positions + 1
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            out = self.model(
                input_ids=ids[:, None], position_ids=positions[:, None], attention_mask=mask, past_key_values=cache
            )
            logits = out.logits[:, -1]

    def _prefill(self, rows: list[_Row], device: torch.device) -> tuple[Tensor, Any, Tensor | None, Tensor]:
        """Run each different prompt once and give every sample its copy: logits [R, V], cache, mask, positions [R]."""
        from transformers import DynamicCache

        prompts = {row.request: row.prompt for row in rows}
        texts = list(prompts.values())
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        seen = torch.zeros(len(texts), longest, dtype=torch.long)
        for i, text in enumerate(texts):  # padded on the left, so that all rows go on at the same place of the cache
            ids[i, longest - len(text) :] = torch.tensor(text)
            seen[i, longest - len(text) :] = 1
        padded = not bool(seen.all())
        ids, seen = ids.to(device), seen.to(device)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=seen if padded else None,
            past_key_values=cache,
            logits_to_keep=1,
        )
        place = {request: i for i, request in enumerate(prompts)}
        index = torch.tensor([place[row.request] for row in rows], device=device)
        cache.batch_select_indices(index)
        return out.logits[index, -1], cache, seen[index] if padded else None, positions[index, -1]

    def _completion(self, row: _Row, reason: Any) -> Completion:
        return Completion(row.request, row.sample, tuple(row.ids), tuple(row.logprobs), reason, self._version)


def _uniforms(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the distribution function.

    Args:
        logits: [R, V].
        uniform: [R] float64 in [0, 1).
        sampling: temperature 0 takes the most likely token.

    Returns:
        ids [R] and the log-probability [R] float32 of each under the distribution it was drawn from (for greedy
        decoding: under the model's own).
    """
    if sampling.temperature == 0.0:
        logprobs = logits.float().log_softmax(1)
        best, ids = logprobs.max(1)
        return ids, best
    logprobs = (logits.float() / sampling.temperature).log_softmax(1)
    if sampling.top_k or sampling.top_p < 1.0:
        logprobs = _restrict(logprobs, sampling).log_softmax(1)
    cumulative = logprobs.double().exp().cumsum(1)
    # Scaled by the actual total and searched strictly to the right, an id of probability 0 can never be drawn.
    ids = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    ids = ids.clamp(max=logits.shape[1] - 1)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def _restrict(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Minus infinity outside the ``top_k`` likeliest ids and outside the smallest set of mass ``top_p``."""
    ordered, order = logprobs.sort(1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1.0:
        before = ordered.exp().cumsum(1) - ordered.exp()
        keep &= before < sampling.top_p
    dropped = ordered.masked_fill(~keep, float("-inf"))
    return torch.empty_like(logprobs).scatter(1, order, dropped)
