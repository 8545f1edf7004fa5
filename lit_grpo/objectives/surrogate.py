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
    """Compute the loss of one micro-batch; arguments as of :meth:`Objective.loss`."""
    plan = plan.trim(logprobs.shape[1])
    tokens = plan.tokens
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    # The graph is built even under no_grad, and where nothing learns the log-probabilities become a leaf of it: the
    # gradient of the loss by log pi of a token is the weight that this token really has in the update, after clip,
    # filters, sampler weights and KL. Taken by autograd, it is right for every composition of parts, a user's own too,
    # and `policy/upward_frac` needs no second formula. It costs little: the graph ends at lp, is elementwise on [n,
    # T], and does not reach into the model.
    with torch.set_grad_enabled(True):
        # What is dropped may hold anything; metrics still look at all generated tokens.
        live = tokens & (plan.kept & plan.active)[:, None]
        lp = masked(logprobs.to(dtype), live)
        if not lp.requires_grad:
            lp = lp.detach().requires_grad_()
        current = masked(logprobs.detach().to(dtype), tokens)
        # With a single update pi_old is the policy of this very pass, without gradient.
        old = current if plan.old_logprobs is None else masked(plan.old_logprobs.to(dtype), tokens)
        policy, surrogate, sampler = _policy_term(objective, lp, old, plan, live, router_logscores)
        terms = {"policy": policy}
        in_loss = live & plan.pass_mask
        weights = plan.weights.to(dtype)[:, None]
        regularizers = objective.regularizers
        if surrogate.penalty is not None:
            terms["kl_old"] = (weights * masked(surrogate.penalty, in_loss)).sum()
        if regularizers.kl_loss:
            if plan.ref_logprobs is None:
                raise UserError("a KL term in the loss needs ref_logprobs, which are not known")
            kl = kl_to_reference(regularizers.kl_estimator, lp, plan.ref_logprobs.to(dtype), in_loss)
            terms["kl_ref"] = regularizers.kl_coef * (weights * kl).sum()
        if regularizers.entropy_coef and entropy is not None:
            terms["entropy"] = -regularizers.entropy_coef * (weights * masked(entropy.to(dtype), in_loss)).sum()
        if regularizers.nll_coef:
            assert plan.correct is not None
            terms["nll"] = -plan.nll_weight * masked(lp, in_loss & plan.correct[:, None]).sum()
        if regularizers.value_coef and values is not None:
            assert plan.values is not None
            assert plan.returns is not None
            error = value_loss(
                values.to(dtype), plan.values.to(dtype), plan.returns.to(dtype), in_loss, regularizers.value_clip
            )
            terms["value"] = plan.value_weight * error.sum()
        total = torch.stack(list(terms.values())).sum()
        # The caller runs backward through the same graph, which must not be freed here.
        gradient = torch.autograd.grad(total, lp, retain_graph=True, allow_unused=True)[0]
        token_weights = torch.zeros_like(lp) if gradient is None else masked(gradient.detach(), live)
    with torch.no_grad():
        share = plan.active.sum() / plan.active_total if plan.active_total else plan.active.sum() * 0.0
        metrics = {f"loss/{k}": Sum(v.detach(), share) for k, v in terms.items()}
        sums, maxima = diagnostics.step_metrics(
            plan, current, old, surrogate, sampler, corrects=objective.sampler.kind != "none", tokens=tokens
        )
    # Nobody upstream learns: without this the caller would hold the graph that served the token weights alone.
    if not logprobs.requires_grad and not any(x is not None and x.requires_grad for x in (entropy, values)):
        total = total.detach()
    return LossOutput(total, token_weights, metrics | sums, maxima)


def _policy_term(
    objective: Objective, lp: Tensor, old: Tensor, plan: StepPlan, live: Tensor, router_logscores: Tensor | None
) -> tuple[Tensor, SurrogateOutput, SamplerWeights | None]:
    """Compute -sum w f c lambda F, and return it with the surrogate and the sampler weights for the metrics."""
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
    varies_by_token = objective.sampler.token_level or objective.varies_by_token
    live_old = masked(old, live)
    ratio = importance_ratio(objective.ratio, lp, live_old, live, token_form=varies_by_token)
    inputs = SurrogateInputs(ratio, advantages, lp, live_old, live, log_router, plan.beta)
    surrogate = region(inputs)
    if objective.ratio == "none":
        surrogate = surrogate._replace(value=lp * advantages)
    value = masked(surrogate.value, live)
    return -(plan.weights.to(lp.dtype)[:, None] * factors * value).sum(), surrogate, sampler
