"""The models of a run: made from before training each time, and asked together."""

from __future__ import annotations

from typing import Any

import torch

from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.learner.models import ModelFactory, Models
from lit_grpo.policy import CriticConfig, PolicyConfig
from tests import tiny
from tests.learner.helpers import vector


def factory(critic: CriticConfig | None = None) -> ModelFactory:
    return ModelFactory(PolicyConfig(tiny=tiny.TINY), critic, ShardingConfig())


def loaded(made: ModelFactory, **changes: Any) -> Models:
    return made.load(None, **({"replay": False, "score_norms": False, "reference": False} | changes))


def moved(models: Models) -> None:
    with torch.no_grad():
        for weight in models.policy.parameters():
            weight.add_(1.0)


def test_a_reference_is_the_policy_from_before_training_and_learns_nothing():
    made = factory()
    models = loaded(made)
    assert models.reference is None
    before = vector(models.policy.model)
    moved(models)
    reference = made.make_reference()
    assert torch.equal(vector(reference.model), before)
    assert not any(weight.requires_grad for weight in reference.parameters())


def test_a_refreshed_reference_is_the_policy_as_it_is_now():
    models = loaded(factory(), reference=True)
    assert models.reference is not None
    moved(models)
    assert not torch.equal(vector(models.reference.model), vector(models.policy.model))
    models.refresh_reference()
    assert torch.equal(vector(models.reference.model), vector(models.policy.model))


def test_a_critic_is_a_model_of_its_own_or_a_head_on_the_policys():
    separate = loaded(factory(CriticConfig()))
    assert separate.critic is not None
    assert separate.policy.value_head is None
    assert len(separate.all) == 2
    shared = loaded(factory(CriticConfig(backbone="shared")))
    assert shared.critic is None
    assert shared.policy.value_head is not None


def test_what_is_open_in_the_settings_is_decided_for_the_device():
    made = factory()
    assert not loaded(made).sharded
    assert made.policy.attention == "auto"
    assert made.resolved_policy.attention != "auto"
