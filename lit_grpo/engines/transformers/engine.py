"""Sampling with transformers: works on every device and shares the learner's own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from lit_grpo.engines.base import EngineContext, EngineError, NamedWeights, RouterRecorder
from lit_grpo.engines.config import TransformersEngineConfig
from lit_grpo.engines.stop_strings import stop_strings
from lit_grpo.engines.transformers.kv_cache import GroupCache, attention
from lit_grpo.types import Completion, Request, Sampling


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
        self.shares_prompts: bool | None = None
        """Whether the samples of a prompt share its key-value cache; None until the first generation tries it."""
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
            for start in range(0, len(rows), self.batch_size):
                yield from self._decode(rows[start : start + self.batch_size], sampling)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise EngineError(f"no memory for {self.batch_size} samples at once: {error}", transient=True) from error
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def _decode(self, rows: list[_Row], sampling: Sampling) -> Iterator[Completion]:
        device = next(self.model.parameters()).device
        ends = torch.tensor([*self.end_token_ids, *sampling.stop_token_ids], device=device)
        stops = stop_strings(sampling, self.tokenizer)
        uniforms = torch.stack([_uniforms(row.seed, sampling.max_new_tokens) for row in rows]).to(device)
        if self.shares_prompts is None:
            self.shares_prompts = self._can_share()
        logits, cache, positions = self._prefill(rows, device, share=self.shares_prompts)
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
            if self.routers is not None:
                for row, experts in zip(rows, self.routers.recorded().cpu().split(1), strict=True):
                    row.experts.append(experts)

    def _prefill(self, rows: list[_Row], device: torch.device, *, share: bool) -> tuple[Tensor, _Cache, Tensor]:
        """Run each different prompt once for all its samples.

        Args:
            rows: the samples, those of a prompt side by side.
            device: device of the model.
            share: let the samples of a prompt share its cache, or give each a copy.

        Returns:
            Logits [R, V] of every sample's next token, the cache that decoding goes on with, and the position [R] of
            every sample's last token.
        """
        from transformers import DynamicCache

        prompts = {row.request: row.prompt for row in rows}
        texts = list(prompts.values())
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        seen = torch.zeros(len(texts), longest, dtype=torch.long)
        # Padded on the left, so that all rows go on at the same position of the cache.
        for i, text in enumerate(texts):
            ids[i, longest - len(text) :] = torch.tensor(text)
            seen[i, longest - len(text) :] = 1
        padded = not bool(seen.all())
        ids, seen = ids.to(device), seen.to(device)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        cache: Any = DynamicCache(config=self.model.config)
        with _eagerly(self.model):
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=seen if padded else None,
                past_key_values=cache,
                logits_to_keep=1,
            )
        prompt_number = {request: i for i, request in enumerate(prompts)}
        group = [prompt_number[row.request] for row in rows]
        if self.routers is not None:
            seen_experts = self.routers.recorded().cpu().unflatten(0, ids.shape)
            for row, i in zip(rows, group, strict=True):
                row.experts.append(seen_experts[i, longest - len(row.prompt) :])
        index = torch.tensor(group, device=device)
        mask = seen if padded else None
        decoding: _Cache
        if share:
            layers = [(layer.keys, layer.values) for layer in cache.layers]
            decoding = _SharedPrompts(self.model, GroupCache(layers, mask, group))
        else:
            decoding = _Copies(self.model, cache, mask, index)
        return out.logits[index, -1], decoding, positions[index, -1]

    @torch.no_grad()
    def _can_share(self) -> bool:
        """Return whether the model gives the same through a :class:`GroupCache` as through its own cache.

        It is tried on a few tokens.
        """
        from lightning.pytorch.utilities.rank_zero import rank_zero_info
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=self.model.config).layers):
            # Sliding windows or linear attention.
            return False
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        device = next(self.model.parameters()).device
        rows = [_Row(i, s, (1 % vocabulary, 2 % vocabulary)[: i + 1], 0) for i in range(2) for s in range(2)]
        outcomes = []
        try:
            for share in (False, True):
                _, cache, positions = self._prefill(rows, device, share=share)
                for token in (3, 4):
                    positions = positions + 1
                    ids = (torch.arange(len(rows), device=device) + token) % vocabulary
                    logits = cache.step(ids, positions)
                outcomes.append(logits.float().log_softmax(1))
        except (NotImplementedError, KeyError, TypeError, AttributeError) as error:
            rank_zero_info(f"Sampling keeps a copy of the prompt's cache for every completion: {error!r}.")
            return False
        gap = float((outcomes[0] - outcomes[1]).abs().max())
        if not gap <= (1e-3 if logits.dtype == torch.float32 else 0.1):
            rank_zero_info(
                "Sampling keeps a copy of the prompt's cache for every completion, since with a shared one "
                f"log-probabilities differ by {gap:.2g}."
            )
            return False
        return True

    def _completion(self, row: _Row, reason: Any) -> Completion:
        experts = torch.cat(row.experts) if row.experts else None
        ids, logprobs = tuple(row.ids), tuple(row.logprobs)
        return Completion(row.request, row.sample, ids, logprobs, reason, self._version, experts)


class _Cache(Protocol):
    """The keys and values that decoding goes on with."""

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Feed one more token [R] of every row at its position [R], and return the next logits [R, V]."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows."""


class _SharedPrompts:
    """One cache for each prompt, which its samples share."""

    def __init__(self, model: Any, groups: GroupCache) -> None:
        self.model, self.groups = model, groups

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.groups.make_room()
        with attention(self.model), _eagerly(self.model):
            out = self.model(
                input_ids=ids[:, None],
                position_ids=positions[:, None],
                past_key_values=self.groups,
                groups=self.groups,
            )
        self.groups.length += 1
        return out.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.groups.keep(rows)


class _Copies:
    """A cache row for every sample, prompt included, for models that do not attend to all positions alike."""

    def __init__(self, model: Any, cache: Any, mask: Tensor | None, index: Tensor) -> None:
        self.model, self.cache = model, cache
        self.mask = None if mask is None else mask[index]
        cache.batch_select_indices(index)

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], 1)
        with _eagerly(self.model):
            out = self.model(
                input_ids=ids[:, None],
                position_ids=positions[:, None],
                attention_mask=self.mask,
                past_key_values=self.cache,
            )
        return out.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = None if self.mask is None else self.mask[rows]


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Run blocks uncompiled that were compiled for the learner."""
    # Decoding has another shape at every step, and another attention: each would be compiled anew. The policy has the
    # same as compiling.eagerly, which engines may not import.
    if any(part._compiled_call_impl is not None for part in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


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
