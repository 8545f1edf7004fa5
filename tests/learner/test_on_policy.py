"""On-policy means on-policy: rollout k is sampled with the weights that step k-1 left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.learner.run_checks import check_staleness
from lit_grpo.rollout.loader import RolloutLoader
from lit_grpo.types import Sampling
from tests import tiny


class Watch(tiny.pl.Callback):
    """Compares the log-probability that the engine gave each token with what the weights before the step say of it."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.before.append(tiny.weights(pl_module))
        with torch.no_grad():
            inputs = pl_module.policy_inputs(batch, torch.arange(len(batch.completions)))
            stats = pl_module.policy(inputs, batch.temperature, "none")
        for i, completion in enumerate(batch.completions):
            own = stats.logprobs[i, : len(completion.token_ids)]
            self.gaps.append(float((own - torch.tensor(completion.logprobs)).abs().max()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, index: int) -> None:
        self.after.append(tiny.weights(pl_module))


@pytest.mark.parametrize("updates", [1, 4])
def test_every_rollout_is_sampled_with_the_weights_of_the_step_before(updates):
    watch, recorder = Watch(), tiny.Recorder()
    module = tiny.module(updates_per_rollout=updates, minibatch_prompts=2 if updates > 1 else None)
    tiny.trainer(callbacks=[watch, recorder]).fit(module, datamodule=tiny.data(rollouts=4))
    assert recorder.versions == [(k, k) for k in range(4)]
    assert [m["rollout/staleness"] for m in recorder.metrics] == [0.0] * 4
    assert max(watch.gaps) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(watch.after[:-1], watch.before[1:], strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(watch.before, watch.after, strict=True)]
    assert all(moved), "weights that do not move would hide stale rollouts"
    assert module.optimizer_steps == 4 * updates


def test_a_loader_that_lightning_reads_ahead_is_refused(monkeypatch):
    """Without a length Lightning fetches batch 1 before step 0: the batch carries its version, and the step refuses."""
    monkeypatch.delattr(RolloutLoader, "__len__")
    with pytest.raises(RuntimeError, match="1 rollouts old, allowed are 0"):
        tiny.trainer(max_steps=3).fit(tiny.module(), datamodule=tiny.data())


def test_a_batch_from_the_future_is_refused():
    batch = tiny.rollout([1.0, 0.0], [2, 2], 2)
    for c in batch.completions:
        object.__setattr__(c, "policy_version", 1)
    with pytest.raises(RuntimeError, match="version 1, but the policy is at version 0"):
        check_staleness(batch, version=0, most=5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_temperature_is_applied_on_both_sides(temperature):
    recorder = tiny.Recorder()
    data = tiny.data(sampling=Sampling(temperature=temperature, max_new_tokens=5), rollouts=2)
    tiny.trainer(callbacks=[recorder]).fit(tiny.module(), datamodule=data)
    assert all(m["sampler_mismatch/logprob_abs_diff_max"] < 1e-5 for m in recorder.metrics)
