"""Engines that do not take over the learner's weights are named before a rollout is sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.engines import EngineConfig
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import EngineError, StopRun
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.learner.sync_check import changed_weights
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.policy.config import CriticConfig, LoraConfig
from tests import tiny
from tests.learner.test_routing_replay import MOE
from tests.ranks import enter, on_two_ranks

NAMED = "the weights that the engine holds after a sync are not the learner's"


class Own(TransformersEngine):
    """A good engine with a copy of the weights, as an engine of one's own has; counts what it is asked for."""

    calls: list[int] = []  # noqa: RUF012 - of all instances, since the run makes them

    @classmethod
    def from_context(cls, context: Any, **settings: Any) -> Any:
        Own.calls.clear()
        return cls(context.policy.without_adapters(), context.end_token_ids, own_weights=True)

    def generate(self, requests: Any, sampling: Any) -> Any:
        Own.calls.append(sum(len(request.seeds) for request in requests))
        yield from super().generate(requests, sampling)


class Stale(Own):
    """Notes the version alone: what it was built with stays."""

    def sync(self, weights: Any, version: int) -> None:
        self._version = version


class FirstAlone(Own):
    """Takes the first weights that it is given, and no others."""

    def sync(self, weights: Any, version: int) -> None:
        if self.policy_version == -1:
            super().sync(weights, version)
        self._version = version


class Transposed(Own):
    """Loads square matrices transposed."""

    def sync(self, weights: Any, version: int) -> None:
        square = ((n, w.T if w.ndim == 2 and w.shape[0] == w.shape[1] else w) for n, w in weights)
        super().sync(square, version)


class Shifted(Own):
    """Takes the weights of each expert, head or neuron for those of the next."""

    def sync(self, weights: Any, version: int) -> None:
        super().sync(((n, w.roll(1, 0) if "down_proj" in n else w) for n, w in weights), version)


class OneLayer(Own):
    """Forgets one of the layers."""

    def sync(self, weights: Any, version: int) -> None:
        kept = {n: w.clone() for n, w in self.model.named_parameters() if ".layers.1." in n}
        super().sync(((n, kept.get(n, w)) for n, w in weights), version)


class Frozen(Own):
    """Takes over the head alone."""

    def sync(self, weights: Any, version: int) -> None:
        kept = {n: w.clone() for n, w in self.model.named_parameters() if "embed" not in n}
        super().sync(((n, kept.get(n, w)) for n, w in weights), version)


class Broken(Own):
    """Fails in the first sync."""

    def sync(self, weights: Any, version: int) -> None:
        raise EngineError("no room")


def data(engine: str, **changes: Any) -> Any:
    return tiny.data(engine=EngineConfig(custom_engine=f"{__name__}.{engine}"), **changes)


@pytest.mark.parametrize("engine", ["Stale", "FirstAlone", "Transposed", "Shifted", "OneLayer", "Frozen"])
@pytest.mark.parametrize("policy", [PolicyConfig(tiny=tiny.TINY), PolicyConfig(tiny=MOE)], ids=["dense", "experts"])
def test_an_engine_with_other_weights_is_named_before_the_first_rollout(engine, policy):
    module = tiny.module(policy=policy)
    with pytest.raises(StopRun, match=NAMED) as caught:
        tiny.trainer().fit(module, datamodule=data(engine))
    assert caught.value.diagnosis == "stale_or_mismatched_sampler"
    assert "max_sync_gap" in caught.value.reason
    assert module.optimizer_steps == 0
    # Two times 16 short samples, and none of a rollout.
    assert Own.calls == [16, 16]


def test_a_test_of_a_model_is_not_sampled_from_other_weights_either():
    with pytest.raises(StopRun, match=NAMED):
        tiny.trainer().test(tiny.module(), datamodule=data("Stale", test_prompts=tiny.AdditionPrompts(digits=1, n=8)))


