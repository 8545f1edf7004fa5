"""What is trained and how, in the words that a person reads at the start of a run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lit_grpo.policy.config import OptimizerConfig
from lit_grpo.utils.text import in_bytes, in_units

_MOMENTS = {"torch.optim.AdamW": 2, "torch.optim.Adam": 2}
"""Number of values that an optimizer keeps of each weight, by its import path; of others it is not known."""


def describe_models(policy: nn.Module, critic: nn.Module | None, path: str | None) -> dict[str, str]:
    """Say what is trained, text by name: ``model`` and, where there is one, ``critic``.

    Args:
        policy: the policy's model.
        critic: a critic with a backbone of its own; None: there is none.
        path: folder or name of the policy's model; None: it is a tiny one.
    """
    facts = {"model": f"{path or 'tiny, of random weights'}: {parameter_count(policy)}"}
    return facts if critic is None else facts | {"critic": parameter_count(critic)}


def parameter_count(model: nn.Module) -> str:
    """Count the parameters of a model, over all ranks, and those that are trained if they are not all."""
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    # Packed weights hold several in one number.
    if any(not p.is_floating_point() for p in parameters):
        return f"quantized, {in_units(trained)} parameters are trained"
    only = "" if trained == count else f", {in_units(trained)} are trained"
    return f"{in_units(count)} parameters{only}"


def batch_in_words(prompts: int, group_size: int, updates: int, minibatch_prompts: int | None) -> str:
    """Say how many completions a rollout and an optimizer step have.

    Args:
        prompts: prompts of a rollout, over all ranks.
        group_size: completions of each.
        updates: optimizer steps on each rollout.
        minibatch_prompts: prompts of each optimizer step; None: all of the rollout.
    """
    text = f"{prompts} prompts x {group_size} completions = {prompts * group_size:,} a rollout"
    if updates == 1 and minibatch_prompts in (None, prompts):
        return f"{text}, one optimizer step"
    return f"{text}, {updates} optimizer steps of {(minibatch_prompts or prompts) * group_size:,}"


def memory_in_words(models: Iterable[nn.Module | None], optimizer: OptimizerConfig) -> str:
    """Say how much memory the weights take, with gradients and the optimizer's values where that is known.

    A shared parameter counts once; parameters in shards count whole. What a forward pass takes on top is not known
    here: ``lit-grpo check`` measures it.
    """
    parameters = {id(p): p for model in models if model is not None for p in model.parameters()}.values()
    weights = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    moments = _MOMENTS.get(optimizer.type)
    if moments is None:
        return f"{in_bytes(weights)} of weights, {in_bytes(trained)} of gradients"
    return f"{in_bytes(weights + trained * (1 + moments))} at least: weights, gradients, Adam's moments"
