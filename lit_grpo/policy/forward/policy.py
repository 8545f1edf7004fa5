"""The policy: per-token log-probabilities and entropies of a causal language model, without holding all logits."""

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
from lit_grpo.policy.forward.attention import NAMES, masks_by_layer_type, probe_ids
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.head import head_stats
from lit_grpo.policy.forward.logits import OwnLogits, changes_logits
from lit_grpo.policy.forward.onednn import use_onednn
from lit_grpo.policy.forward.routing import Routers
from lit_grpo.policy.model import lora
from lit_grpo.policy.model.compiling import eagerly, is_compiled, mark_varying
from lit_grpo.policy.model.quantization import keep_base_out_of_checkpoints
from lit_grpo.types import WeightForm
from lit_grpo.utils.windows import narrowed

EntropyMode = Literal["none", "detached", "grad"]
ValueMode = Literal["none", "head", "backbone"]
"""Whether values are computed, and where their gradient ends: at the value head, or in the backbone below it."""


@dataclass
class TokenStats:
    """Numbers that one forward pass gives for each completion token: [n, T], 0 where there is no token."""

    logprobs: Tensor
    """Log-probabilities of the sampled tokens at the sampling temperature, float32."""
    entropy: Tensor | None
    """Entropy of the whole next-token distribution at temperature 1, in nats, float32."""
    sum_squared_probs: Tensor | None = None
    """Sum over the vocabulary of pi squared at the sampling temperature, detached, float32."""
    router_logscores: Tensor | None = None
    """Log-probabilities of the chosen experts, over all experts of the layer, [n, T, layers, K], detached, float32."""
    router_experts: Tensor | None = None
    """The chosen experts, [n, T, layers, K] int64."""
    routing: Tensor | None = None
    """The experts of every token that went through the model, [tokens, layers, K] int16."""
    values: Tensor | None = None
    """The value head's value of the state before each token, float32."""


# FSDP2 of an older torch finds the outputs of a forward pass in pytrees alone. Without this line a value head that
# learns alone gets no gradient there.
torch.export.register_dataclass(TokenStats)


