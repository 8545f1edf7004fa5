"""RSPO on a tiny mixture of experts: scores of the experts that were active under the old policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.forward import OptimizerStep
from lit_grpo.learner.optimizer_step import OptimizerStepper
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.types import Sum
from tests import tiny
from tests.learner.helpers import Given, fit, rollout

MOE = TinyModel(width=32, layers=2, heads=2, experts=4, experts_per_token=2)
RSPO = ObjectiveConfig(recipe="rspo")


def routed(share: bool) -> Any:
    module = tiny.module(objective=RSPO, policy=PolicyConfig(tiny=MOE, share_prompts=share))
    module.configure_model()
    assert module.policy is not None
    torch.manual_seed(0)
    for parameter in module.policy.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("share", [True, False])
def test_scores_are_those_of_the_routers_of_each_completion_alone(share):
    batch, module = rollout(lengths=[3, 0, 5, 2, 4, 4, 1, 6]), routed(share)
    experience = make_experience(batch, "cpu")
    results = module.forward_runner.old_forward(batch, experience, frozenset({"router_logscores_old"}))
    experience = results.added_to(experience)
    scores, experts = experience.router_logscores_old, experience.router_experts_old
    assert scores is not None
    assert experts is not None
    assert scores.shape == experts.shape == (8, 6, 2, 2)
    for i, completion in enumerate(batch.completions):
        prompt, n = batch.prompts[i // 4].token_ids, len(completion.token_ids)
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        layers = module.policy.model.base_model(input_ids=ids, output_router_logits=True).router_logits
        for layer, logits in enumerate(layers):
            best = logits.log_softmax(-1)[len(prompt) - 1 : len(prompt) - 1 + n].topk(2)
            torch.testing.assert_close(scores[i, :n, layer], best.values, rtol=1e-4, atol=1e-5)
            assert torch.equal(experts[i, :n, layer], best.indices)


def test_given_experts_are_looked_up_in_the_new_distribution():
    batch, module = rollout(), routed(True)
    inputs = module.policy_inputs(batch, torch.arange(8))
    old = module.policy(inputs, experts="active")
    with torch.no_grad():
        for layer in module.policy.model.base_model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    new = module.policy(inputs, experts=old.router_experts)
    assert torch.equal(new.router_experts, old.router_experts)
    # Layer 0 sees the same inputs as before: expert e now has the score of expert 3 - e.
    flipped = module.policy(inputs, experts=3 - old.router_experts)
    torch.testing.assert_close(flipped.router_logscores[:, :, 0], old.router_logscores[:, :, 0])
    assert not torch.allclose(new.router_logscores, old.router_logscores)


def test_the_factor_is_1_at_the_first_pass_and_less_after_an_update(monkeypatch):
    policy = PolicyConfig(tiny=MOE)
    factors: list[float] = []

    module = tiny.module(objective=RSPO, policy=policy, updates_per_rollout=2, micro_batch_size=8)
    update = OptimizerStepper.step

    def spy(self: Any, batch: Any, step: Any, metrics: Any, first_update: Any) -> None:
        before = metrics.sums.get("policy/router_factor")
        update(self, batch, step, metrics, first_update)
        after = metrics.sums["policy/router_factor"]
        if before is not None:
            after = Sum(after.total - before.total, after.weight - before.weight)
        factors.append(float(after.total / after.weight))

    monkeypatch.setattr(OptimizerStepper, "step", spy)
    tiny.trainer().fit(module, Given(rollout(seed=0)))
    assert factors[0] == pytest.approx(1.0, abs=1e-6)
    assert 0.8 <= factors[1] < 1 - 1e-5


def test_the_factor_reaches_the_loss():
    """With a floor of 1 the factor is 1 and RSPO is GMPO; without, the second update differs."""
    policy = PolicyConfig(tiny=MOE)
    bare, _ = fit(1, objective=ObjectiveConfig(recipe="gmpo"), policy=policy, updates_per_rollout=2)
    floor, _ = fit(1, objective=ObjectiveConfig(recipe="rspo", router_floor=1.0), policy=policy, updates_per_rollout=2)
    full, watch = fit(1, objective=RSPO, policy=policy, updates_per_rollout=2)
    torch.testing.assert_close(tiny.weights(floor), tiny.weights(bare))
    assert not torch.equal(tiny.weights(full), tiny.weights(bare))
    assert watch.metrics[0]["policy/router_factor"] < 1


def test_a_dense_model_says_that_the_factor_is_1():
    with pytest.warns(UserWarning, match="no experts"):
        dense, watch = fit(1, objective=RSPO, updates_per_rollout=2)
    same, _ = fit(1, objective=ObjectiveConfig(recipe="gmpo"), updates_per_rollout=2)
    assert torch.equal(tiny.weights(dense), tiny.weights(same))
    assert "policy/router_factor" not in watch.metrics[0]


def test_more_active_experts_than_there_are_is_refused():
    with pytest.raises(UserError, match="5 of 4 experts"):
        tiny.module(policy=PolicyConfig(tiny=TinyModel(width=32, heads=2, experts=4, experts_per_token=5)))


def test_the_loss_looks_at_the_experts_of_the_old_policy():
    """With routers turned round before the update other experts are active, but the old ones are compared."""
    batch, module = rollout(), routed(True)
    experience = make_experience(batch, "cpu")
    needed = frozenset({"old_logprobs", "router_logscores_old"})
    experience = module.forward_runner.old_forward(batch, experience, needed).added_to(experience)
    with torch.no_grad():
        for layer in module.policy.model.base_model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    objective, rows = module.objective, torch.arange(8)
    advantages, state = objective.advantages(experience, objective.new_state())
    plan = objective.plan(experience, advantages, state)
    step = OptimizerStep(objective=objective, state=state, experience=experience, advantages=advantages, rows=rows)
    out, _ = module.forward_runner.loss(batch, step, rows, plan)
    inputs = module.policy_inputs(batch, rows)
    now = module.policy(inputs, experts=experience.router_experts_old).router_logscores
    change = (now - experience.router_logscores_old).abs().mean((-1, -2))
    expected = (-change).exp().clamp_min(0.8)[experience.mask].mean()
    total, weight = out.metrics["policy/router_factor"]
    assert float(total / weight) == pytest.approx(float(expected), rel=1e-5)
    active = module.policy(inputs, experts="active")
    assert experience.router_experts_old is not None
    assert not torch.equal(active.router_experts, experience.router_experts_old)
