"""The critic: a value for the state before each completion token, by a model of its own or a head on the policy's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.errors import UserError
from lit_grpo.policy.config import CriticConfig, PolicyConfig
from lit_grpo.policy.forward.attention import probe_ids
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.onednn import use_onednn
from lit_grpo.policy.forward.policy import backbone, hidden_states, switch_off_dropout
from lit_grpo.policy.model.arguments import arguments_of_another
from lit_grpo.policy.model.compiling import eagerly, is_compiled
from lit_grpo.policy.model.load import check_policy, load_model, load_tokenizer
from lit_grpo.policy.model.quantization import keep_base_out_of_checkpoints
from lit_grpo.utils.bounds import check_fields
from lit_grpo.utils.windows import narrowed

KEY = "model.critic"


class ValueHead(nn.Linear):
    """A linear layer from a hidden state to its value, squashed into a range if ``bounded``.

    Its weights are zero at the start: every value begins at 0, or in the middle of the range.

    Args:
        width: D, size of a hidden state.
        config: settings of the critic, of which it reads whether values are bounded, and by what.
    """

    def __init__(self, width: int, config: CriticConfig) -> None:
        self.config = config
        super().__init__(width, 1)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values of hidden states: [M, D] -> [M] float32."""
        values = super().forward(hidden.to(self.weight.dtype)).float()[:, 0]
        if self.config.bounded:
            low, high = self.config.value_low, self.config.value_high
            values = low + (high - low) * torch.sigmoid(values)
        return values


class Critic(nn.Module):
    """A base model of transformers with a value head, apart from the policy.

    Args:
        base: backbone, without output layer.
        config: settings of the value head.
    """

    base: Any

    def __init__(self, base: nn.Module, config: CriticConfig) -> None:
        super().__init__()
        self.base = base
        self.config = config
        self.head = make_head(base, config)
        switch_off_dropout(base)
        use_onednn(base)
        keep_base_out_of_checkpoints(self)

    def forward(self, batch: PolicyInput) -> Tensor:
        """Return the value of the state before each completion token, [n, T] float32, 0 where there is no token.

        The layout of the batch is that of the policy, shared prompts included: what predicts a token also values the
        state before it.
        """
        states, _ = hidden_states(self.base, batch)
        return batch.scatter(self.head(states.flatten(0, 1)[batch.source]))

    @torch.no_grad()
    def verify_against_model_forward(self, layout: Layout) -> None:
        """Compare the backbone's states of a few tokens, in the policy's layout, with those of one completion alone.

        Raises:
            UserError: the model does not keep to a given attention mask (linear attention, sliding windows).
        """
        config = self.base.config.get_text_config()
        # A few tokens are not worth the wait for a compiler.
        with eagerly() if is_compiled(self.base) else nullcontext(), narrowed(self.base):
            for reach in (False, True):
                prompt, completions = probe_ids(config, reach)
                if prompt:
                    self._verify(layout, prompt, completions)

    def _verify(self, layout: Layout, prompt: tuple[int, ...], completions: Sequence[tuple[int, ...]]) -> None:
        device = next(self.base.parameters()).device
        rows = layout.build([prompt] * 2, completions, width=max(map(len, completions)), device=device)
        try:
            states = hidden_states(self.base, rows)[0].flatten(0, 1)[rows.source].float()
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # The code of a family may fail on a mask or an option in as many ways as there are families.
            raise self._refusal(layout, f"it cannot compute such rows ({type(error).__name__})") from error
        for row, completion in enumerate(completions):
            ids = torch.tensor([[*prompt, *completion]], device=device)
            alone = self.base(input_ids=ids, use_cache=False).last_hidden_state[0].float()
            for index in torch.where(rows.row == row)[0].tolist():
                expected = alone[len(prompt) - 1 + int(rows.column[index])]
                gap = float((states[index] - expected).norm() / expected.norm().clamp_min(1e-6))
                # Written so that NaN, which compares false, is refused too.
                if not gap < (0.1 if self.base.dtype == torch.bfloat16 else 1e-3):
                    raise self._refusal(layout, f"states differ from its own by {gap:.3g} of their size")

    def _refusal(self, layout: Layout, what: str) -> UserError:
        packed = layout.pack or layout.share
        return UserError(
            f"the critic's model {type(self.base).__name__} cannot be trained like this: {what}",
            where="model.policy.pack" if layout.pack else "model.policy.share_prompts",
            remedy="set model.policy.pack: false and model.policy.share_prompts: false"
            if packed
            else "give the critic a model of its own that is a causal language model",
        )


