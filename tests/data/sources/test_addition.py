"""Addition problems."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.data import AdditionPrompts
from lit_grpo.errors import UserError


def check(source: AdditionPrompts) -> Sequence:
    rows = source.rows()
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert int(row.answer or "") == sum(row.extra["operands"])
    return rows


def test_all_single_digit_sums():
    rows = check(AdditionPrompts())
    assert len(rows) == 100
    assert (rows[34].id, rows[34].question, rows[34].answer) == ("addition/3+4", "3+4=", "7")


@given(
    st.integers(1, 4), st.integers(0, 2), st.integers(2, 4), st.integers(1, 40), st.integers(0, 40), st.integers(0, 9)
)
def test_drawn_problems_are_distinct_in_range_and_repeatable(low, more, operands, n, skip, seed):
    arguments = {"digits": [low, low + more], "operands": operands, "n": n, "skip": skip, "seed": seed}
    rows = check(AdditionPrompts(**arguments))
    assert len(rows) == n
    for row in rows:
        for number in row.extra["operands"]:
            assert low <= len(str(number)) <= low + more
    assert [r.id for r in AdditionPrompts(**arguments).rows()] == [r.id for r in rows]


def test_skip_makes_disjoint_sets():
    train = check(AdditionPrompts(2, n=300, seed=3))
    held_out = check(AdditionPrompts(2, n=100, skip=300, seed=3))
    assert not {r.id for r in train} & {r.id for r in held_out}
    assert {r.id for r in train} != {r.id for r in AdditionPrompts(2, n=300, seed=4).rows()}


def test_numbers_of_any_size():
    assert len(check(AdditionPrompts(30, operands=3, n=50))[0].question) == 93


def test_the_template_is_used():
    row = AdditionPrompts(operands=3, template="What is {c} + {b} + {a}?", n=1).rows()[0]
    a, b, c = row.extra["operands"]
    assert row.question == f"What is {c} + {b} + {a}?"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"digits": 0}, "digits"),
        ({"digits": [3, 2]}, "digits"),
        ({"digits": [1, 2, 3]}, "digits"),
        ({"operands": 1}, "operands"),
        ({"n": 0}, "n"),
        ({"n": 101}, "n"),
        ({"n": 60, "skip": 60}, "n"),
        ({"digits": 4}, "n"),
        ({"skip": 5}, "skip"),
        ({"template": "{a}+="}, "template"),
        ({"template": "{a}+{b}+{c}="}, "template"),
        ({"template": "{a+{b}="}, "template"),
    ],
)
def test_bad_arguments_are_refused(arguments, key):
    with pytest.raises(UserError) as caught:
        AdditionPrompts(**arguments)
    assert caught.value.where == f"AdditionPrompts.{key}"
    assert caught.value.remedy
