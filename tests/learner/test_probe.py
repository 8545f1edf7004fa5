"""Completions that the objective multiplies by zero do not go through the model, and metrics still speak of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.learner import batch as shape
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.utils import random as rng
from tests import tiny
from tests.learner.helpers import fit, rollout

REWARDS = [1.0, 0.0, 0.0, 1.0] + [1.0] * 4 + [0.0] * 4
LENGTHS = [3, 1, 5, 2, 4, 0, 1, 6, 6, 2, 3, 5]
"""One group with a gradient, two without."""


def run(
    monkeypatch: Any, probe: int | None, rewards: Any = REWARDS, **changes: Any
) -> tuple[Any, dict[str, float], list[int]]:
    """The module after one rollout, its metrics, and the completions of each of the policy's passes."""
    passes: list[int] = []
    forward = Policy.forward

    def counted(self: Any, batch: Any, *args: Any, **rest: Any) -> Any:
        passes.append(batch.shape[0])
        return forward(self, batch, *args, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "verify_against_model_forward", lambda *_, **__: None)
        patch.setattr(Policy, "forward", counted)
        batch = rollout(rewards=rewards, lengths=LENGTHS, group_size=4)
        module, watch = fit(
            batches=[batch], zero_advantage_samples=probe, step_kl_samples=0, micro_batch_size=None, **changes
        )
    return module, watch.metrics[0], passes


def test_the_update_is_the_same_and_the_others_stay_away(monkeypatch):
    everything, full, passes = run(monkeypatch, None)
    assert passes == [4, 7]  # an empty completion has nothing to say
    for probe, expected in ((0, [4]), (2, [4, 2])):
        module, metrics, passes = run(monkeypatch, probe)
        assert passes == expected
        assert torch.equal(tiny.weights(module), tiny.weights(everything))
        assert metrics["loss"] == full["loss"]
        assert metrics["completions/filtered_frac"] == full["completions/filtered_frac"]


def test_entropy_is_that_of_the_learning_and_the_sampled_weighted_by_their_tokens(monkeypatch):
    everything, full, _ = run(monkeypatch, None)
    of_token = everything.step_result.snapshot.entropy
    assert full["policy/entropy"] == pytest.approx(float(of_token.nansum()) / sum(LENGTHS), rel=1e-6)
    module, metrics, _ = run(monkeypatch, 2)
    seed = rng.derive_seed("probe", rng.run_seed(), 0, 0, 0)
    batch = rollout(rewards=REWARDS, lengths=LENGTHS, group_size=4)
    rows, weights = shape.probe(batch, torch.arange(4, 12), 2, seed)
    expected = (of_token[:4].sum() + (of_token[rows].sum(1) * weights).sum()) / sum(LENGTHS)
    assert metrics["policy/entropy"] == pytest.approx(float(expected), rel=1e-6)
    seen = module.step_result.snapshot.entropy.isfinite().all(1).nonzero()[:, 0].tolist()
    assert seen == sorted([0, 1, 2, 3, *rows.tolist()])
    assert module.step_result.snapshot.logprobs.isfinite().all(1).nonzero()[:, 0].tolist() == seen
    torch.testing.assert_close(module.step_result.snapshot.entropy[seen], of_token[seen])


def test_the_pass_before_several_updates_leaves_them_out_too(monkeypatch):
    everything, full, passes = run(monkeypatch, None, updates_per_rollout=2)
    assert passes == [11, 4, 7, 4, 7]
    module, metrics, passes = run(monkeypatch, 2, updates_per_rollout=2)
    assert passes[1::2] == [4, 4]
    assert passes[2] == passes[4] == 2
    assert 4 + 2 <= passes[0] <= 4 + 2 + 2, "who learns, and the sample of either update"
    torch.testing.assert_close(tiny.weights(module), tiny.weights(everything), atol=1e-5, rtol=0)
    assert metrics["loss"] == pytest.approx(full["loss"], abs=1e-5)
    asked = module.step_result.snapshot.logprobs.isfinite().all(1)
    assert asked.sum() == passes[0]
    torch.testing.assert_close(
        module.step_result.snapshot.logprobs[asked], everything.step_result.snapshot.logprobs[asked]
    )
    assert module.step_result.snapshot.logprobs[~asked].isnan().all()
    assert all(value == value for value in metrics.values()), "no NaN of a completion that was not asked"
    module, _, passes = run(monkeypatch, 0, rewards=[1.0] * 12, updates_per_rollout=2)
    assert passes == []
    assert module.step_result.snapshot.logprobs is None