@pytest.mark.parametrize(
    "guards", [GuardConfig(max_sync_gap=None), GuardConfig(max_engine_gap=None)], ids=["sync gap", "engine gap"]
)
def test_null_switches_it_off(guards):
    module = tiny.module(guards=guards)
    tiny.trainer().fit(module, datamodule=data("Stale", rollouts=1))
    assert module.sync_result is None
    assert len(Own.calls) == 1


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bfloat16": ({"policy": PolicyConfig(tiny=tiny.TINY, dtype="bfloat16")}, {}),
    "adapters": ({"policy": PolicyConfig(tiny=tiny.TINY, lora=LoraConfig(rank=2))}, {}),
    "experts": ({"policy": PolicyConfig(tiny=MOE)}, {}),
    "replayed experts": (
        {"policy": PolicyConfig(tiny=MOE), "routing_replay": "old", "updates_per_rollout": 2},
        {},
    ),
    "a shared critic": (
        {"objective": tiny.ObjectiveConfig(recipe="ppo"), "critic": CriticConfig(backbone="shared")},
        {},
    ),
    "rollouts ahead": ({"max_staleness": 1}, {}),
    "a single token": ({}, {"sampling": tiny.Sampling(max_new_tokens=1)}),
    "padded rows": ({"policy": PolicyConfig(tiny=tiny.TINY, pack=False, share_prompts=False)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_good_engine_passes_and_the_run_is_the_same_with_and_without(case):
    settings, shape = CASES[case]
    runs = []
    for gap in (0.2, None):
        torch.manual_seed(0)
        module, seen = tiny.module(guards=GuardConfig(max_sync_gap=gap), **settings), tiny.Recorder()
        tiny.trainer(callbacks=[seen]).fit(module, datamodule=data("Own", rollouts=2, **shape))
        runs.append((seen.ids, tiny.weights(module), torch.get_rng_state(), module.sync_result))
    with_check, without = runs
    assert with_check[0] == without[0]
    assert torch.equal(with_check[1], without[1])
    assert torch.equal(with_check[2], without[2])
    found = with_check[3]
    assert found is not None
    assert max(found.gap, found.changed_gap) < 0.05 * found.change
    assert without[3] is None


def test_a_critic_of_its_own_and_the_learners_own_weights_too():
    module = tiny.module(objective=tiny.ObjectiveConfig(recipe="ppo"))
    tiny.trainer().fit(module, datamodule=tiny.data(rollouts=1))
    assert module.sync_result is not None
    assert module.sync_result.changed_gap < 1e-5 < module.sync_result.change


def test_an_engine_that_fails_meanwhile_leaves_the_weights_as_they_were():
    module = tiny.module()
    module.configure_model()
    before = tiny.weights(module)
    with pytest.raises(EngineError, match="no room"):
        tiny.trainer().fit(module, datamodule=data("Broken"))
    assert torch.equal(tiny.weights(module), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_changed_by_a_sixteenth_to_an_eighth_and_are_then_as_before(dtype):
    torch.manual_seed(0)
    layer = nn.Linear(40, 30).to(dtype)
    layer.weight = nn.Parameter(torch.randn(40, 30, dtype=torch.float32).to(dtype).T)  # in another order of memory
    tied = nn.Module()
    tied.one, tied.other = layer, nn.Linear(40, 30)
    tied.other.weight = layer.weight
    tied.other.bias = nn.Parameter(torch.zeros(30, dtype=dtype))
    tied.frozen = nn.Parameter(torch.randn(5).to(dtype), requires_grad=False)
    tied.number = nn.Parameter(torch.arange(3), requires_grad=False)
    before = {name: p.detach().clone() for name, p in tied.named_parameters()}
    pointers = {name: p.data_ptr() for name, p in tied.named_parameters()}
    meanwhile: dict[str, torch.Tensor] = {}

    def fail() -> None:
        with changed_weights(tied):
            meanwhile.update({name: p.detach().clone() for name, p in tied.named_parameters()})
            assert {name: p.data_ptr() for name, p in tied.named_parameters()} == pointers
            raise RuntimeError("meanwhile")

    with pytest.raises(RuntimeError, match="meanwhile"):
        fail()
    assert torch.equal(meanwhile.pop("number"), before["number"])
    assert meanwhile.pop("other.bias").abs().max() < 1e-4
    for name, changed in meanwhile.items():
        assert changed.isfinite().all()
        ratio = (changed.double() / before[name].double() - 1).abs()
        assert float(ratio.median()) > 0.06
        # float16's numbers below 6e-5 have fewer bits.
        assert dtype == torch.float16 or 0.06 < float(ratio.min()) <= float(ratio.max()) <= 0.125 + 1e-9
    for name, p in tied.named_parameters():
        assert torch.equal(p, before[name]), name
        assert p.requires_grad == (name not in ("frozen", "number"))


def test_a_model_of_weights_that_are_hardly_random_is_told_from_another():
    """Log-probabilities of a model as it is initialised lie within 0.02 nats of uniform, whatever its weights are."""
    module = tiny.module(policy=PolicyConfig(tiny=TinyModel(width=32, layers=1, heads=2)))
    with pytest.raises(StopRun, match=NAMED):
        tiny.trainer().fit(module, datamodule=data("Stale"))


def sharded(rank: int, folder: str) -> Any:
    """On each of two ranks: what the check found, and how a run with a stale engine ends."""
    enter(rank)
    found: list[Any] = []
    for engine in ("Own", "Stale"):
        torch.manual_seed(0)
        module = tiny.module()
        trainer = tiny.trainer(devices=2, strategy=FSDP2Strategy())
        try:
            trainer.fit(module, datamodule=data(engine, rollouts=1))
            found.append((tiny.weights(module), module.sync_result))
        except StopRun as error:
            found.append(error.reason)
    return found


@pytest.mark.slow
def test_shards_are_changed_where_they_are_and_all_ranks_end_alike(tmp_path):
    first, second = on_two_ranks(sharded, tmp_path)
    result = first[0][1]
    assert result.changed_gap < 1e-5 < result.change
    assert result == second[0][1]
    assert NAMED in first[1]
    assert first[1] == second[1]
    torch.manual_seed(0)
    unchecked = tiny.module(guards=GuardConfig(max_sync_gap=None))
    tiny.trainer().fit(unchecked, datamodule=data("Own", rollouts=1))
    assert torch.allclose(first[0][0], tiny.weights(unchecked), atol=1e-4)