def make_head(model: Any, config: CriticConfig) -> ValueHead:
    """Make a value head for the hidden states of a model."""
    return ValueHead(int(model.config.get_text_config().hidden_size), config)


def make_critic(model: PolicyConfig, config: CriticConfig) -> Critic:
    """Make a critic whose backbone is the base model that ``model`` describes, see :func:`model_settings`."""
    return Critic(backbone(load_model(model)), config)


def model_settings(policy: PolicyConfig, config: CriticConfig) -> PolicyConfig:
    """Return the settings that a separate critic's backbone is made from: the policy's, with the critic's own model."""
    if config.path is None and config.tiny is None:
        return policy
    # A tiny model is made and not loaded, so nothing quantizes it, and there are no arguments of a loader.
    quantization = None if config.tiny is not None else policy.quantization
    arguments = {} if config.tiny is not None else arguments_of_another(policy, config.model_args)
    return replace(policy, path=config.path, tiny=config.tiny, quantization=quantization, model_args=arguments)


def check_critic(policy: PolicyConfig, config: CriticConfig | None) -> None:
    """Check the settings for contradictions; reads no weights and no tokenizer.

    Raises:
        UserError: two of them contradict each other.
    """
    if config is None:
        return
    check_fields(config, KEY)
    shared = config.backbone == "shared"
    model_key = next((key for key in ("path", "tiny") if getattr(config, key) is not None), None)
    if config.model_args and config.path is None:
        _refuse("model_args", "model_args without path load nothing", "add path, or set model.policy.model_args")
    if shared and model_key:
        remedy = f"remove {model_key}, or set backbone: separate"
        _refuse(model_key, "a critic on the policy's backbone has no model of its own", remedy)
    if config.detach and not shared:
        _refuse(
            "detach", "a separate critic shares no backbone with the policy", "set backbone: shared, or detach: false"
        )
    if config.path is not None and config.tiny is not None:
        _refuse("path", "the critic has both a path and a tiny model", "keep one of them")
    if config.value_low >= config.value_high:
        _refuse(
            "value_low",
            f"value_low {config.value_low:g} is not below value_high {config.value_high:g}",
            "give the smallest and the largest total reward",
        )
    if not config.bounded and (config.value_low, config.value_high) != (0.0, 1.0):
        _refuse("bounded", "value_low and value_high bound nothing while bounded is false", "set bounded: true")
    if model_key:
        try:
            check_policy(model_settings(policy, config))
        except UserError as error:
            where = (error.where or KEY).replace("model.policy", KEY)
            raise UserError(error.what, where=where, remedy=error.remedy) from error


def check_vocabulary(policy: PolicyConfig, config: CriticConfig) -> None:
    """Check that a critic with a model of its own reads the policy's tokens; reads tokenizers, no weights.

    Raises:
        UserError: a token has another id for the critic, or its tokenizer cannot be loaded.
    """
    if config.path is None and config.tiny is None:
        return
    key, name = ("path", config.path) if config.path is not None else ("tiny", "the tiny model")
    try:
        other = load_tokenizer(model_settings(policy, config)).get_vocab()
    except UserError as error:
        raise UserError(
            f"the critic's tokenizer cannot be loaded and compared with the policy's: {error.what}",
            where=f"{KEY}.{key}",
            remedy="put the tokenizer's files beside the critic's weights",
        ) from error
    ids = load_tokenizer(policy).get_vocab()
    # Tokenizers give their tokens in no order; the message names the first that differs.
    tokens = sorted(ids, key=lambda token: ids[token])
    wrong = next((token for token in tokens if other.get(token) != ids[token]), None)
    if wrong is not None:
        difference = "is unknown" if wrong not in other else f"has id {other[wrong]}"
        _refuse(
            key,
            f"{name} does not read the policy's tokens: {wrong!r} has id {ids[wrong]} for the policy and {difference} "
            "for the critic",
            "use a critic with the policy's tokenizer, or leave path and tiny out: a copy of the policy's model",
        )


def _refuse(key: str, what: str, remedy: str | None = None) -> None:
    raise UserError(what, where=f"{KEY}.{key}", remedy=remedy)
