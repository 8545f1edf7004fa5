"""How far the optimizer steps of a rollout have moved the policy, measured after the last of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_grpo.learner.batch import probe
from lit_grpo.learner.engine_agreement import FirstUpdate
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.objectives.tensors import exp_clamped, masked
from lit_grpo.policy.forward.attention import to_device
from lit_grpo.types import Sum

LEAST = 2
"""Completions that are looked at again, unless a rollout has fewer."""
SHARE = 32
"""One completion of so many is looked at again: a forward pass over 3 % of them takes about 1 % of an update, and 1.5 %
of a whole rollout where prompts are longer than completions."""


@torch.no_grad()
def measure_step(
    forward: ForwardRunner, first_update: FirstUpdate, advantages: Tensor, count: int | None, seed: int
) -> dict[str, Sum]:
    """Compare the policy as it is now with the policy before the first update, on a few completions.

    ``policy/step_kl`` is KL(before || now) by k3, rho - 1 - log rho, a mean over the tokens that the policy before it
    (or its sampler) drew: never negative, and without bias if they come from that policy.
    ``policy/delta_prob_positive`` and ``policy/delta_prob_negative`` are the mean change of the probability of tokens
    with a positive and with a negative advantage, the landscape study's difference (App. D) with the opposite sign.

    Args:
        forward: the models.
        first_update: log-probabilities of the first optimizer step, before any weight changed.
        advantages: of the whole rollout, [N, T].
        count: completions that go through the model again; None: one of :data:`SHARE`, at least :data:`LEAST`.
        seed: seed of their choice.
    """
    batch, experience = first_update.batch, first_update.experience
    rows, multiplicity, before = first_update.seen()
    if count is None:
        count = max(LEAST, len(batch.completions) // SHARE)
    chosen, weights = probe(batch, rows, count, seed, multiplicity, per_group=2)
    now = forward.logprobs(batch, chosen)
    if not len(chosen):
        return {}
    index = to_device(chosen, now.device)
    mask = experience.mask[index]
    old, new = masked(before[index], mask).double(), masked(now, mask).double()
    log_ratio, change = new - old, new.exp() - old.exp()
    tokens = mask * to_device(weights, now.device)[:, None]
    divergence = exp_clamped(log_ratio) - 1 - log_ratio
    out = {"policy/step_kl": Sum((divergence * tokens).sum(), tokens.sum())}
    for name, sign in (("positive", 1), ("negative", -1)):
        of_sign = tokens * (advantages[index] * sign > 0)
        out[f"policy/delta_prob_{name}"] = Sum((change * of_sign).sum(), of_sign.sum())
    return out
