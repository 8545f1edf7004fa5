"""What is correct: one verdict, by the primary reward of the completion's own source."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lit_grpo.rewards import ExactMatch, FormatReward, FunctionReward, Reward, RewardBySource, SourceReward
from lit_grpo.rewards.base import flipped_totals, judges_of, total_range, verdicts, weighted_range
from lit_grpo.types import Score


class Graded(Reward):
    """From -1 to 3, right from a half on."""

    correct_threshold = 0.5
    range = (-1.0, 3.0)


class Reversed(Reward):
    """A user's own reading of its values: the low ones are right."""

    correct_threshold = 0.5

    def correct(self, value: float) -> bool:
        return value <= 0.5


def scores(**values: Any) -> dict[str, list[Score]]:
    return {name: [v if isinstance(v, Score) else Score(float(v)) for v in row] for name, row in values.items()}


def test_the_first_reward_that_says_what_is_right_judges_and_no_sum_does() -> None:
    rewards = [FormatReward(weight=10.0), Graded(weight=10.0), ExactMatch()]
    given = scores(format=[10, 10, 0], graded=[0, 0.5, 3], exact_match=[1, 0, 0])
    assert verdicts(rewards, given, [""] * 3) == [False, True, True]
    assert verdicts([FormatReward()], given, [""] * 3) is None
    assert flipped_totals([FormatReward()], given, [""] * 3) is None


def test_a_mixture_asks_the_reward_of_each_source() -> None:
    both = RewardBySource([SourceReward(["a"], Graded()), SourceReward(["b"], Reversed())])
    given = scores(by_source=[3, 0, 3, 0])
    assert verdicts([both], given, ["a", "a", "b", "b"]) == [True, False, False, True]


def test_a_completion_that_the_reward_failed_on_is_not_correct() -> None:
    class Signed(Graded):
        correct_threshold = 0.0

    given = scores(signed=[0, Score(0.0, failed=True), -1])
    assert verdicts([Signed()], given, [""] * 3) == [True, False, False]


def test_a_threshold_that_no_float32_holds_is_reached_by_its_own_value() -> None:
    class NineTenths(Reward):
        correct_threshold = 0.9

    assert verdicts([NineTenths()], scores(nine_tenths=[0.9, 0.89999]), ["", ""]) == [True, False]


def test_the_opposite_verdict_mirrors_the_value_in_its_range_and_leaves_the_others() -> None:
    # Total of each: format + 2 graded. Mirrored in [-1, 3] a value v is 2 - v.
    rewards = [FormatReward(), Graded(weight=2.0)]
    given = scores(format=[10, 1, 0], graded=[0, 3, -1])
    assert flipped_totals(rewards, given, [""] * 3) == [10 + 2 * 2, 1 + 2 * -1, 0 + 2 * 3]
    plain = scores(exact_match=[0, 1])
    assert flipped_totals([ExactMatch()], plain, ["", ""]) == [1, 0]


def test_the_opposite_verdict_stays_within_the_range_of_its_own_source() -> None:
    class Narrow(Graded):
        range = (0.0, 1.0)

    both = RewardBySource([SourceReward(["a"], Graded()), SourceReward(["b"], Narrow())])
    assert flipped_totals([both], scores(by_source=[3, 1, 0]), ["a", "b", "b"]) == [-1, 0, 1]


def test_without_a_range_there_is_no_opposite() -> None:
    assert flipped_totals([Reversed()], scores(reversed=[1.0]), [""]) is None


def test_a_function_can_state_its_range() -> None:
    function = "tests.rewards.user_functions.polite"
    assert flipped_totals([FunctionReward(function)], scores(polite=[0.25]), [""]) is None
    stated = FunctionReward(function, range=(0.0, 2.0))
    assert flipped_totals([stated], scores(polite=[0.25]), [""]) == [1.75]


@pytest.mark.parametrize(("weight", "expected"), [(2.0, (-2.0, 6.0)), (-1.0, (-3.0, 1.0)), (0.0, (0.0, 0.0))])
def test_what_a_reward_can_add_to_the_total(weight: float, expected: tuple[float, float]) -> None:
    assert weighted_range(Graded(weight=weight)) == expected
    assert total_range([Graded(weight=weight), FormatReward()]) == (expected[0], expected[1] + 10)
    assert weighted_range(Reversed(weight=0.0)) == (0.0, 0.0)
    assert weighted_range(Reversed()) == (-math.inf, math.inf)


def test_where_several_rewards_could_judge_it_is_said_which_does() -> None:
    one, two = Graded(name="first"), Graded(name="second")
    assert judges_of([one]) is None
    said = judges_of([one, two])
    assert said is not None
    assert "'first'" in said
    assert "'second' could too" in said
    one.correct_threshold = None
    assert judges_of([one, two]) is None
