"""Before the first update of a rollout engine and learner must agree, or the run stops and says why."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import StopRun
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.types import Sampling
from tests import tiny
from tests.learner.helpers import fit, rollout


def run(module: Any, **changes: Any) -> Any:
    watch = tiny.Recorder()
    tiny.trainer(callbacks=[watch]).fit(module, datamodule=tiny.data(**changes))
    return watch


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_on_one_side_only_stops_the_run_before_its_first_update(monkeypatch, temperature):
    generate = TransformersEngine.generate

    def forgets(self: Any, requests: Any, sampling: Any) -> Any:
        return generate(self, requests, Sampling(max_new_tokens=sampling.max_new_tokens))

    # A model that is sure of its tokens: a random one is so flat that temperature hardly shows.
    policy = PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2))
    module = tiny.module(policy=policy)
    module.configure_model()
    assert module.policy is not None
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.mul_(3)
    before = tiny.weights(module)
    monkeypatch.setattr(TransformersEngine, "generate", forgets)
    with pytest.raises(StopRun, match=r"temperature, top_p or top_k applied on one side only"):
        run(module, sampling=Sampling(temperature=temperature, max_new_tokens=5))
    assert torch.equal(tiny.weights(module), before)


def test_an_engine_with_other_weights_stops_the_run_in_the_rollout_that_shows_it(monkeypatch):
    module = tiny.module()

    class Spoil(pl.Callback):
        """After the first rollout the learner's weights move without the engine being told."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                with torch.no_grad():
                    for parameter in pl_module.policy.parameters():
                        parameter.mul_(2)

    with pytest.raises(StopRun, match=r"rollout 2: .* nats on average, allowed are 0.1 \(model.guards.max_engine_gap"):
        tiny.trainer(callbacks=[Spoil()]).fit(module, datamodule=tiny.data())
    assert module.optimizer_steps == 1


def test_null_switches_a_guard_off(monkeypatch):
    invented = tiny.rollout([1.0, 0.0, 0.0, 1.0], [2, 3, 1, 2], 4)
    for completion in invented.completions:
        object.__setattr__(completion, "logprobs", tuple([-9.0] * len(completion.token_ids)))
    with pytest.raises(StopRun):
        fit(1, batches=[invented])
    module, _ = fit(1, batches=[invented], guards=GuardConfig(max_engine_gap=None))
    assert module.optimizer_steps == 1


class Drop(pl.Callback):
    """Dropout in the model, after it was checked."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def dropped(layer: Any, inputs: Any, output: Any) -> Any:
            return torch.nn.functional.dropout(output, 0.3)

        pl_module.policy.model.base_model.layers[0].mlp.register_forward_hook(dropped)


def test_dropout_in_the_learner_is_named():
    module = tiny.module(
        policy=PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2)),
        updates_per_rollout=2,
        guards=GuardConfig(max_engine_gap=None),
    )
    with pytest.raises(StopRun, match=r"the ratio before the first update of rollout 1 is not 1.*\(1\) dropout active"):
        tiny.trainer(callbacks=[Drop()]).fit(module, datamodule=tiny.data())


def test_no_alarm_over_a_healthy_run_with_several_updates():
    watch = run(tiny.module(updates_per_rollout=2, guards=GuardConfig(max_engine_gap=1e-4, max_ratio_gap=1e-5)))
    assert len(watch.metrics) == 3


def test_a_first_rollout_without_ends_warns():
    cut = rollout()
    for completion in cut.completions:
        object.__setattr__(completion, "finish_reason", "length")
    with pytest.warns(UserWarning, match=r"100% of the first completions were cut .*max_new_tokens"):
        fit(1, batches=[cut])


class Veto(pl.Callback):
    def __init__(self, steps: set[int]) -> None:
        self.steps, self.seen = steps, []  # type: ignore[var-annotated]

    def veto_update(self, trainer: Any, module: Any, metrics: dict[str, float]) -> str | None:
        self.seen.append(dict(metrics))
        return "the norm looks odd" if len(self.seen) - 1 in self.steps else None


def test_a_callback_can_leave_a_step_out():
    veto = Veto({1})
    with pytest.warns(UserWarning, match="skipped.*the norm looks odd"):
        module, watch = fit(3, callbacks=[veto])
    assert (module.optimizer_steps, module.skipped_steps) == (2, 1)
    assert torch.equal(watch.policy[0], watch.policy[1])
    assert not torch.equal(watch.policy[1], watch.policy[2])
    assert all(set(seen) == {"loss", "optim/grad_norm"} for seen in veto.seen)
    assert watch.metrics[1]["optim/lr"] == watch.metrics[0]["optim/lr"]


def test_too_many_vetoed_steps_in_a_row_end_the_run():
    with pytest.raises(StopRun, match="2 optimizer steps in a row were skipped: the norm looks odd"):
        fit(3, callbacks=[Veto({0, 1, 2})], max_skipped_steps=2)


def test_a_critic_has_a_norm_of_its_own():
    veto = Veto(set())
    fit(1, callbacks=[veto], objective=ObjectiveConfig(recipe="ppo"))
    assert set(veto.seen[0]) == {"loss", "optim/grad_norm", "critic/grad_norm"}


@pytest.mark.parametrize("changes", [{}, {"updates_per_rollout": 2}, {"objective": ObjectiveConfig(recipe="gtpo")}])
def test_what_the_learner_said_before_the_update_is_within_reach(changes):
    """The engine samples with the same weights, so its log-probabilities are the learner's."""

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, index: int) -> None:
            assert (
                pl_module.step_result.snapshot.entropy is None
                or pl_module.step_result.snapshot.entropy.shape == pl_module.step_result.snapshot.logprobs.shape
            )
            for own, completion in zip(pl_module.step_result.snapshot.logprobs, batch.completions, strict=True):
                sampled = torch.tensor(completion.logprobs)
                torch.testing.assert_close(own[: len(sampled)], sampled, atol=1e-5, rtol=0.0)

    tiny.trainer(callbacks=[Look()]).fit(tiny.module(**changes), datamodule=tiny.data())
