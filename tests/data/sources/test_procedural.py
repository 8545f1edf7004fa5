"""Problems made on the spot: countdown, and the tasks of reasoning-gym with their own scores."""

from __future__ import annotations

import ast
import itertools
import operator
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.data import CountdownPrompts, JsonlPrompts, ReasoningGymPrompts, Row
from lit_grpo.errors import UserError
from lit_grpo.rewards import ReasoningGymReward
from lit_grpo.types import Completion, Prompt, RewardInput
from tests.paths import SHARED

DATA = SHARED / "data"
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)  # type: ignore[arg-type]
    assert isinstance(node, ast.BinOp)
    return Fraction(SIGNS[type(node.op)](value(node.left), value(node.right)))


def check(rows, levels, targets=(10, 100)):
    problems = set()
    for row in rows:
        nums, target = row.extra["nums"], row.extra["target"]
        assert len(nums) == row.extra["level"] in levels
        assert targets[0] <= target <= targets[1]
        assert target not in nums
        assert row.answer == str(target)
        assert f"{nums}" in row.question
        assert f"equal to {target}." in row.question
        tree = ast.parse(row.extra["solution"], mode="eval").body
        assert value(tree) == target
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert Counter(used) == Counter(nums), "each number once"
        problems.add((tuple(sorted(nums)), target))
    assert len(problems) == len(rows) == len({row.id for row in rows})


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(0, 2), st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 20))
def test_every_countdown_problem_can_be_solved_and_comes_once(fewest, more, seed, n, skip):
    arguments = {"numbers": [fewest, fewest + more], "seed": seed, "n": n, "skip": skip}
    rows = CountdownPrompts(**arguments).rows()
    check(rows, range(fewest, fewest + more + 1))
    assert [r.question for r in CountdownPrompts(**arguments).rows()] == [r.question for r in rows]


def test_levels_take_turns_and_skip_makes_disjoint_sets():
    rows = CountdownPrompts(n=90, numbers=[3, 5]).rows()
    assert Counter(row.extra["level"] for row in rows) == {3: 30, 4: 30, 5: 30}
    rest = CountdownPrompts(n=30, numbers=[3, 5], skip=90).rows()
    both = [(tuple(sorted(r.extra["nums"])), r.extra["target"]) for r in (*rows, *rest)]
    assert len(set(both)) == 120
    assert {r.id for r in rows}.isdisjoint(r.id for r in rest)
    assert [r.question for r in CountdownPrompts(n=9, seed=1).rows()] != [r.question for r in rows[:9]]


def test_brute_force_agrees_that_small_problems_can_be_solved():
    def reachable(values):
        if len(values) == 1:
            return {values[0]}
        found = set()
        for a, b in itertools.permutations(range(len(values)), 2):
            rest = [v for i, v in enumerate(values) if i not in (a, b)]
            x, y = values[a], values[b]
            for joined in (x + y, x - y, x * y, *([x / y] if y else [])):
                found |= reachable([*rest, joined])
        return found

    for row in CountdownPrompts(n=15, largest=20, targets=[1, 50]).rows():
        assert row.extra["target"] in reachable([Fraction(n) for n in row.extra["nums"]])


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not beside the checkout")
def test_made_and_published_problems_have_the_same_columns():
    published = JsonlPrompts(str(DATA / "countdown_500.jsonl.gz")).rows()
    check(published, (3, 4))
    made = CountdownPrompts(n=1).rows()[0]
    assert {**made.extra, "source": ""}.keys() == published[0].extra.keys()
    assert {type(v) for v in made.extra["nums"]} == {int}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"numbers": 1}, "numbers"),
        ({"numbers": [4, 3]}, "numbers"),
        ({"numbers": [3, 4, 5]}, "numbers"),
        ({"largest": 1}, "largest"),
        ({"targets": [5, 4]}, "targets"),
        ({"n": 0}, "n"),
        ({"template": "{numbers}"}, "template"),
    ],
)
def test_bad_countdown_arguments_are_refused(arguments, key):
    with pytest.raises(UserError) as caught:
        CountdownPrompts(**arguments)
    assert caught.value.where == f"CountdownPrompts.{key}"
    assert caught.value.remedy


def test_more_problems_than_there_are_is_said():
    with pytest.raises(UserError, match="there are no more than about"):
        CountdownPrompts(n=50, numbers=2, largest=3, targets=[1, 9]).rows()


# reasoning-gym.


def reward_input(row: Row, text: str) -> RewardInput:
    prompt = Prompt(row.id, row.question, (1,), row.answer, "", row.extra)
    return RewardInput(prompt, Completion(0, 0, (1,), (0.0,), "stop", 0), text)


def test_tasks_of_reasoning_gym_and_their_own_scores():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    source = ReasoningGymPrompts("leg_counting", n=3, seed=5, config={"max_animals": 4})
    rows = source.rows()
    assert [row.id for row in rows] == [f"leg_counting/5/{i}" for i in range(3)]
    assert [r.question for r in ReasoningGymPrompts("leg_counting", n=3, seed=6).rows()] != [r.question for r in rows]
    # Right by an oracle that is not one string: any valid assignment counts.
    free = ReasoningGymPrompts("countdown", n=1, seed=2).rows()[0]
    entry = free.extra["reasoning_gym"]["entry"]
    reward = ReasoningGymReward(workers=1, limit=60)
    try:
        scores = reward.score(
            [
                reward_input(rows[0], f"Let me count. <answer> {rows[0].answer} </answer>"),
                reward_input(rows[0], f"<answer>{rows[0].answer}</answer> or rather <answer>no idea</answer>"),
                reward_input(rows[1], str(rows[1].answer)),
                reward_input(free, f"<answer>{entry['metadata']['expression']}</answer>"),
                reward_input(free, "<answer>__import__('os')._exit(1)</answer>"),
            ]
        )
    finally:
        reward.close()
    assert [s.value for s in scores[:1]] == [1.0]
    assert scores[1].value < 1
    assert (scores[2].value, scores[2].no_answer) == (0.0, True)
    assert scores[3].value == 1.0
    assert scores[4].value < 1
    assert reward.correct(scores[3].value)
    assert not reward.correct(scores[4].value)


def test_bad_reasoning_gym_arguments_are_refused():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    with pytest.raises(UserError, match="has no task 'leg_countin'") as caught:
        ReasoningGymPrompts("leg_countin").rows()
    assert caught.value.remedy == "did you mean 'leg_counting'?"
    with pytest.raises(UserError, match="does not take") as caught:
        ReasoningGymPrompts("leg_counting", config={"legs": 3}).rows()
    assert "max_animals" in (caught.value.remedy or "")
    with pytest.raises(UserError, match="does not take"):
        ReasoningGymPrompts("leg_counting", config={"min_animals": -3}).rows()
    with pytest.raises(UserError, match="is no problem of reasoning-gym"):
        ReasoningGymReward(pattern="(?s)^(.+)$").score([reward_input(Row("x", "q"), "1")])
    for broken in ("(", "x", "(a)(b)"):
        with pytest.raises(UserError, match="the pattern"):
            ReasoningGymReward(pattern=broken)
