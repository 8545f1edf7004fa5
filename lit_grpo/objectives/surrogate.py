"""The loss of one micro-batch, from the parts of an objective and a step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives import diagnostics
from lit_grpo.objectives.plan import StepPlan
from lit_grpo.objectives.ratios import importance_ratio
from lit_grpo.objectives.regularizers import kl_to_reference, value_loss
from lit_grpo.objectives.sampler_correction import SamplerWeights, geometric_mean
from lit_grpo.objectives.tensors import masked
from lit_grpo.objectives.token_weights import reweighting
from lit_grpo.objectives.trust_regions import SurrogateInputs, SurrogateOutput
from lit_grpo.types import LossOutput, Sum

if TYPE_CHECKING:
    from lit_grpo.objectives.objective import Objective


def loss(
    objective: Objective,
    logprobs: Tensor,
    plan: StepPlan,
    entropy: Tensor | None,
    values: Tensor | None,
    router_logscores: Tensor | None,
) -> LossOutput:
    """See :meth:`Objective.loss`."""
    plan = plan.trim(logprobs.shape[1])
    tokens = plan.tokens
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    with torch.set_grad_enabled(True):
        # What is dropped may hold anything; metrics still look at all generated tokens.
        live = tokens & (plan.kept & plan.active)[:, None]
        lp = masked(logprobs.to(dtype), live)
        if not lp.requires_grad:  # still to know the weight of each token
            lp = lp.detach().requires_grad_()
        current = masked(logprobs.detach().to(dtype), tokens)
        old = current if plan.old_logprobs is None else masked(plan.old_logprobs.to(dtype), tokens)
        policy, surrogate, sampler = _policy_term(objective, lp, old, plan, live, router_logscores)
        parts = {"policy": policy}
        learns = live & plan.pass_mask
        weights = plan.weights.to(dtype)[:, None]
        regular = objective.regularizers
        if surrogate.penalty is not None:
            parts["kl_old"] = (weights * masked(surrogate.penalty, learns)).sum()
        if regular.kl_loss:
            if plan.ref_logprobs is None:
                raise UserError("a KL term in the loss needs ref_logprobs, which are not known")
            kl = kl_to_reference(regular.kl_estimator, lp, plan.ref_logprobs.to(dtype), learns)
            parts["kl_ref"] = regular.kl_coef * (weights * kl).sum()
        if regular.entropy_coef and entropy is not None:
            parts["entropy"] = -regular.entropy_coef * (weights * masked(entropy.to(dtype), learns)).sum()
        if regular.nll_coef:
            parts["nll"] = -plan.nll_weight * masked(lp, learns & plan.positive[:, None]).sum()
        if regular.value_coef and values is not None:
            assert plan.values is not None
            assert plan.returns is not None
            error = value_loss(
                values.to(dtype), plan.values.to(dtype), plan.returns.to(dtype), learns, regular.value_clip
            )
            parts["value"] = plan.value_weight * error.sum()
        total = torch.stack(list(parts.values())).sum()
        gradient = torch.autograd.grad(total, lp, retain_graph=True, allow_unused=True)[0]
        token_weights = torch.zeros_like(lp) if gradient is None else masked(gradient.detach(), live)
    with torch.no_grad():
        share = plan.active.sum() / plan.active_total if plan.active_total else plan.active.sum() * 0.0
        metrics = {f"loss/{k}": Sum(v.detach(), share) for k, v in parts.items()}
        found, maxima = diagnostics.step_metrics(plan, current, old, surrogate, sampler, entropy=entropy, tokens=tokens)
    if not logprobs.requires_grad and not any(x is not None and x.requires_grad for x in (entropy, values)):
        total = total.detach()
    return LossOutput(total, token_weights, metrics | found, maxima)


def _policy_term(
    objective: Objective, lp: Tensor, old: Tensor, plan: StepPlan, live: Tensor, router_logscores: Tensor | None
) -> tuple[Tensor, SurrogateOutput, SamplerWeights | None]:
    """-sum w f c lambda F, with the surrogate and the sampler weights for the metrics."""
    tokens = plan.tokens
    region = objective.trust_region
    advantages = masked(plan.advantages.to(lp.dtype), live)
    factors = masked(plan.token_weights.to(lp.dtype), live & plan.pass_mask)
    if objective.token_weights.reweight_alpha:
        factors = factors * reweighting(old, objective.token_weights.reweight_alpha)

    sampler = None
    if plan.sampler_logprobs is not None:
        sampler = objective.sampler(old, plan.sampler_logprobs.to(lp.dtype), tokens)
    elif objective.sampler.kind != "none":
        raise UserError(
            f"the sampler correction {objective.sampler.kind!r} needs sampler_logprobs, which are not known"
        )
    if sampler is not None and objective.sampler.kind != "none":
        c = geometric_mean(sampler.weights, tokens) if region.per_sequence else sampler.weights
        factors = factors * c

    log_router = None
    old_scores = plan.router_logscores_old
    if region.needs_router_scores and old_scores is not None and router_logscores is not None:
        gamma = region.router_factor(router_logscores.to(lp.dtype), old_scores.to(lp.dtype))
        log_router = masked(gamma, live, 1.0).log()
    uneven = objective.sampler.token_level or objective.varies_by_token
    before = masked(old, live)
    ratio = importance_ratio(objective.ratio, lp, before, live, token_form=uneven)
    inputs = SurrogateInputs(ratio, advantages, lp, before, live, log_router, plan.beta)
    surrogate = region(inputs)
    if objective.ratio == "none":
        surrogate = surrogate._replace(value=lp * advantages)
    value = masked(surrogate.value, live)
    return -(plan.weights.to(lp.dtype)[:, None] * factors * value).sum(), surrogate, sampler
