"""The entropy of the untouched model: measured over the completions of all ranks as long as that model is there."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.learner.initial_entropy import measure_initial_entropy, with_initial_entropy
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.state import ObjectiveState

OBJECTIVE = ObjectiveConfig(recipe="gtpo").resolve()


class Forward:
    """A model whose completions have entropies 0.25, 0.5, 0.75, ..."""

    def sequence_entropy(self, batch: Any) -> torch.Tensor:
        return torch.arange(1, batch.count + 1) / 4


def sampled(prompts: int) -> Any:
    """Two completions of each prompt that is asked for."""
    return SimpleNamespace(count=2 * prompts)


def beside_another(sums: torch.Tensor) -> torch.Tensor:
    """The other rank has more completions, of other entropies."""
    assert sums.dtype == torch.float64, "millions of tokens are summed"
    return sums + sums.new_tensor([30.0, 10.0])


def measure(objective: Any = OBJECTIVE, reduce_sum: Any = lambda sums: sums) -> float:
    return measure_initial_entropy(Forward(), objective, sampled, reduce_sum)  # type: ignore[arg-type]


def test_it_is_the_mean_over_the_completions_of_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    three: Any = SimpleNamespace(initial_entropy_prompts=3, name="gtpo")
    with caplog.at_level(logging.INFO):
        assert measure(three) == pytest.approx(21 / 4 / 6)
    assert "entropy of the untouched model: 0.8750 nats, over 6 completions" in caplog.text
    assert measure(three, beside_another) == pytest.approx((21 / 4 + 30) / (6 + 10))
    count = 2 * OBJECTIVE.initial_entropy_prompts
    assert count > 2
    assert measure() == pytest.approx((count + 1) / 8)


def test_nothing_that_could_sample_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="only RolloutDataModule lets it measure") as error:
        measure_initial_entropy(Forward(), OBJECTIVE, None, lambda sums: sums)  # type: ignore[arg-type]
    assert error.value.where == "model.objective.initial_entropy"


def state_after(rollouts: int, state: ObjectiveState, completions: Any = sampled) -> ObjectiveState:
    return with_initial_entropy(OBJECTIVE, state, rollouts, Forward(), completions, lambda s: s)  # type: ignore[arg-type]


def test_a_model_that_was_trained_on_is_not_measured() -> None:
    known = ObjectiveState(first_rollout_entropy=0.6)
    assert state_after(0, known).initial_entropy == measure()
    # From the first rollout on it is another model.
    assert state_after(1, known, pytest.fail).initial_entropy == 0.6
    with pytest.raises(UserError, match="the first rollout measured none"):
        state_after(1, ObjectiveState(), pytest.fail)
