"""How far the policy has moved on a rollout is what its own forward passes before and after say."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from tests import tiny
from tests.learner.helpers import fit, rollout


def of_tokens(module: Any, batch: Any) -> list[list[float]]:
    out = []
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // batch.group_size].token_ids
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            rows = module.policy.model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(1)
        out.append([float(rows[len(prompt) - 1 + t, token]) for t, token in enumerate(completion.token_ids)])
    return out


def by_loops(batch: Any, module: Any) -> dict[str, float]:
    start = tiny.module()
    start.configure_model()
    before, after = of_tokens(start, batch), of_tokens(module, batch)
    divergence: list[float] = []
    change: dict[str, list[float]] = {"positive": [], "negative": []}
    for group in range(2):
        rows = range(4 * group, 4 * group + 4)
        mean = statistics.fmean(float(batch.reward[i]) for i in rows)
        for i in rows:
            for old, new in zip(before[i], after[i], strict=True):
                divergence.append(math.exp(new - old) - 1 - (new - old))
                sign = "positive" if float(batch.reward[i]) > mean else "negative"
                change[sign].append(math.exp(new) - math.exp(old))
    out = {"policy/step_kl": statistics.fmean(divergence)}
    return out | {f"policy/delta_prob_{sign}": statistics.fmean(values) for sign, values in change.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"updates_per_rollout": 3},
        {"updates_per_rollout": 3, "objective": ObjectiveConfig(recipe="raft")},
    ],
    ids=["one update", "several", "several without a ratio"],
)
def test_the_step_is_measured_against_the_policy_before_it(settings: dict[str, Any]) -> None:
    batch = rollout()
    module, watch = fit(batches=[batch], **settings)
    expected = by_loops(batch, module)
    assert expected["policy/step_kl"] > 1e-5
    if "objective" in settings:
        expected = {"policy/step_kl": expected["policy/step_kl"]}
    for key, value in expected.items():
        assert watch.metrics[0][key] == pytest.approx(value, rel=1e-3, abs=1e-7), key


def test_a_sample_says_the_same_on_average_and_changes_nothing() -> None:
    batch = rollout()
    whole, full = fit(batches=[batch])
    other, none = fit(batches=[rollout()], step_kl_samples=0)
    assert torch.equal(tiny.weights(whole), tiny.weights(other))
    assert not any(key.startswith(("policy/step_kl", "policy/delta_prob_")) for key in none.metrics[0])
    assert full.metrics[0].keys() - none.metrics[0].keys() == {
        "policy/step_kl",
        "policy/delta_prob_positive",
        "policy/delta_prob_negative",
    }


def test_where_no_step_was_taken_nothing_is_measured() -> None:
    _, watch = fit(batches=[rollout(rewards=[1.0] * 8)])
    assert "policy/step_kl" not in watch.metrics[0]


def test_a_number_below_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="step_kl_samples is -1"):
        tiny.module(step_kl_samples=-1)
