"""The policy: per-token log-probabilities and entropies of a causal language model, full logits never held."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_grpo.distributed.sharding import dtype_of, gathered, is_sharded, reshard
from lit_grpo.errors import UserError
from lit_grpo.policy.forward.attention import NAMES
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.head import head_stats
from lit_grpo.policy.forward.routing import Routers
from lit_grpo.policy.model import lora
from lit_grpo.policy.model.compiling import eagerly, is_compiled
from lit_grpo.policy.model.quantization import keep_base_out_of_checkpoints

EntropyMode = Literal["none", "detached", "grad"]
ValueMode = Literal["none", "head", "trunk"]
"""No values, or with a gradient that ends at the value head, or one that goes on into the trunk."""


@dataclass
class TokenStats:
    """What one forward pass says of each completion token, [n, T], 0 where there is no token."""

    logprobs: Tensor
    """Of the sampled tokens at the sampling temperature, float32."""
    entropy: Tensor | None
    """Of the whole next-token distribution at temperature 1, in nats, float32."""
    sum_squared_probs: Tensor | None = None
    """Sum over the vocabulary of pi squared at the sampling temperature, detached, float32."""
    router_logscores: Tensor | None = None
    """Log-probabilities of the chosen experts, over all experts of the layer, [n, T, layers, K], detached, float32."""
    router_experts: Tensor | None = None
    """The chosen experts, [n, T, layers, K] int64."""
    routing: Tensor | None = None
    """The experts of every token that went through the model, [tokens, layers, K] int16."""
    values: Tensor | None = None
    """Value head's value of the state before each token, float32."""


# FSDP2 of an older torch looks for a pass's tensors in pytrees alone: a value head that learns alone would stand still.
torch.export.register_dataclass(TokenStats)