class Policy(nn.Module):
    """A causal language model of transformers that gives log-probabilities of completions.

    Dropout is switched off for good: with it the ratio of the first update would not be 1.

    Args:
        model: a ``*ForCausalLM`` of transformers.
        logits_chunk: completion tokens whose logits are held at once; None: as many as make 2**26 logits (256 MiB in
            float32), compiled 2**28 (512 MiB in bfloat16).
        value_head: [M, D] states -> [M] values, for a critic that shares the model's backbone. It is no part of
            ``model``, so that engines and exported folders do not get it.
    """

    model: Any

    def __init__(self, model: nn.Module, logits_chunk: int | None = None, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.value_head: Any = value_head
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        self.compiled = is_compiled(model)
        # Compiled code makes no float32 copies of the logits, so more of them fit, and larger products are faster.
        self.logits_chunk = logits_chunk or max(1, 2 ** (28 if self.compiled else 26) // vocabulary)
        switch_off_dropout(model)
        use_onednn(model)
        self._routers: Routers | None = None
        base = backbone(model)
        self._own_logits = OwnLogits(model, base) if changes_logits(model, base) else None
        keep_base_out_of_checkpoints(self)

    @property
    def sharded(self) -> bool:
        """Whether the weights are in shards, see :mod:`lit_grpo.distributed.sharding`."""
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
        routing: Tensor | Literal["recorded"] | None = None,
        values: ValueMode = "none",
        frozen: bool = False,
    ) -> TokenStats:
        """Compute log-probability (and entropy) of every completion token of the micro-batch.

        The head is applied to ``logits_chunk`` tokens at a time and recomputed in the backward pass, so memory does not
        grow with completion tokens times vocabulary.

        Args:
            batch: the micro-batch, in any layout.
            temperature: divides the logits for ``logprobs``; the entropy is that of temperature 1.
            entropy: whether to leave it out, compute it without gradient, or with.
            squares: whether to sum the squared probabilities too.
            experts: experts whose router scores are returned too, for mixture-of-experts models: those that are
                ``active`` now, or given ones [n, T, layers, K]; None: no scores.
            routing: experts that every token goes through, which are then returned too. ``recorded``: the routers
                choose them; a tensor [tokens, layers, K]: they are replayed; None: the routers choose, unrecorded.
            values: whether to return values of the value head from the same states, and where their gradient ends.
            frozen: whether the value head alone gets a gradient.
        """
        if routing is not None and self._routers is None:
            self._routers = Routers(self.model)
        if self._routers is not None:
            self._routers.replay = routing if isinstance(routing, Tensor) else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            # The base model, not the causal one: that would make logits for every token, prompts included.
            states, router = hidden_states(backbone(self.model), batch, router=experts is not None)
            hidden = states.flatten(0, 1)[batch.source]  # [M, D]
            stats = self._token_stats(batch, hidden, temperature, entropy, squares)
            if routing is not None:
                assert self._routers is not None
                stats.routing = self._routers.recorded()
            if experts is not None:
                stats.router_logscores, stats.router_experts = self._router_scores(batch, router, experts)
        if values != "none":
            stats.values = self._values(batch, hidden if values == "backbone" else hidden.detach())
        return stats

    def values(self, batch: PolicyInput) -> Tensor:
        """Compute the value head's values alone, [n, T]: the same backbone, without the pass over the vocabulary."""
        if self._routers is not None:
            self._routers.replay = None
        states, _ = hidden_states(backbone(self.model), batch)
        return self._values(batch, states.flatten(0, 1)[batch.source])

    def _values(self, batch: PolicyInput, hidden: Tensor) -> Tensor:
        if self.value_head is None:
            raise RuntimeError("this policy has no value head")
        return batch.scatter(self.value_head(hidden))

    def _token_stats(
        self, batch: PolicyInput, hidden: Tensor, temperature: float, entropy: EntropyMode, squares: bool
    ) -> TokenStats:
        logprobs, entropies, squared = head_stats(
            self._own_logits or self.model.get_output_embeddings(),
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
        """Return log-scores and ids of experts, both [n, T, layers, K]; 0 where there is no token."""
        logits = torch.stack([layer.flatten(0, -2)[batch.source] for layer in router], 1)  # [M, layers, experts]
        scores = logits.float().log_softmax(-1)
        if isinstance(experts, Tensor):
            chosen = experts[batch.row, batch.column]  # [M, layers, K]
        else:
            chosen = scores.topk(int(self.model.config.get_text_config().num_experts_per_tok)).indices
        index = (batch.row, batch.column)
        out = scores.new_zeros(*batch.shape, *chosen.shape[1:]).index_put(index, scores.gather(-1, chosen))
        return out, chosen.new_zeros(*batch.shape, *chosen.shape[1:]).index_put(index, chosen)

    def named_weights(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, full tensor) one at a time, without ever holding the whole model.

        Sharded weights are gathered block by block, in ``param_dtype``. Adapters come merged into the weights that they
        change, under the names of those, in the precision that they are held in; what is trained stays as it is.

        Args:
            form: whether adapters come merged, behind the weights below them, or alone: ``<layer>.lora_A.weight``
                [rank, in] and ``<layer>.lora_B.weight`` [out, rank], B multiplied by alpha / rank.

        Raises:
            ValueError: adapters are asked for, and there are none.
        """
        if form != "merged" and not lora.has_adapters(self.model):
            raise ValueError(f"{type(self.model).__name__} has no adapters")
        if self.sharded and not lora.has_adapters(self.model):
            # Names of this module begin with "model."; a value head is no part of the model.
            split = ((name.partition("."), weight) for name, weight in gathered(self))
            yield from ((name, weight) for (child, _, name), weight in split if child == "model")
            return
        reshard(self)
        parameters = dict(self.model.named_parameters())
        if form == "merged":
            yield from lora.merged(parameters, lora.scaling(self.model) if lora.has_adapters(self.model) else 0.0)
            return
        if form == "apart":
            yield from lora.below(parameters)
        yield from lora.adapters(parameters, lora.scaling(self.model))

    def without_adapters(self) -> nn.Module:
        """Return the model that ``named_weights`` fit into: its own, or a copy with its adapters merged in.

        For a sharded policy it is a new whole model, whose weights mean nothing until they are loaded.
        """
        if is_sharded(self):
            return self._whole_model()
        return lora.without_adapters(self.model) if lora.has_adapters(self.model) else self.model

    def record_router_outputs(self, model: nn.Module) -> Routers:
        """Record which experts an engine's model, often a copy of the policy's, chooses while it samples."""
        return Routers(model)

    def stop_replay(self) -> None:
        """Let the routers choose again: an engine that samples from this very model must not replay old choices."""
        if self._routers is not None:
            self._routers.replay = None

    def _whole_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        weight: Any = next(self.model.parameters())
        device, dtype = torch.device(weight.device_mesh.device_type), dtype_of(self)
        # Initial weights are drawn and then replaced; the run's own random numbers must not depend on that.
        with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []), device:
            config = copy.deepcopy(self.model.config)
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=config._attn_implementation
            )
        return model.eval().requires_grad_(False)

    @torch.no_grad()
    def verify_against_model_forward(self, layout: Layout, *, replay: bool = False) -> None:
        """Compare log-probabilities of a few tokens with those of the model's own forward pass.

        The model computes logits for every position of every row. This class applies the head to the states that
        predict a completion token, and lets rows hold several completions: right for most models, not for all.

        Args:
            layout: the one that micro-batches are built in; completions must see nothing of each other in it.
            replay: whether to check also that replaying the experts that routers chose gives the same numbers.

        Raises:
            UserError: the model's logits are not simply ``head(last hidden state)`` (soft-capping, logit scale), it
                does not keep to a given attention mask (linear attention, sliding windows), or the weights of its
                experts are computed in an unknown way.
        """
        # A few tokens are not worth the wait for a compiler.
        with eagerly() if self.compiled else nullcontext():
            self._verify(layout, replay)

    def _verify(self, layout: Layout, replay: bool) -> None:
        config = self.model.config.get_text_config()
        padded = Layout(pack=False, share=False)
        # What lies outside of a window has to be left out: only a longer prompt shows it, so windows are narrowed.
        with narrowed(self.model):
            for reach in (False, True):
                prompt, completions = probe_ids(config, reach)
                if prompt:
                    expected = self._own_logprobs(prompt, completions)
                    tolerance = self._tolerance(prompt, completions, expected)
                    for form in dict.fromkeys((padded, layout)):
                        self._compare(form, prompt, completions, expected, tolerance)
        self._refuse_both_ways(*probe_ids(config))
        if replay:
            self._verify_replay(layout, *probe_ids(config))

    def _own_logprobs(self, prompt: tuple[int, ...], completions: list[tuple[int, ...]]) -> Tensor:
        """Return what the model's own forward pass says of each completion alone, [2, T]."""
        out = torch.zeros(len(completions), max(map(len, completions)))
        for row, completion in enumerate(completions):
            ids = torch.tensor([[*prompt, *completion]], device=self._device)
            try:
                logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            except (UserError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                first = str(error).strip().partition("\n")[0][:200]
                raise UserError(
                    f"{type(self.model).__name__} cannot run its own forward pass on {ids.shape[1]} tokens "
                    f"({type(error).__name__}: {first})",
                    where="model.policy.path",
                    remedy="correct its config.json, or set attention: sdpa"
                    if self.model.config._attn_implementation == "eager"
                    else "correct its config.json, or set attention: eager",
                ) from error
            out[row, : len(completion)] = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        return out

    def _tolerance(self, prompt: tuple[int, ...], completions: list[tuple[int, ...]], expected: Tensor) -> float:
        """Return the largest gap that is rounding.

        Weights as they are initialised hardly look at what is before a token, and a wrong mask then changes little: the
        yardstick is what another prompt changes.
        """
        if self.model.dtype == torch.bfloat16:
            return 0.05
        other = (*prompt[:-1][::-1], prompt[-1])
        moved = float((self._own_logprobs(other, completions) - expected).abs().max())
        return min(1e-3, max(2e-5, 1e-2 * moved))

    def _refuse_both_ways(self, prompt: tuple[int, ...], completions: list[tuple[int, ...]]) -> None:
        """Refuse a model whose tokens see those after them: it has no log-probability of a completion."""
        if len(prompt) < 2:
            return
        states = []
        for last in (completions[1][0], completions[1][1]):
            ids = torch.tensor([[*prompt, last]], device=self._device)
            states.append(self.model(input_ids=ids, use_cache=False).logits[0, 0].float().log_softmax(0))
        if not float((states[0] - states[1]).abs().max()) <= (0.05 if self.model.dtype == torch.bfloat16 else 1e-4):
            raise UserError(
                f"{type(self.model).__name__} lets tokens see those after them, so it cannot write from left to right",
                where="model.policy.path",
                remedy="set is_decoder: true in the model's config.json if it was trained so, or give a causal "
                "language model",
            )

    @property
    def _device(self) -> torch.device:
        weight: Tensor = next(self.model.parameters())
        return weight.device

    def _gap(self, one: Tensor, other: Tensor) -> float:
        """Return by how many nats two ways to compute a few log-probabilities differ."""
        gaps = (one - other).abs()
        # Logits of 16 and more have steps of 0.125 in bfloat16, so a single token says little.
        return float(gaps.mean() if self.model.dtype == torch.bfloat16 else gaps.max())

    def _compare(
        self,
        form: Layout,
        prompt: tuple[int, ...],
        completions: list[tuple[int, ...]],
        expected: Tensor,
        tolerance: float,
    ) -> None:
        rows = form.build([prompt] * len(completions), completions, width=expected.shape[1], device=self._device)
        padded = not form.pack and not form.share
        name = "padded" if padded else "packed" if form.pack else "shared"
        why: Exception | None = None
        try:
            logprobs = self.forward(rows, entropy="none").logprobs
            gap = self._gap(logprobs, expected.to(logprobs.device))
            what = f"log-probabilities computed for {name} rows differ from the model's own by {gap:.3g}"
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # The code of a family may fail on a mask or an option in as many ways as there are families.
            first = str(error).strip().partition("\n")[0][:200]
            gap, why, what = float("nan"), error, f"it cannot compute {name} rows ({type(error).__name__}: {first})"
        # Written so that NaN, which compares false, is refused too.
        if not gap <= tolerance:
            keys = [key for key, on in (("pack", form.pack), ("share_prompts", form.share)) if on]
            raise UserError(
                f"{type(self.model).__name__} cannot be trained like this: {what}",
                where=f"model.policy.{keys[0]}" if keys else "model.policy",
                remedy="give a model whose log-probabilities follow from its backbone's states"
                if padded
                else "set " + ", ".join(f"{key}: false" for key in keys),
            ) from why

    def _verify_replay(self, layout: Layout, prompt: tuple[int, ...], completions: list[tuple[int, ...]]) -> None:
        """Check that routers that are told what they chose anyway come to the same gates."""
        rows = layout.build([prompt] * 2, completions, width=max(map(len, completions)), device=self._device)
        limit = 0.05 if self.model.dtype == torch.bfloat16 else 1e-4
        try:
            free = self.forward(rows, entropy="none", routing="recorded")
            assert free.routing is not None
            replayed = self.forward(rows, entropy="none", routing=free.routing.long())
            gap = self._gap(free.logprobs, replayed.logprobs)
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            # Routers that return other things than those that are known fail here, or later in their layer.
            gap = float("nan")
        finally:
            self.stop_replay()
        if not gap <= limit:
            raise UserError(
                f"the routers of {type(self.model).__name__} compute the weights of their experts in a way that is not "
                "known",
                where="model.routing_replay",
                remedy="set routing_replay: none",
            )


def backbone(model: Any) -> Any:
    """Return the part of a causal language model below its head, whose output is the last hidden states."""
    base = model.base_model
    # Llama 4's text model has another prefix than its backbone's attribute.
    return model.model if base is model and hasattr(model, "model") else base


def hidden_states(base: Any, batch: PolicyInput, *, router: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Run a base model, and return its last hidden states, [B, S, D], and router logits by layer where ``router``.

    The final norm is applied to the states.
    """
    mask: Any = batch.attention_mask
    options: dict[str, Any] = {}
    config = base.config.get_text_config()
    if batch.segments is not None:
        implementation = base.config._attn_implementation
        if implementation == NAMES["varlen"]:
            # Made here, outside of the blocks: where those are compiled they only read them.
            *indices, _, _ = batch.segments.cumulative()
            _ = batch.segments.asks_for_gqa
            if is_compiled(base):
                mark_varying(*indices)
        if implementation in NAMES.values():
            # Our attention reads the segments. Given any mask, transformers does not make one of [S, S] itself.
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
            options["segments"] = batch.segments
        elif implementation == "flash_attention_2":
            _, lengths, _, longest, _ = batch.segments.cumulative()
            options |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
            options |= {"max_length_q": longest, "max_length_k": longest}
        else:
            mask = masks_by_layer_type(config, batch.segments.mask(), batch.position_ids)
    elif mask is not None:
        mask = masks_by_layer_type(config, mask, batch.position_ids)
    # The eager attention adds its mask to the scores instead of choosing by it.
    if mask is not None and base.config._attn_implementation == "eager":
        added = {name: _additive(one, base.dtype) for name, one in mask.items()} if isinstance(mask, dict) else None
        mask = added or _additive(mask, base.dtype)
    if router:
        options["output_router_logits"] = True
    # Padded rows are what the model is made for: it numbers their positions itself, as some families must.
    if mask is not None or batch.segments is not None:
        options |= {"position_ids": batch.position_ids, "attention_mask": mask}
    out = base(input_ids=batch.input_ids, use_cache=False, **options)
    scores = getattr(out, "router_logits", None) if router else ()
    if scores is None:
        raise UserError(
            f"{type(base).__name__} does not return the scores of its routers, which the objective compares",
            where="model.objective.recipe",
            remedy="choose a recipe that does not compare them, such as gmpo",
        )
    return out.last_hidden_state, list(scores)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout rate of the model to 0, so that training mode has none either."""
    # Not eval(): gradient checkpointing works in training mode alone.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Layers keep copies of the configuration's rates for dropout that they call as a function.
        _clear_rates(module)
    if (config := getattr(model, "config", None)) is not None:
        _clear_rates(config)


def _clear_rates(owner: Any) -> None:
    # attention_dropout, residual_dropout, embd_pdrop, layerdrop: every family has names of its own.
    for name, value in list(vars(owner).items()):
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
