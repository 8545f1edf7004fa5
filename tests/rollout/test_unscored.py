"""Completions that no reward scored, from the generator to the learner's rollout and the history of prompts."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

from lit_grpo.commands.check import rollout as checks
from lit_grpo.commands.filter.sampling import FilterData
from lit_grpo.errors import StopRun, UserError
from lit_grpo.rewards import Reward
from lit_grpo.rollout.curriculum import Curriculum, CurriculumConfig
from lit_grpo.rollout.dynamic_sampling import join_groups, split_groups
from lit_grpo.rollout.loader import RolloutLoader
from lit_grpo.types import Prompt, Sampling
from tests.rollout.test_loader import Told, producer

NONE = 9
"""What the engine is told to answer where the reward shall give None."""


class Halves(Reward):
    def __init__(self, name: str = "halves", weight: float = 1.0, threshold: float | None = 1.0) -> None:
        super().__init__(weight, name)
        self.correct_threshold = threshold

    def score(self, batch: Any) -> list[Any]:
        firsts = [item.completion.token_ids[0] for item in batch]
        return [None if first == NONE else first / 2 for first in firsts]


class One(Reward):
    correct_threshold = None

    def score(self, batch: Any) -> list[Any]:
        return [1.0] * len(batch)


def made(outcomes: list[list[int]], *rewards: Reward) -> Any:
    generator = producer(Told(outcomes), rewards or [Halves()])
    questions = [Prompt(f"p{i}", "", (i,), "1") for i in range(len(outcomes))]
    return generator.produce(questions, Sampling(), len(outcomes[0]), index=0)


def test_a_rollout_says_which_have_no_score_and_warns_once() -> None:
    with pytest.warns(UserWarning, match="'halves' gave None for a completion of prompt 'p0'"):
        rollout = made([[2, NONE], [0, NONE]])
    assert rollout.scored.tolist() == [True, False, True, False]
    assert rollout.judged.tolist() == rollout.scored.tolist()
    assert rollout.sums["completions/unscored_frac"] == (2, 4)
    assert rollout.rewards["halves"].isnan().tolist() == [False, True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = made([[2, 1]])
    assert (whole.scored, whole.judged, whole.sums["completions/unscored_frac"]) == (None, None, (0, 2))


def test_another_reward_keeps_it_in_without_a_verdict() -> None:
    rollout = made([[2, NONE]], Halves(), One())
    assert rollout.reward.tolist() == [2.0, 1.0]
    assert (rollout.scored, rollout.judged.tolist()) == (None, [True, False])


def test_groups_keep_what_is_known_when_they_are_put_together_anew() -> None:
    rollout = made([[2, NONE], [0, 1]])
    groups = split_groups(rollout, [0, 1])
    turned = join_groups(groups[::-1], rollout, {})
    assert turned.judged is not None
    assert turned.scored is not None
    assert turned.judged.tolist() == [True, True, True, False]
    assert turned.scored.tolist() == turned.judged.tolist()
    # A group of another rank's rollout may not say it.
    (alone,) = split_groups(made([[0, 1]]), [0])
    joined = join_groups([alone, groups[0]], rollout, {}).judged
    assert joined is not None
    assert joined.tolist() == [True, True, True, False]


@pytest.mark.parametrize("uniform_by", ["reward", "correct"])
def test_a_group_needs_two_scored_completions_that_differ(uniform_by: Any) -> None:
    outcomes = [[NONE, 2, NONE], [NONE, 2, 2], [NONE] * 3, [NONE, 2, 0], [0, 2, 2]] * 6
    questions = [Prompt(f"p{i}", "", (i,), "1") for i in range(len(outcomes))]
    loader = RolloutLoader(
        producer(Told(outcomes), [Halves()]), questions, count=2, prompts_per_rollout=4, group_size=3,
        sampling=Sampling(), dynamic=True, uniform_by=uniform_by,
    )  # fmt: skip
    for rollout in itertools.islice(loader, 2):
        assert all(int(prompt.id[1:]) % 5 in (3, 4) for prompt in rollout.prompts)
        assert rollout.metrics["sampling/reward"] == rollout.metrics["sampling/reward"]


def test_dynamic_sampling_of_nothing_scored_ends_with_a_reason() -> None:
    questions = [Prompt(f"p{i}", "", (i,), "1") for i in range(4)]
    loader = RolloutLoader(
        producer(Told([[NONE] * 2] * 4), [Halves()]), questions, count=1, prompts_per_rollout=2, group_size=2,
        sampling=Sampling(), dynamic=True,
    )  # fmt: skip
    with pytest.raises(StopRun, match="gave 0 of 2 groups"):
        next(iter(loader))


def test_pass_rates_are_of_the_verdicts() -> None:
    groups = split_groups(made([[2, NONE, 0, 2], [NONE] * 4]), [0, 1])
    curriculum = Curriculum(CurriculumConfig(), [group.prompt for group in groups], [Halves()], 0)
    assert curriculum.outcome(groups) == [(0, "p0", pytest.approx(2 / 3))]


def test_a_filter_counts_verdicts_and_refuses_a_prompt_without_one() -> None:
    (rate,) = FilterData.rates(None, made([[2, NONE, 0, 2]]))  # type: ignore[arg-type]
    assert (rate.samples, rate.correct, rate.pass_rate, rate.reward) == (
        3,
        2,
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
    )
    with pytest.raises(UserError, match="prompt 'p1' has no pass rate: 'halves' gave None for all 2"):
        FilterData.rates(None, made([[2, 0], [NONE, NONE]]))  # type: ignore[arg-type]


def test_the_preflight_counts_what_is_scored() -> None:
    rollout = made([[2, NONE, NONE, 2], [0, 2, NONE, NONE], [NONE] * 4])
    spread = checks.spread(rollout, 8)
    assert spread.values["share"] == pytest.approx(1 / 3)
    assert spread.values["share_at_half"] == pytest.approx(1 / 3)
    assert checks.signal(rollout, [Halves()]).values == {"pass@1": pytest.approx(3 / 4), "pass@2": 1.0}
    nothing = checks.signal(made([[NONE] * 2]), [Halves()])
    assert (nothing.status, "gave None for every completion" in nothing.found) == ("fail", True)


def test_no_answer_is_said_of_what_was_looked_at() -> None:
    class Looking(Halves):
        extracts_answer = True

        def score(self, batch: Any) -> list[Any]:
            from lit_grpo.types import Score

            given = super().score(batch)
            return [value if value is None else Score(value, no_answer=value == 0) for value in given]

    rollout = made([[2, NONE, 0]], Looking(), One())
    assert torch.equal(rollout.no_answer, torch.tensor([False, False, True]))