class Policy(nn.Module):
    """A causal language model from transformers, seen as a policy.

    Dropout is switched off for good: with it the ratio of the first update would not be 1.

    Args:
        model: a ``*ForCausalLM`` of transformers.
        logits_chunk: completion tokens whose logits are held at once; None: as many as make 2**26 logits (256 MiB in
            float32), compiled 2**28 (512 MiB in bfloat16).
        value_head: [M, D] states -> [M] values, for a critic that shares the model's trunk. It is no part of ``model``:
            engines and exported folders know nothing of it.
    """

    model: Any

    def __init__(self, model: nn.Module, logits_chunk: int | None = None, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.value_head: Any = value_head
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        self.compiled = is_compiled(model)
        # Compiled, no float32 copies are made of them, and larger products are faster.
        self.logits_chunk = logits_chunk or max(1, 2 ** (28 if self.compiled else 26) // vocabulary)
        switch_off_dropout(model)
        self._routers: Routers | None = None
        keep_base_out_of_checkpoints(self)

    @property
    def sharded(self) -> bool:
        """Whether its weights are in shards, see :mod:`lit_grpo.distributed.sharding`."""
        return is_sharded(self)

    @property
    def routes(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(getattr(self.model.config.get_text_config(), "num_experts_per_tok", None))

    def forward(
        self,
        batch: PolicyInput,
        temperature: float = 1.0,
        entropy: EntropyMode = "detached",
        *,
        squares: bool = False,
        experts: Tensor | Literal["active"] | None = None,
        routing: Tensor | Literal["seen"] | None = None,
        values: ValueMode = "none",
        frozen: bool = False,
    ) -> TokenStats:
        """Log-probability (and entropy) of every completion token of the micro-batch.

        The head is applied to ``logits_chunk`` tokens at a time and recomputed in the backward pass, so memory does not
        grow with completion tokens times vocabulary.

        Args:
            batch: see :class:`PolicyInput`.
            temperature: logits are divided by it for ``logprobs``; the entropy is that of temperature 1.
            entropy: leave it out, compute it without gradient, or with.
            squares: also the sum of squared probabilities.
            experts: also the router's scores, for the experts that are ``active`` now or for given ones
                [n, T, layers, K]; mixture-of-experts models only.
            routing: also which experts every token goes through, ``seen`` or, [tokens, layers, K], given.
            values: also those of the value head, from the same states.
            frozen: no gradient but that of the value head.
        """
        if routing is not None and self._routers is None:
            self._routers = Routers(self.model)
        if self._routers is not None:
            self._routers.given = routing if isinstance(routing, Tensor) else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            states, router = hidden_states(self.model.base_model, batch, router=experts is not None)
            hidden = states.flatten(0, 1)[batch.source]  # [M, D]
            stats = self._token_stats(batch, hidden, temperature, entropy, squares)
            if routing is not None:
                assert self._routers is not None
                stats.routing = self._routers.seen()
            if experts is not None:
                stats.router_logscores, stats.router_experts = self._router_scores(batch, router, experts)
        if values != "none":
            stats.values = self._values(batch, hidden if values == "trunk" else hidden.detach())
        return stats

    def values(self, batch: PolicyInput) -> Tensor:
        """The value head's values alone, [n, T]: the same trunk, without the pass over the vocabulary."""
        if self._routers is not None:
            self._routers.given = None
        states, _ = hidden_states(self.model.base_model, batch)
        return self._values(batch, states.flatten(0, 1)[batch.source])

    def _values(self, batch: PolicyInput, hidden: Tensor) -> Tensor:
        if self.value_head is None:
            raise RuntimeError("this policy has no value head")
        return batch.scatter(self.value_head(hidden))

    def _token_stats(
        self, batch: PolicyInput, hidden: Tensor, temperature: float, entropy: EntropyMode, squares: bool
    ) -> TokenStats:
        """Everything that needs logits, of hidden states [M, D]."""
        logprobs, entropies, squared = head_stats(
            self.model.get_output_embeddings(),
            hidden,
            batch.target,
            temperature,
            entropy=entropy != "none",
            entropy_gradient=entropy == "grad",
            squares=squares,
            chunk=self.logits_chunk,
            compiled=self.compiled,
        )
        return TokenStats(
            logprobs=batch.scatter(logprobs),
            entropy=None if entropy == "none" else batch.scatter(entropies),
            sum_squared_probs=batch.scatter(squared.detach()) if squares else None,
        )

    @torch.no_grad()
    def _router_scores(
        self, batch: PolicyInput, router: list[Tensor], experts: Tensor | Literal["active"]
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts, both [n, T, layers, K]; 0 where there is no token."""
        logits = torch.stack([layer.flatten(0, -2)[batch.source] for layer in router], 1)  # [M, layers, experts]
        scores = logits.float().log_softmax(-1)
        if isinstance(experts, Tensor):
            chosen = experts[batch.row, batch.column]  # [M, layers, K]
        else:
            chosen = scores.topk(int(self.model.config.get_text_config().num_experts_per_tok)).indices
        place = (batch.row, batch.column)
        out = scores.new_zeros(*batch.shape, *chosen.shape[1:]).index_put(place, scores.gather(-1, chosen))
        return out, chosen.new_zeros(*batch.shape, *chosen.shape[1:]).index_put(place, chosen)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(transformers name, full tensor) one at a time; sharded ones are gathered block by block, in ``param_dtype``.

        Adapters come merged into the weights that they change, under those weights' names, each gathered when its turn
        comes and merged in the precision that it is held in; the training weights stay.
        """
        if self.sharded and not lora.has_adapters(self.model):
            own = ((name.partition("."), weight) for name, weight in gathered(self))
            yield from ((name, weight) for (child, _, name), weight in own if child == "model")
            return
        reshard(self)
        parameters = dict(self.model.named_parameters())
        yield from lora.merged(parameters, lora.scaling(self.model) if lora.has_adapters(self.model) else 0.0)

    def without_adapters(self) -> nn.Module:
        """The model, or, if it has adapters, a copy with them merged in: ``named_weights`` fit into it.

        Of a sharded policy a whole model with weights that mean nothing yet.
        """
        if is_sharded(self):
            return self._whole_model()
        return lora.without_adapters(self.model) if lora.has_adapters(self.model) else self.model

    def listen(self, model: nn.Module) -> Routers:
        """The routers of an engine's model, which may be a copy of the policy's, for the engine to listen to."""
        return Routers(model)

    def free_routers(self) -> None:
        """Let the routers choose again, also where others run the model."""
        if self._routers is not None:
            self._routers.given = None

    def _whole_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        weight: Any = next(self.model.parameters())
        device, dtype = torch.device(weight.device_mesh.device_type), dtype_of(self)
        with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []), device:
            config = copy.deepcopy(self.model.config)
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=config._attn_implementation
            )
        return model.eval().requires_grad_(False)

    @torch.no_grad()
    def check(self, layout: Layout, *, replay: bool = False) -> None:
        """Hold the short cuts of this class to the model's own forward pass, on a few tokens.

        Args:
            layout: of the micro-batches; completions must see nothing of each other in it.
            replay: routers that are told what they choose anyway must come to the same.

        Raises:
            UserError: the model's logits are not simply ``head(last hidden state)`` (soft-capping, logit scale), or it
                does not keep to a given attention mask (linear attention, sliding windows).
        """
        with eagerly() if self.compiled else nullcontext():  # not worth the wait for a compiler
            self._check(layout, replay)

    def _check(self, layout: Layout, replay: bool) -> None:
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        prompt, completions = (1 % vocabulary, 2 % vocabulary), [(3 % vocabulary, 0), (5 % vocabulary, 3 % vocabulary)]
        device = next(self.model.parameters()).device
        expected = []
        for completion in completions:
            ids = torch.tensor([[*prompt, *completion]], device=device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, 1:-1].float()
            expected.append(logits.log_softmax(1).gather(1, ids[0, 2:, None])[:, 0])
        name = type(self.model).__name__
        tolerance = 0.05 if self.model.dtype == torch.bfloat16 else 1e-3
        for form in dict.fromkeys((Layout(pack=False, share=False), layout)):
            rows = form.build([prompt] * 2, completions, width=2, device=device)
            found = self.forward(rows, entropy="none").logprobs
            gap = float((found - torch.stack(expected)).abs().max())
            if gap > tolerance or gap != gap:
                plain = not form.pack and not form.share
                keys = [key for key, on in (("pack", form.pack), ("share_prompts", form.share)) if on]
                raise UserError(
                    f"{name} cannot be trained like this: log-probabilities computed for "
                    f"{'padded' if plain else 'packed' if form.pack else 'shared'} rows differ from the model's own by "
                    f"{gap:.3g}",
                    where=f"model.policy.{keys[0]}" if keys else "model.policy",
                    remedy="models that change their logits after the output layer are not supported yet"
                    if plain
                    else "set " + ", ".join(f"{key}: false" for key in keys),
                )
        if replay:
            rows = layout.build([prompt] * 2, completions, width=2, device=device)
            free = self.forward(rows, entropy="none", routing="seen")
            assert free.routing is not None
            told = self.forward(rows, entropy="none", routing=free.routing.long())
            self.free_routers()
            if not float((free.logprobs - told.logprobs).abs().max()) <= tolerance:
                raise UserError(
                    f"the routers of {name} compute the weights of their experts in a way that is not known",
                    where="model.routing_replay",
                    remedy="set routing_replay: none",
                )


def hidden_states(base: Any, batch: PolicyInput, *, router: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Last hidden states of a base model, [B, S, D], final norm applied; and each layer's router logits if wanted."""
    mask = batch.attention_mask
    options: dict[str, Any] = {}
    if batch.segments is not None:
        implementation = base.config._attn_implementation
        if implementation == NAMES["varlen"]:
            _ = batch.segments.cumulative(), batch.segments.asks_for_gqa  # made here: compiled blocks only read them
        if implementation in NAMES.values():
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)  # keeps it from making one
            options["segments"] = batch.segments
        elif implementation == "flash_attention_2":
            _, lengths, _, longest, _ = batch.segments.cumulative()
            options |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            options |= {"max_length_q": longest, "max_length_k": longest}
        else:
            mask = batch.segments.mask()
    if mask is not None and base.config._attn_implementation == "eager":  # adds its mask to the scores
        mask = torch.where(mask, 0.0, torch.finfo(base.dtype).min).to(base.dtype)
    if router:
        options["output_router_logits"] = True
    out = base(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=mask,
        use_cache=False,
        **options,
    )
    return out.last_hidden_state, list(out.router_logits) if router else []


def switch_off_dropout(model: nn.Module) -> None:
    """For good: also in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _clear_rates(module)  # copies of what the configuration says, for functional dropout
    if (config := getattr(model, "config", None)) is not None:
        _clear_rates(config)


def _clear_rates(owner: Any) -> None:
    # attention_dropout, residual_dropout, embd_pdrop, layerdrop: every family has names of its own.
    for name, value in list(vars(owner).items()):
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
