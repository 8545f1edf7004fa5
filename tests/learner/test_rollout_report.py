"""The numbers of a rollout: of all ranks, each under its own key, and what the objective remembers of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.learner.budget import MicroBatchBudget
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.learner.optimizer_step import OptimizerBundle, StepCounters
from lit_grpo.learner.rollout_report import report_rollout, state_after_rollout
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.state import ObjectiveState
from tests.learner.helpers import rollout

ALONE = SimpleNamespace(several=False, world_size=1, sum_or_none=None, max_or_none=None)


def bundle(prefix: str, lr: float) -> OptimizerBundle:
    return OptimizerBundle(prefix, torch.optim.SGD([torch.zeros(1)], lr=lr), None, None)


POLICY, CRITIC = bundle("optim/", 0.5), bundle("critic/", 0.25)


def measured(tokens: float = 100.0) -> StepMetrics:
    metrics = StepMetrics()
    metrics.add("completions/tokens", tokens)
    return metrics


def report(sampling: dict[str, float] | None = None, **changes: Any) -> dict[str, float]:
    given: dict[str, Any] = {
        "metrics": measured(),
        "ranks": ALONE,
        "counters": StepCounters(
            optimizer_steps=2, critic_steps=3, skipped_steps=5, empty_steps=7, clipped_steps=11, repeated_steps=13
        ),
        "bundles": [POLICY],
        "budget": MicroBatchBudget(),
        "state": ObjectiveState(),
        "policy_version": 17,
        "staleness": 1,
        "seconds": 2.0,
    }
    return report_rollout(replace(rollout(), metrics=sampling or {}), **(given | changes))


def test_every_count_stands_under_its_own_key() -> None:
    assert report() == {
        "completions/tokens": 100.0,
        "optim/steps": 2.0,
        "optim/skipped_steps": 5.0,
        "optim/empty_steps": 7.0,
        "optim/clipped_steps": 11.0,
        "optim/repeated_steps": 13.0,
        "optim/lr": 0.5,
        "rollout/policy_version": 17.0,
        "rollout/staleness": 1.0,
        "time/update": 2.0,
        "time/tokens_per_second": 50.0,
    }


def test_what_a_run_has_beside_is_there_where_it_has_it() -> None:
    found = report(
        bundles=[POLICY, CRITIC],
        budget=MicroBatchBudget(tokens=512),
        state=ObjectiveState(beta=0.0, initial_entropy=0.0),
    )
    assert {key: found[key] for key in found.keys() - report().keys()} == {
        "critic/lr": 0.25,
        "critic/steps": 3.0,
        "memory/micro_batch_tokens": 512.0,
        "policy/kl_beta": 0.0,
        "policy/entropy_initial": 0.0,
    }
    assert found["optim/lr"] == 0.5


def test_what_is_no_mean_and_what_sampling_measured_are_there_too() -> None:
    metrics = measured()
    for key, value in (("weight", 1.0), ("weight_sq", 2.0), ("sequence_weight_sq", 3.0)):
        metrics.add(f"sampler_mismatch/{key}", value)
    found = report({"rollout/kept": 4.0}, metrics=metrics)
    assert found["sampler_mismatch/ess"] == 0.5
    assert found["rollout/kept"] == 4.0


@pytest.mark.parametrize(
    ("sampling", "busy"),
    [
        ({"time/generate": 4.0, "time/reward": 3.0, "time/sync": 1.0, "time/wait": 50.0}, 10.0),
        # Sampled while the learner was at work on another: only what it had to wait is its time.
        (
            {"time/learner_idle": 0.0, "time/generate": 70.0, "time/reward": 7.0, "time/sync": 1.0, "time/wait": 5.0},
            8.0,
        ),
    ],
)
def test_the_rate_of_tokens_is_over_the_time_that_a_rollout_costs(sampling: dict[str, float], busy: float) -> None:
    assert report(sampling)["time/tokens_per_second"] == pytest.approx(100.0 / busy)
    assert report(seconds=0.0)["time/tokens_per_second"] == 0.0


def test_the_numbers_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has twice the tokens, a larger norm, and a key that this one does not know."""
    metrics = measured()
    metrics.maximum("optim/grad_norm_max", 1.0)
    other = [2 * 100.0, 1.0, 0.75, 1.0]

    def gather(keys: list[Any], mine: Any) -> None:
        keys[:] = [mine, (["completions/tokens", "loss"], mine[1], mine[2])]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    ranks = SimpleNamespace(
        several=True,
        world_size=2,
        sum_or_none=lambda sums: sums + torch.tensor(other, dtype=sums.dtype),
        max_or_none=lambda maxima: maxima.clamp(min=4.0),
    )
    found = report(metrics=metrics, ranks=ranks)
    assert found["completions/tokens"] == 150.0
    assert found["loss"] == 0.75
    assert found["optim/grad_norm_max"] == 4.0
    assert found["time/tokens_per_second"] == 75.0


def test_the_entropy_of_the_first_rollout_alone_is_remembered() -> None:
    objective = ObjectiveConfig(recipe="grpo").resolve()
    values = {"policy/entropy_sequence": 0.7, "policy/entropy": 0.2}
    assert state_after_rollout(objective, ObjectiveState(), values, 1).first_rollout_entropy == 0.7
    for version in (0, 2):
        assert state_after_rollout(objective, ObjectiveState(), values, version).first_rollout_entropy is None
    assert state_after_rollout(objective, ObjectiveState(), {"policy/entropy": 0.2}, 1).first_rollout_entropy is None


def test_an_adaptive_penalty_goes_by_the_kl_that_was_measured() -> None:
    objective = ObjectiveConfig(recipe="trpo_penalty", trpo_target_kl=0.1).resolve().for_run(6, 2)
    state = ObjectiveState(beta=1.0)
    for kl, beta in ((1e3, 2.0), (1e-9, 0.5)):
        values = {"policy/approx_kl_k3": kl, "policy/approx_kl_k1": 0.1}
        assert state_after_rollout(objective, state, values, 2).beta == beta
    assert state_after_rollout(objective, state, {}, 2).beta == 1.0
