"""Module and data module meet in ``connect``; a refused change of objective leaves nothing behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lit_grpo.context import LearnerRequirements, RunContext
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, PolicyConfig, TinyModel
from lit_grpo.types import RolloutSnapshot, StepResult
from tests import tiny
from tests.learner.helpers import fit, rollout

BINARY = (0.0, 1.0)


class Foreign(tiny.pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...


def test_a_module_that_no_engine_can_follow_is_refused():
    with pytest.raises(UserError, match=r"Foreign has no named_weights\(\), so the engine cannot follow it"):
        tiny.trainer().fit(Foreign(), datamodule=tiny.data())


def test_a_module_that_cannot_be_connected_is_refused():
    class Unconnected(Foreign):
        def named_weights(self) -> Any: ...

        def requirements(self) -> LearnerRequirements: ...  # type: ignore[empty-body]

    with pytest.raises(UserError, match=r"Unconnected has no connect\(\)"):
        tiny.trainer().fit(Unconnected(), datamodule=tiny.data())


def test_the_data_module_tells_the_shape_of_the_run():
    seen: list[RunContext] = []
    module: Any = tiny.module()
    connect = module.connect

    def spy(context: RunContext) -> None:
        seen.append(context)
        connect(context)

    module.connect = spy
    data = tiny.data(rollouts=2)
    tiny.trainer(max_epochs=2).fit(module, datamodule=data)
    (context,) = seen
    assert (context.rollouts, context.group_size, context.prompts_per_rollout, context.max_new_tokens) == (4, 4, 4, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.rollouts = 5  # type: ignore[misc]


def test_a_module_says_what_it_needs_before_it_is_made():
    assert tiny.module().requirements().completions_from == "engine"
    assert not tiny.module().requirements().dynamic_sampling
    assert tiny.module(objective=ObjectiveConfig(recipe="dapo")).requirements().dynamic_sampling
    taught = tiny.module(objective=ObjectiveConfig(recipe="sft"))
    assert taught.requirements().completions_from == "dataset"
    moe = PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2, experts=4, experts_per_token=2))
    needs = tiny.module(policy=moe, routing_replay="sampler", max_staleness=2).requirements()
    assert (needs.sampled_experts, needs.max_staleness) == (True, 2)
    assert tiny.module(objective=ObjectiveConfig(recipe="rent", invalid_entropy=7.0)).requirements().extracted_answers


def everything(module: Any) -> tuple[Any, ...]:
    return module.objective_config, module.objective, module.objective_state


def test_a_refused_change_of_objective_leaves_everything_as_it_was():
    module = tiny.module(objective=ObjectiveConfig(recipe="ppo"), critic=CriticConfig())
    module.connect(tiny.context(4, reward_range=BINARY))
    assert module.objective_state.reward_range == (0.0, 1.0)
    before = everything(module)
    # The penalty would widen the range of rewards to [-1, 1], and no reference model was made.
    with pytest.raises(UserError, match="needs a reference model"):
        module.change_objective({"recipe": "ppo", "overlong_penalty": True, "kl_coef": 0.1})
    assert everything(module) == before
    assert module.objective_state.reward_range == (0.0, 1.0)
    module.change_objective({"recipe": "ppo", "overlong_penalty": True})
    assert module.objective_state.reward_range == (-1.0, 1.0), "and a change that fits arrives"
    assert module.objective.shaping.overlong_max == 6


def test_a_refused_run_leaves_the_module_unconnected():
    module = tiny.module(objective=ObjectiveConfig(recipe="ppo"), critic=CriticConfig(), minibatch_prompts=3)
    before = everything(module)
    with pytest.raises(UserError, match="cannot be divided"):
        module.connect(tiny.context(4, reward_range=BINARY))
    assert everything(module) == before


def test_a_change_of_objective_in_the_middle_of_a_run_is_trained_with():
    class Change(tiny.pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, index: int) -> None:
            if index == 0:
                pl_module.change_objective({"recipe": "lopti", "lopti_eta": 0.07, "kl_coef": 0.0})

    module, _ = fit(2, callbacks=[Change()])
    assert module.optimizer_steps == 1 + 2, "Lopti takes two passes"


def test_callbacks_get_a_typed_frozen_result():
    seen: list[StepResult] = []

    class Look(tiny.pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(pl_module.step_result)

    batch = rollout()
    module, _ = fit(batches=[batch], callbacks=[Look()])
    result = module.step_result
    assert isinstance(result, StepResult)
    assert seen[0].metrics is None, "the rollout is under way"
    assert result.metrics == module.step_metrics
    assert result.metrics is not None
    assert result.metrics["optim/steps"] == 1
    snapshot: RolloutSnapshot = result.snapshot
    assert snapshot.rollout is batch
    assert snapshot.advantages.shape == (8, 6)
    assert snapshot.logprobs is not None
    assert snapshot.experience.old_logprobs is None, "one update needs none"
    assert not torch.isnan(snapshot.logprobs[snapshot.experience.mask]).any()
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.experience.entropy = None  # type: ignore[misc]
