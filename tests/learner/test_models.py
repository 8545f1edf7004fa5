"""The models of a run: made from before training each time, and asked together."""

from __future__ import annotations

import torch

from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.learner.models import ModelFactory, Models
from lit_grpo.policy import CriticConfig, PolicyConfig
from tests import tiny
from tests.learner.helpers import vector


def factory(critic: CriticConfig | None = None) -> ModelFactory:
    policy = PolicyConfig(tiny=tiny.TINY)
    return ModelFactory.for_run(None, policy, critic, ShardingConfig(), needs_score_norms=False)


def test_a_reference_is_the_policy_from_before_training_and_learns_nothing():
    made = factory()
    policy = made.make_policy()
    before = vector(policy.model)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(1.0)
    reference = made.make_reference()
    assert torch.equal(vector(reference.model), before)
    assert not any(weight.requires_grad for weight in reference.parameters())


def test_a_refreshed_reference_is_the_policy_as_it_is_now():
    made = factory()
    models = Models(made.make_policy(), None, made.make_reference())
    with torch.no_grad():
        for weight in models.policy.parameters():
            weight.add_(1.0)
    assert models.reference is not None
    assert not torch.equal(vector(models.reference.model), vector(models.policy.model))
    models.refresh_reference()
    assert torch.equal(vector(models.reference.model), vector(models.policy.model))


def test_a_critic_is_a_model_of_its_own_or_a_head_on_the_policys():
    separate = factory(CriticConfig())
    assert separate.make_policy().value_head is None
    assert len(list(separate.make_critic().parameters())) > 2
    assert factory(CriticConfig(backbone="shared")).make_policy().value_head is not None


def test_what_is_open_in_the_settings_is_decided_for_the_device():
    made = factory()
    assert made.policy_config.attention == "auto"
    assert made.resolved_policy.attention != "auto"
    assert not Models(made.make_policy()).sharded
