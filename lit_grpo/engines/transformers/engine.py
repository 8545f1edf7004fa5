"""Sampling with transformers: works on every device and shares the learner's own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import EngineContext, EngineError, NamedWeights, RouterRecorder
from lit_grpo.engines.config import TransformersEngineConfig
from lit_grpo.engines.stop_strings import stop_strings
from lit_grpo.engines.transformers.choose import choose_decoding
from lit_grpo.engines.transformers.decoding import Decoding, prefill
from lit_grpo.types import Completion, Request, Sampling
from lit_grpo.utils.memory import free_what_is_unused, is_out_of_memory


@dataclass
class _Row:
    """One completion that is being sampled."""

    request: int
    sample: int
    prompt: tuple[int, ...]
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    """Experts of the prompt, then of each token that was fed, [tokens, layers, K] each."""


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
        record_routers: called with the engine's model (the copy, with ``own_weights``); what it returns records which
            experts every token goes through, for the completions. None: nobody asks.
        tokenizer: the policy's, to decode with where ``sampling.stop`` is set. None: it never is set.
    """

    def __init__(
        self,
        model: nn.Module,
        end_token_ids: Sequence[int],
        batch_size: int = 512,
        own_weights: bool = False,
        record_routers: Callable[[nn.Module], RouterRecorder] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, is {batch_size}")
        self.own_weights = own_weights
        self.model: Any = copy.deepcopy(model).requires_grad_(False) if own_weights else model
        self.end_token_ids = tuple(end_token_ids)
        self.batch_size = batch_size
        self.tokenizer = tokenizer
        self.decoding: Decoding | None = None
        """How tokens are decoded; None until the first generation chooses."""
        self._version = -1
        self.routers = None if record_routers is None else record_routers(self.model)

    @classmethod
    def from_context(cls, context: EngineContext, **settings: Any) -> Self:
        """Build the engine of a run; ``settings`` are those of ``TransformersEngineConfig``."""
        config, policy = TransformersEngineConfig(**settings), context.policy
        # A sharded model does not sample: each token would gather every weight, on all ranks alike.
        own_weights = context.beside_learner or policy.sharded
        return cls(
            policy.without_adapters() if own_weights else policy.model,
            context.end_token_ids,
            config.batch_size,
            own_weights=own_weights,
            record_routers=policy.record_router_outputs if context.wants_experts else None,
            tokenizer=context.tokenizer,
        )

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def shares_prompts(self) -> bool | None:
        """Whether the samples of a prompt share its key-value cache; None until the first generation tries it."""
        return None if self.decoding is None else self.decoding == "shared"

    @shares_prompts.setter
    def shares_prompts(self, shares: bool) -> None:
        self.decoding = "shared" if shares else "copies"

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
            # The second name of a tied weight is none of the parameters.
            if name in own:
                own.pop(name).copy_(weight)
        if own:
            raise EngineError(f"no weights came for {', '.join(sorted(own)[:3])}")

    def close(self) -> None:
        """Stop listening to routers; nothing else is held."""
        if self.routers is not None:
            self.routers.remove()
            self.routers = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """See :class:`lit_grpo.engines.base.RolloutEngine`."""
        rows = [_Row(r.index, s, r.token_ids, seed) for r in requests for s, seed in enumerate(r.seeds)]
        # Prompts of like length share a batch, which saves padding; samples of a prompt stay side by side.
        rows.sort(key=lambda row: (len(row.prompt), row.request, row.sample))
        was_training = self.model.training
        # Gradient checkpointing, on in training mode, would drop the key-value cache.
        self.model.eval()
        try:
            if self.decoding is None:
                self.decoding = choose_decoding(self.model)
            for batch in self._batches(rows):
                yield from self._decode(batch, sampling)
        except Exception as error:
            # On a CPU it is a plain RuntimeError.
            if not is_out_of_memory(error):
                raise
            free_what_is_unused(self.model.device)
            raise EngineError(f"no memory for {self.batch_size} samples at once: {error}", transient=True) from error
        finally:
            self.model.train(was_training)

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Cut rows, sorted by length, into batches; of one length each where padding is not exact."""
        apart = self.decoding == "equal"
        for _, alike in groupby(rows, key=lambda row: len(row.prompt) if apart else 0):
            members = list(alike)
            for start in range(0, len(members), self.batch_size):
                yield members[start : start + self.batch_size]

    @torch.no_grad()
    def _decode(self, rows: list[_Row], sampling: Sampling) -> Iterator[Completion]:
        device = next(self.model.parameters()).device
        ends = torch.tensor([*self.end_token_ids, *sampling.stop_token_ids], device=device)
        stops = stop_strings(sampling, self.tokenizer)
        uniforms = torch.stack([_uniforms(row.seed, sampling.max_new_tokens) for row in rows]).to(device)
        prompts = {row.request: row.prompt for row in rows}
        number = {request: i for i, request in enumerate(prompts)}
        group = [number[row.request] for row in rows]
        assert self.decoding is not None
        logits, cache, positions = prefill(self.model, list(prompts.values()), group, self.decoding, self.routers)
        _record(rows, cache.experts)
        for step in range(sampling.max_new_tokens):
            ids, logprobs = draw(logits, uniforms[:, step], sampling)
            for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
            ended = torch.isin(ids, ends)
            if stops is not None:
                found = [stops.end(row.ids, start=step) is not None for row in rows]
                ended |= torch.tensor(found, device=device)
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
                cache.keep(alive)
                ids, uniforms, positions = ids[alive], uniforms[alive], positions[alive]
            positions = positions + 1
            logits = cache.step(ids, positions)
            _record(rows, cache.experts)

    def _completion(self, row: _Row, reason: Any) -> Completion:
        experts = torch.cat(row.experts) if row.experts else None
        ids, logprobs = tuple(row.ids), tuple(row.logprobs)
        return Completion(row.request, row.sample, ids, logprobs, reason, self._version, experts)


def _record(rows: list[_Row], experts: list[Tensor]) -> None:
    for row, chosen in zip(rows, experts, strict=True) if experts else ():
        row.experts.append(chosen)


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
    scaled = logits.float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        scaled = _restrict(scaled.log_softmax(1), sampling)
    highest = scaled.max(1, keepdim=True).values
    mass = (scaled - highest).exp_()
    # First the block of ids, then the id within it: only one block a row is added up id by id and in float64.
    blocks = nn.functional.pad(mass, (0, -mass.shape[1] % _BLOCK)).view(len(mass), -1, _BLOCK)
    sums = blocks.sum(2).double()  # [R, blocks]
    upto = sums.cumsum(1)
    total = upto[:, -1:]
    # Searched strictly to the right, and strictly below the end: an id of probability 0 is never drawn.
    aim = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(upto, aim, right=True).clamp_(max=upto.shape[1] - 1)
    before = (upto - sums).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(1)
    end = inside[:, -1:]
    aim_inside = torch.minimum((aim - before).clamp_(min=0.0), torch.nextafter(end, torch.zeros_like(end)))
    ids = block * _BLOCK + torch.searchsorted(inside, aim_inside, right=True)
    # Logits that are NaN lead anywhere, also past the end.
    ids = ids.clamp_(max=logits.shape[1] - 1)
    return ids[:, 0], (scaled.gather(1, ids) - highest - total.log().float())[:, 0]


_BLOCK = 256
"""Ids whose probabilities are added up before one of them is looked for."""


def _restrict(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Set ids to minus infinity outside the ``top_k`` likeliest and outside the smallest set of mass ``top_p``."""
    ordered, order = logprobs.sort(1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1.0:
        before = ordered.exp().cumsum(1) - ordered.exp()
        keep &= before < sampling.top_p
    dropped = ordered.masked_fill(~keep, float("-inf"))
    return torch.empty_like(logprobs).scatter(1, order, dropped)