@pytest.mark.parametrize(
    "objective", [{"recipe": "grpo", "top_entropy": 0.5}, {"recipe": "grpo", "kl_coef": 0.1}, {"recipe": "lopti"}]
)
def test_what_advantages_or_masks_are_made_from_is_asked_of_all(monkeypatch, objective):
    _, _, passes = run(monkeypatch, 0, updates_per_rollout=2, objective=ObjectiveConfig(**objective))
    assert passes[0] == 12


def test_the_sample_has_no_bias():
    lengths = [1, 9, 4, 0, 2, 2, 7, 5]
    batch = rollout(rewards=[0.0] * 8, lengths=lengths, group_size=4)
    worth = torch.tensor([3.0, 1.0, -2.0, 50.0, 5.0, 0.5, 4.0, 1.0], dtype=torch.float64)
    n = torch.tensor(lengths, dtype=torch.float64)
    tokens, values = [], []
    for seed in range(3000):
        rows, weights = shape.probe(batch, torch.arange(8), 3, seed)
        assert 1 <= len(rows) <= 3
        tokens.append(float((weights * n[rows]).sum()))
        values.append(float((weights * worth[rows]).sum()))
    assert tokens == pytest.approx([30.0] * 3000)
    found = torch.tensor(values)
    expected = float(worth[n > 0].sum())
    assert abs(float(found.mean()) - expected) < 4 * float(found.std()) / 3000**0.5
    assert float(found.std()) > 0.5


def test_a_rollout_without_gradient_runs_the_sample_alone(monkeypatch):
    _, metrics, passes = run(monkeypatch, 3, rewards=[1.0] * 12)
    assert len(passes) == 1
    assert 1 <= passes[0] <= 3
    assert metrics["policy/entropy"] > 0
    assert metrics["optim/empty_steps"] == 1
    module, metrics, passes = run(monkeypatch, 0, rewards=[1.0] * 12)
    assert passes == []
    assert "policy/entropy" not in metrics
    assert module.step_result.snapshot.entropy is None


def test_a_negative_number_is_refused():
    with pytest.raises(UserError, match="zero_advantage_samples is -1"):
        tiny.module(zero_advantage_samples=-1)


@pytest.mark.parametrize("count", [2, 4])
def test_two_of_a_group_have_no_bias_either_and_read_half_as_many_prompts(count):
    lengths = [1, 9, 4, 0, 2, 2, 7, 5, 3, 3, 1, 6]
    batch = rollout(rewards=[0.0] * 12, lengths=lengths, group_size=4)
    multiplicity = torch.tensor([1.0, 2.0] * 6, dtype=torch.float64)
    worth = torch.tensor([3.0, 1.0, -2.0, 50.0, 5.0, 0.5, 4.0, 1.0, -3.0, 2.0, 8.0, 0.2], dtype=torch.float64)
    n = torch.tensor(lengths, dtype=torch.float64)
    values, pairs = [], 0
    for seed in range(3000):
        rows, weights = shape.probe(batch, torch.arange(12), count, seed, multiplicity, per_group=2)
        assert 1 <= len(rows) <= count
        assert len({int(row) // 4 for row in rows}) <= count // 2
        assert float((weights * n[rows]).sum()) == pytest.approx(float((multiplicity * n).sum()))
        pairs += len(rows) > count // 2
        values.append(float((weights * worth[rows]).sum()))
    found, expected = torch.tensor(values), float((multiplicity * worth)[n > 0].sum())
    assert abs(float(found.mean()) - expected) < 4 * float(found.std()) / 3000**0.5
    assert pairs > 2000, "mostly two different completions of a group"
