"""The experts that the engine chose while sampling are used in the update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineConfig, EngineContext, make_engine
from lit_grpo.errors import UserError
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.forward import OptimizerStep
from lit_grpo.learner.optimizer_step import OptimizerStepper
from lit_grpo.policy import PolicyConfig
from lit_grpo.types import Request, Sampling
from tests import tiny
from tests.learner.helpers import rollout
from tests.learner.test_routing_replay import LAYOUTS, MOE, replaying, turn_round


def sampled(module: Any, *, beside: bool = False) -> Any:
    """A rollout of 4 prompts of 2 completions each, sampled by the transformers engine, experts recorded."""
    engine = make_engine(
        EngineConfig(batch_size=5),  # cuts a group
        EngineContext(
            policy=module.policy,
            policy_config=module.policy_config,
            tokenizer=None,
            end_token_ids=(0, 3, 5, 7),
            max_model_len=64,
            seed=0,
            beside_learner=beside,
            wants_experts=True,
        ),
    )
    engine.sync(module.named_weights(), 0)
    batch = rollout()
    size = batch.group_size
    asked = [Request(g, p.token_ids, tuple(range(g * size, g * size + size))) for g, p in enumerate(batch.prompts)]
    found = sorted(engine.generate(asked, Sampling(max_new_tokens=5)), key=lambda c: (c.request, c.sample))
    engine.close()
    return replace(batch, completions=found)


def module(**policy: Any) -> Any:
    return replaying(routing_replay="sampler", **policy)


def filled(made: Any, batch: Any) -> tuple[Any, Any]:
    experience = make_experience(batch, "cpu")
    results = made.forward_runner.old_forward(batch, experience, frozenset({"old_logprobs", "entropy"}))
    return results.routing, results.added_to(experience)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("beside", [False, True])
def test_with_equal_weights_it_changes_nothing(layout: Any, beside: bool) -> None:
    made = module(**layout)
    batch = sampled(made, beside=beside)
    lengths = [len(c.token_ids) for c in batch.completions]
    assert len(set(lengths)) > 1, "some end early"
    for i, c in enumerate(batch.completions):
        prompt = len(batch.prompts[i // batch.group_size].token_ids)
        assert c.experts is not None
        assert c.experts.shape == (prompt + lengths[i] - 1, MOE.layers, MOE.experts_per_token)
    _, replayed = filled(made, batch)
    routing, free = filled(replaying(routing_replay="none", **layout), batch)
    assert routing is None
    place = torch.arange(replayed.width)[None, :] < replayed.lengths[:, None]
    torch.testing.assert_close(replayed.old_logprobs[place], free.old_logprobs[place], rtol=0, atol=1e-5)
    assert torch.equal(place.sum(1), replayed.lengths)
    drawn = torch.cat([torch.tensor(c.logprobs) for c in batch.completions])
    torch.testing.assert_close(replayed.old_logprobs[place], drawn, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_sampled_experts_stay_when_the_routers_change(layout: Any) -> None:
    made = module(**layout)
    batch = sampled(made)
    turn_round(made)
    rows = torch.tensor([1, 2, 6])
    free = made.policy(made.policy_inputs(batch, rows), routing="recorded")
    routing, experience = filled(made, batch)
    advantages, state = made.objective.advantages(experience, made.objective.new_state())
    plan = made.objective.plan(experience, advantages, state)
    step = OptimizerStep(
        objective=made.objective,
        state=state,
        experience=experience,
        advantages=advantages,
        rows=torch.arange(8),
        routing=routing,
    )
    inputs = made.policy_inputs(batch, rows)
    out, stats = made.forward_runner.loss(batch, step, rows, plan.select(rows))
    owner, position = inputs.owner.flatten(), inputs.position_ids.flatten()
    told = 0
    for place in range(len(owner)):
        if int(owner[place]) >= 0:
            experts = batch.completions[int(rows[owner[place]])].experts
            if int(position[place]) < len(experts):
                assert torch.equal(stats.routing[place], experts[int(position[place])])
                told += 1
    assert told > 5
    assert not torch.equal(stats.routing, free.routing)
    assert float((stats.logprobs - free.logprobs).abs().max()) > 1e-3
    seen = experience.old_logprobs[rows]
    mask = torch.arange(seen.shape[1])[None, :] < experience.lengths[rows][:, None]
    torch.testing.assert_close(stats.logprobs[mask], seen[mask], rtol=0, atol=1e-5)
    out.loss.backward()
    assert all(layer.mlp.gate.weight.grad is not None for layer in made.policy.model.base_model.layers)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_replays_what_was_sampled(ahead: int, monkeypatch: Any) -> None:
    found, told, step = [], [], OptimizerStepper.step

    def spy(self: Any, batch: Any, given: Any, *rest: Any) -> None:
        told.append(given.routing is not None)
        step(self, batch, given, *rest)

    monkeypatch.setattr(OptimizerStepper, "step", spy)
    for replay in ("none", "sampler"):
        recorder = tiny.Recorder()
        made: Any = tiny.module(policy=PolicyConfig(tiny=MOE), routing_replay=replay, max_staleness=ahead)
        tiny.trainer(callbacks=[recorder]).fit(made, datamodule=tiny.data())
        found.append((recorder.ids, [m["optim/grad_norm"] for m in recorder.metrics]))
        routers = made.policy._routers
        assert routers is None or routers.replay is None, "an engine that shares the model must choose freely"
    assert told == [False] * 3 + [True] * 3, "also where nothing else is needed before the update"
    assert found[0][0][0] == found[1][0][0]
    assert found[0][1][0] == pytest.approx(found[1][1][0], rel=1e-4), "equal weights"


def test_engines_that_cannot_say_are_refused_before_a_model_is_made() -> None:
    made = tiny.module(policy=PolicyConfig(tiny=MOE), routing_replay="sampler")
    with pytest.raises(UserError, match=r"vllm_server does not hand over(.|\n)*routing_replay: old"):
        tiny.trainer().fit(made, datamodule=tiny.data(engine=EngineConfig(name="vllm_server")))
    assert made.policy is None


def test_completions_that_do_not_say_are_refused() -> None:
    made = module()
    with pytest.raises(UserError, match="do not say which experts"):
        filled(made, rollout())
