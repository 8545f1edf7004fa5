"""The advantages of a rollout: of what was scored alone, in its own places, with the histories of all ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.learner.advantages import compute_advantages
from lit_grpo.learner.batch import make_experience
from tests.learner.helpers import rollout


class Asked:
    """An objective whose advantages are the rewards, and whose history is a text."""

    def __init__(self, *fields: str) -> None:
        self.advantage = SimpleNamespace(state_fields=fields)
        # Histories of other parts are the same on every rank already.
        self.state_fields = (*fields, "beta")
        self.seen: list[Any] = []

    def advantages(self, experience: Any, state: str, reduce: Any) -> tuple[torch.Tensor, str]:
        self.seen.append((experience.rewards.tolist(), reduce))
        return experience.rewards[:, None].expand(-1, experience.width), f"{state} and this"

    def merge_states(self, states: list[str]) -> str:
        return " + ".join(states)


class Ranks:
    """Stands in for two ranks, of which the other one's value is known."""

    several = True

    def sum_or_none(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return ["the other's", value]


class NoGather(Ranks):
    def gather(self, value: Any) -> list[Any]:
        pytest.fail("one rank would wait for the other for ever")


ALONE: Any = SimpleNamespace(several=False, sum_or_none=None, gather=NoGather().gather)


def computed(objective: Any, batch: Any, ranks: Any) -> tuple[torch.Tensor, Any]:
    return compute_advantages(objective, "before", batch, make_experience(batch, "cpu"), ranks)  # type: ignore[arg-type]


def test_a_completion_without_a_score_is_never_seen_and_has_no_advantage() -> None:
    objective, batch = Asked(), rollout()
    reward = batch.reward + 1
    reward[[1, 6]] = float("nan")
    judged = torch.ones(8, dtype=torch.bool)
    judged[[1, 6]] = False
    batch = replace(batch, reward=reward, judged=judged)
    advantages, state = computed(objective, batch, ALONE)
    assert advantages.shape == (8, 6)
    assert advantages[:, 0].tolist() == [2.0, 0.0, 1.0, 2.0, 1.0, 1.0, 0.0, 2.0]
    assert objective.seen == [([2.0, 1.0, 2.0, 1.0, 1.0, 2.0], None)]
    assert state == "before and this"


def test_where_all_are_scored_nothing_is_moved() -> None:
    objective, batch = Asked("prompts"), rollout()
    advantages, state = computed(objective, batch, ALONE)
    assert advantages[:, 0].tolist() == batch.reward.tolist()
    assert state == "before and this"


def test_ranks_count_together_and_go_on_with_one_history() -> None:
    objective, ranks = Asked("prompts"), Ranks()
    _, state = computed(objective, rollout(), ranks)
    assert state == "the other's + before and this"
    assert objective.seen[0][1] == ranks.sum_or_none


def test_without_a_history_of_advantages_no_rank_waits() -> None:
    assert computed(Asked(), rollout(), NoGather())[1] == "before and this"
