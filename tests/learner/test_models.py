"""The models of a run: made from before training each time, and asked together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.distributed import sharding
from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.errors import UserError
from lit_grpo.learner import models as learner_models
from lit_grpo.learner.batch import policy_input
from lit_grpo.learner.budget import MicroBatchBudget
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.learner.models import ModelFactory, Models
from lit_grpo.policy import CriticConfig, PolicyConfig
from lit_grpo.policy.forward.batching import Layout
from lit_grpo.policy.model.load import load_model
from tests import tiny
from tests.learner.helpers import rollout, vector

LAYOUT = Layout()


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
    trained = vector(models.policy.model)
    assert not torch.equal(vector(models.reference.model), trained)
    models.refresh_reference()
    assert torch.equal(vector(models.reference.model), trained)
    assert torch.equal(vector(models.policy.model), trained)


def test_the_models_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    models = loaded(factory(CriticConfig()), reference=True)
    assert models.all == [models.policy, models.critic, models.reference]
    asked: list[Any] = []
    monkeypatch.setattr(sharding, "reshard", lambda *given: asked.append((given, vector(models.reference))))
    models.reshard()
    assert asked[0][0] == tuple(models.all)
    moved(models)
    before = vector(models.reference)
    models.refresh_reference()
    # What a pass left gathered has another shape than a shard: both are put back before anything is copied.
    assert asked[1][0] == tuple(models.all)
    assert torch.equal(asked[1][1], before)


def test_policy_and_critic_are_compared_with_their_own_forward_passes() -> None:
    seen: list[Any] = []

    class Compared:
        def verify_against_model_forward(self, *args: Any, **options: Any) -> None:
            seen.append((*args, options))

    Models(Compared(), Compared()).verify_against_model_forward("a layout", replay=True)  # type: ignore[arg-type]
    assert seen == [("a layout", {"replay": True}), ("a layout", {})]


def runner(models: Models) -> ForwardRunner:
    return models.forward_runner(
        micro_batches=lambda batch, rows: iter([rows]),
        inputs=lambda batch, rows: policy_input(batch, rows, LAYOUT, device="cpu"),
        routing_replay="old",
        layout=LAYOUT,
        budget=MicroBatchBudget(tokens=100),
        device=torch.device("cpu"),
    )


def test_all_models_are_in_the_passes_and_put_in_order_when_one_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    models, recovered = loaded(factory(CriticConfig()), reference=True), list[Any]()
    monkeypatch.setattr(sharding, "recover", lambda *given: recovered.append(given))
    made = runner(models)
    assert (made.policy, made.critic, made.reference) == (models.policy, models.critic, models.reference)
    assert made.routing_replay == "old"
    assert made.max_over_ranks is None
    assert made.gives_way is not None
    assert made.gives_way.refuses is None
    made.gives_way.recover()
    assert recovered == [tuple(models.all)]
    batch = rollout()
    for rows in (torch.tensor([0, 1]), torch.arange(8)):
        assert made.gives_way.tokens_of(batch, rows) == policy_input(batch, rows, LAYOUT, device="cpu").tokens


def test_ranks_that_share_a_model_agree_on_their_passes_and_repeat_none(monkeypatch: pytest.MonkeyPatch) -> None:
    models = loaded(factory())
    monkeypatch.setattr(sharding, "is_sharded", lambda model: model is models.policy)
    monkeypatch.setattr(sharding, "why_not_repeatable", lambda model: f"why {model is models.policy}")
    monkeypatch.setattr(sharding, "largest_counts", lambda counts, device: [*counts, device])
    made = runner(models)
    assert models.sharded
    assert made.max_over_ranks is not None
    assert made.max_over_ranks([3, 1]) == [3, 1, torch.device("cpu")]
    assert made.gives_way is not None
    assert made.gives_way.refuses == "why True"


def test_every_model_is_sharded_over_the_mesh_and_then_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, asked, made = object(), list[dict[str, bool]](), list[Any]()

    def data_mesh(trainer: Any, config: Any, **wanted: bool) -> Any:
        asked.append(wanted)
        return mesh

    def make_sharded(given_mesh: Any, config: Any, make: Any) -> Any:
        assert given_mesh is mesh
        made.append(make())
        return made[-1]

    monkeypatch.setattr(learner_models, "data_mesh", data_mesh)
    monkeypatch.setattr(sharding, "compute_dtype", lambda *args: None)
    monkeypatch.setattr(learner_models, "compute_dtype_and_device", lambda *args, **options: (None, "cpu"))
    monkeypatch.setattr(sharding, "make_sharded", make_sharded)
    given = factory(CriticConfig())
    models = loaded(given, reference=True, score_norms=True)
    assert [id(model) for model in made] == [id(model) for model in models.all]
    assert asked == [{"quantized": False, "needs_score_norms": True}]
    assert {weight.device.type for weight in given.make_reference(torch.device("meta")).parameters()} == {"cpu"}


def test_a_whole_reference_goes_to_the_device_that_is_asked_for() -> None:
    made = factory()
    loaded(made)
    assert {weight.device.type for weight in made.make_reference(torch.device("meta")).parameters()} == {"meta"}


@pytest.mark.parametrize(("policy", "slow"), [(PolicyConfig(tiny=tiny.TINY), False), (None, True)])
def test_only_a_model_that_is_large_is_said_to_compute_slowly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, policy: PolicyConfig | None, slow: bool
) -> None:
    if policy is None:
        load_model(PolicyConfig(tiny=tiny.TINY)).save_pretrained(tmp_path)
        policy = PolicyConfig(path=str(tmp_path), dtype="float32")
    seen: list[bool] = []

    def asked(*args: Any, full_precision: bool) -> Any:
        seen.append(full_precision)
        return None, "cpu"

    monkeypatch.setattr(learner_models, "compute_dtype_and_device", asked)
    loaded(ModelFactory(policy, None, ShardingConfig()))
    assert seen == [slow]


def test_settings_that_contradict_each_other_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_models, "load_model", lambda *args: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match="no experts whose choice could be replayed"):
        loaded(factory(), replay=True)
    other = CriticConfig(tiny=replace(tiny.TINY, alphabet="9876543210+="))
    with pytest.raises(UserError) as error:
        loaded(factory(other))
    assert error.value.where == "model.critic.tiny"


def test_a_critic_is_a_model_of_its_own_or_a_head_on_the_policys():
    separate = loaded(factory(CriticConfig()))
    assert separate.critic is not None
    assert separate.policy.value_head is None
    assert len(separate.all) == 2
    larger = loaded(factory(CriticConfig(tiny=replace(tiny.TINY, width=48))))
    assert larger.critic is not None
    assert larger.critic.head.weight.shape == (1, 48)
    shared = loaded(factory(CriticConfig(backbone="shared")))
    assert shared.critic is None
    assert shared.policy.value_head is not None


def test_what_is_open_in_the_settings_is_decided_for_the_device():
    made = factory()
    assert not loaded(made).sharded
    assert made.policy.attention == "auto"
    made = ModelFactory(PolicyConfig(tiny=tiny.TINY, logits_chunk=7), None, ShardingConfig())
    assert loaded(made).policy.logits_chunk == 7
    assert made.resolved_policy.attention != "auto"
