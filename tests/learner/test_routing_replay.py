"""Routing replay on a tiny mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.forward import OptimizerStep
from lit_grpo.learner.optimizer_step import OptimizerStepper
from lit_grpo.policy import PolicyConfig, TinyModel
from tests import tiny
from tests.learner.helpers import Given, rollout

MOE = TinyModel(width=32, layers=2, heads=2, experts=4, experts_per_token=2)


def replaying(routing_replay: str = "old", **policy: Any) -> Any:
    module = tiny.module(policy=PolicyConfig(tiny=MOE, **policy), routing_replay=routing_replay, updates_per_rollout=2)
    module.configure_model()
    assert module.policy is not None
    torch.manual_seed(0)
    for parameter in module.policy.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return module


def turn_round(module: Any) -> None:
    """Routers that like best what they liked least."""
    with torch.no_grad():
        for layer in module.policy.model.base_model.layers:
            layer.mlp.gate.weight.neg_()


def prepared(module: Any) -> tuple[Any, Any, Any, Any]:
    batch = rollout()
    experience, forward = make_experience(batch, "cpu"), module.forward_runner
    results = forward.old_forward(batch, experience, frozenset({"old_logprobs"}))
    experience = results.added_to(experience)
    advantages, state = module.objective.advantages(experience, module.objective.new_state())
    step = OptimizerStep(
        objective=module.objective,
        state=state,
        experience=experience,
        advantages=advantages,
        rows=torch.arange(8),
        routing=results.routing,
    )
    return batch, forward, step, module.objective.plan(experience, advantages, state)


LAYOUTS = [
    {"pack": True, "share_prompts": True},
    {"pack": True, "share_prompts": False},
    {"pack": False, "share_prompts": True},
    {"pack": False, "share_prompts": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_old_experts_stay_when_the_routers_change(layout):
    module = replaying(**layout)
    batch, forward, step, plan = prepared(module)
    free = module.policy(module.policy_inputs(batch, torch.arange(8)), routing="recorded").routing
    turn_round(module)
    now = module.policy(module.policy_inputs(batch, torch.arange(8)), routing="recorded").routing
    assert not torch.equal(now, free)
    # A micro-batch of other completions than those that the old pass saw together.
    rows = torch.tensor([1, 3, 6])
    at = torch.arange(8)[rows]
    _, stats = forward.loss(batch, step, rows, plan.select(at))
    assert len(batch.completions[1].token_ids) > 0
    inputs = module.policy_inputs(batch, rows)
    expected = step.routing.get(inputs, rows)
    real = inputs.owner.flatten() >= 0
    assert torch.equal(stats.routing[real].long(), expected[real])
    whole = module.policy_inputs(batch, torch.arange(8))
    keep = whole.owner.flatten() >= 0
    assert torch.equal(step.routing.get(whole, torch.arange(8))[keep], free[keep].long())


def test_gates_are_computed_anew_and_the_routers_learn():
    """Against the model's own last router, changed so that it weighs otherwise and prefers the same experts."""
    module = replaying()
    batch, forward, step, plan = prepared(module)
    module.policy.model.base_model.layers[-1].mlp.gate.weight.data.mul_(1.5)
    out, stats = forward.loss(batch, step, torch.arange(8), plan)
    out.loss.backward()
    gradients = [layer.mlp.gate.weight.grad.clone() for layer in module.policy.model.base_model.layers]
    module.policy.zero_grad()
    module.policy.stop_replay()
    step = replace(step, routing=None)
    own, free = forward.loss(batch, step, torch.arange(8), plan)
    own.loss.backward()
    torch.testing.assert_close(stats.logprobs, free.logprobs)
    for found, layer in zip(gradients, module.policy.model.base_model.layers, strict=True):
        assert found.abs().max() > 0
        torch.testing.assert_close(found, layer.mlp.gate.weight.grad, rtol=1e-4, atol=1e-7)


def test_a_run_replays_and_its_first_ratio_is_1(monkeypatch):
    gaps: list[float] = []
    chosen: list[Any] = []
    step = OptimizerStepper.step

    def spy(self: Any, batch: Any, given: Any, metrics: Any, first_update: Any) -> None:
        before = metrics.sums.get("policy/ratio_gap")
        step(self, batch, given, metrics, first_update)
        total = metrics.sums["policy/ratio_gap"].total
        gaps.append(float(total - before.total if before else total))
        chosen.append(given.routing is not None)
        turn_round(module)

    monkeypatch.setattr(OptimizerStepper, "step", spy)
    module = tiny.module(policy=PolicyConfig(tiny=MOE), routing_replay="old", updates_per_rollout=2)
    tiny.trainer().fit(module, Given(rollout()))
    assert chosen == [True, True]
    assert gaps[0] < 1e-5 < gaps[1]
    assert module.policy is not None
    routers = module.policy._routers
    assert routers is not None
    assert routers.replay is None, "an engine that shares the model must choose freely"


def test_one_update_has_nothing_to_replay():
    module = tiny.module(policy=PolicyConfig(tiny=MOE), routing_replay="old")
    module.configure_model()
    assert module.forward_runner.routing_replay == "none"


def test_a_dense_model_is_refused_before_it_is_made():
    module = tiny.module(routing_replay="old", updates_per_rollout=2)
    with pytest.raises(UserError, match="dense"):
        module.configure_model()
    assert module.policy is None


def test_a_router_with_other_gates_is_refused():
    module = replaying()
    module.policy.verify_against_model_forward(module.layout, replay=True)
    for layer in module.policy.model.base_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: (out[0], out[1], out[2]))
        layer.mlp.gate.norm_topk_prob = False
    inner = type(module.policy.model.base_model.layers[0].mlp.gate).forward
    for layer in module.policy.model.base_model.layers:
        layer.mlp.gate.forward = lambda x, gate=layer.mlp.gate: (lambda o: (o[0], o[1] * 2, o[2]))(inner(gate, x))
    with pytest.raises(UserError, match="not known"):
        module.policy.verify_against_model_forward(module.layout, replay=True)
