"""Numbers, letters, tags, countdown, lengths, repetition, noise, functions of the user: values derived by hand."""

import math
import re
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.errors import UserError
from lit_grpo.rewards import (
    ChoiceReward,
    CosineReward,
    CountdownReward,
    ExactMatch,
    FormatReward,
    FunctionReward,
    LengthReward,
    NumericReward,
    RepetitionPenalty,
    score_all,
)
from lit_grpo.rewards.arithmetic import evaluate
from lit_grpo.rewards.format_tags import Rule
from lit_grpo.types import Completion, Prompt, RewardInput, Score

USER = "tests.rewards.user_functions"


def item(text="", answer=None, length=1, prompt_id="p", sample=0, version=0, **extra):
    completion = Completion(0, sample, (1,) * length, (-0.1,) * length, "stop", version)
    return RewardInput(Prompt(prompt_id, "q", (1,), answer, "", extra), completion, text)


def value(reward, *args, **kwargs):
    (score,) = score_all([reward], [item(*args, **kwargs)])[reward.name]
    assert reward.range[0] <= score.value <= reward.range[1]
    return score.value


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (r"\boxed{3.1415}", "3.1416", True),  # off by 3.2e-5 of the value
        (r"\boxed{3.1400}", "3.1416", False),  # 5.1e-4
        ("The answer is 1,000,050", "1000000", True),
        ("The answer is 1,000,150", "1000000", False),
        (r"\boxed{1.0000001e-9}", "1e-9", True),
        (r"\boxed{2e-9}", "1e-9", False),  # relative, never absolute
        (r"\boxed{0}", "1e-12", False),
        (r"\boxed{0.0}", "0", True),
        (r"\boxed{0.0000001}", "0", False),
        (r"\boxed{\frac{1}{3}}", "0.33333", True),
        (r"\boxed{2\frac{1}{2}}", "2.5", True),
        (r"\boxed{x = 7 \text{ cm}}", "7", True),
        (r"\boxed{5\%}", "0.05", True),
        (r"\boxed{-4}", "4", False),
        ("It is 4. Wait, it is 5.", "5", True),
        ("It is 5. Wait, it is 4.", "5", False),
    ],
)
def test_numbers_within_a_relative_tolerance(text, answer, right):
    assert value(NumericReward(), text, answer) == right


def test_numeric_edges():
    assert NumericReward().score([item("I give up.", "5")]) == [Score(0.0, no_answer=True)]
    with pytest.raises(ValueError, match="is no number"):
        NumericReward().score([item("5", "five")])
    assert value(NumericReward(tolerance=0.1), r"\boxed{109}", "100") == 1
    with pytest.raises(UserError, match="tolerance is -1"):
        NumericReward(tolerance=-1)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"), ("(C)", "C"), (r"\boxed{C}", "C"), (r"\boxed{\text{(C)}}", "C"), ("**C**", "C"), ("(c)", "C"),
        ("The answer is (C) Paris.", "C"), ("The answer is C: Paris", "C"), ("Answer: C", "C"),
        (r"First \boxed{A}, no: \boxed{C}", "C"), (r"\boxed{B \text{ or } C}", None), (r"\boxed{\text{not C}}", None),
        ("A, B, C, D", None), ("", None), ("a", None), ("The answer is (B) or (C)", None), ("I do not know.", None),
        (r"\boxed{E}", None),
    ],
)  # fmt: skip
def test_the_letter_of_an_option(text, letter):
    reward = ChoiceReward("ABCD")
    for gold in "ABCD":
        assert reward.score([item(text, gold)]) == [Score(float(letter == gold), no_answer=letter is None)], gold


def test_choice_edges():
    with pytest.raises(ValueError, match="none of ABCD"):
        ChoiceReward("ABCD").score([item("A", "E")])
    with pytest.raises(UserError, match="letters are"):
        ChoiceReward("AAB")


FORMATS = [
    # text, then its value by the rules paper, released, ordered, strict
    ("<think>a</think><answer>b</answer>", 10, 10, 10, 10),
    ("\n<think>\na\n</think>\n\n<answer> b </answer>\n", 10, 10, 10, 10),
    ("So <think>a</think> and <answer>b</answer>", 10, 10, 10, 1),
    ("<think>a</think><answer>b</answer> done", 10, 1.5, 10, 1),
    ("<think>a</think><answer>b</answer>\n\n", 10, 1.5, 10, 10),
    ("<answer>b</answer><think>a</think>", 10, 1.5, 1, 1),
    ("<think>a</think><answer></answer>", 10, 10, 1, 1),
    ("<think>a</think><answer> \n</answer>", 10, 10, 1, 1),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 10, 10, 1, 1),
    ("<think>a</think><think>b</think><answer>c</answer>", 10, 10, 1, 1),
    ("<think>a<answer>b</answer></think>", 10, 1.5, 1, 1),
    ("<answer>b<think>a</think></answer>", 10, 10, 1, 1),
    ("</think>a<think><answer>b</answer>", 10, 1.5, 1, 1),
    ("<think>a</think><answer>b", 1, 1.5, 1, 1),
    ("<think>a</think>b", 1, 1, 1, 1),
    ("a</think><answer>b</answer>", 1, 1.5, 1, 1),
    ("<answer>b</answer>", 1, 1, 1, 1),
    ("a <answer>b</answer>.", 1, 0, 1, 1),
    ("<think>a", 1, 0, 1, 1),
    ("</answer>", 1, 0, 1, 1),
    ("<Think>a</Think>", 0, 0, 0, 0),
    ("just text", 0, 0, 0, 0),
    ("", 0, 0, 0, 0),
]


@pytest.mark.parametrize(("text", "paper", "released", "ordered", "strict"), FORMATS)
def test_the_format_by_each_rule(text, paper, released, ordered, strict):
    found = {rule: value(FormatReward(rule=rule), text) for rule in get_args(Rule)}
    assert found == {"paper": paper, "released": released, "ordered": ordered, "strict": strict}
    assert value(FormatReward(), text) == paper


PIECES = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"])


@given(text=st.lists(PIECES, max_size=9).map("".join))
@settings(max_examples=400, deadline=None)
def test_the_released_rule_is_that_of_its_regular_expressions(text):
    """GTPO's reward_math.py, of 5d33811: two searches for the pairs, and one for any tag of a pair that is missing."""
    pairs = {"think": "<think>.*?</think>", "answer": "<answer>.*?</answer>$"}
    there = {tag for tag, pattern in pairs.items() if re.search(pattern, text, re.DOTALL)}
    expected = 10.0 if len(there) == 2 else 0.0
    if len(there) == 1:
        (missing,) = pairs.keys() - there
        expected = 1.5 if re.search(f"</?{missing}>", text) else 1.0
    assert value(FormatReward(rule="released"), text) == expected


def test_format_options():
    loose = FormatReward(rule="ordered", full=1, partial=0.5)
    assert value(loose, "so <think>a</think> and <answer>b</answer>.") == 1
    assert value(loose, "so <think>a</think>") == 0.5
    opened = FormatReward(opened=True, rule="strict")
    assert value(opened, "a</think><answer>b</answer>") == 10
    assert value(opened, "<think>a</think><answer>b</answer>") == 10  # text inside the thoughts
    assert value(opened, "</think><answer>b</answer>") == 1
    for rule in get_args(Rule):
        # The first opening tag is the prompt's, and earns nothing by itself.
        assert value(FormatReward(opened=True, rule=rule), "a</think> <answer>b</answer>") == 10
        assert value(FormatReward(opened=True, rule=rule), "a") == 0
    assert FormatReward(rule="released").range == (0, 10)
    assert FormatReward(rule="released", full=1).range == (0, 1.5)
    assert not FormatReward().correct(10)
    for tags in ([], ["a", "a"], ["<a>"]):
        with pytest.raises(UserError, match="tags are"):
            FormatReward(tags)
    with pytest.raises(UserError, match="rule is 'lax'"):
        FormatReward(rule="lax")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>(44 - 19) * 3</answer>", 1),
        ("<answer>3 × (44 − 19)</answer>", 1),
        (r"\boxed{(44-19) \times 3}", 1),
        (r"<answer>$(44-19) \cdot 3$</answer>", 1),
        ("<answer>(44 - 19) * 3 = 75</answer>", 1),
        ("<answer>(44 - 19) * 3 = 76</answer>", 0),
        ("The answer is (44 - 19) * 3", 1),
        ("<answer>44 + 19 + 3</answer>", 0.1),
        ("<answer>44 + 44 - 19 + 3 + 3</answer>", 0),  # numbers used twice
        ("<answer>75</answer>", 0),
        ("<answer>25 * 3</answer>", 0),
        ("<answer>44 - 19 * 3", 0.1),  # a stop string may be left out of the text
        ("<answer>(44 - 19) * 3</answer> wait <answer>44</answer>", 0),
        ("<answer>(44 - 19) ** 3</answer>", 0),
        ("<answer>(44 - 19) * 3 * 1</answer>", 0),
        ("<answer>(44 - 19) * 3 + 0</answer>", 0),
        ("<answer>__import__('os').system('true')</answer>", 0),
        ("<answer>(44-19)*3 if True else 0</answer>", 0),
        ("<answer>4419 3</answer>", 0),
        ("<answer>44 / (19 - 19) * 3</answer>", 0),
        ("", 0),
    ],
)
def test_countdown(text, expected):
    assert value(CountdownReward(partial=0.1), text, "75", nums=[19, 3, 44]) == expected


def test_countdown_edges():
    some = CountdownReward(use_all=False)
    assert value(some, "<answer>50 - 8</answer>", "42", nums=[8, 50, 3]) == 1
    assert value(some, "<answer>50 - 8 + 3 - 3</answer>", "42", nums=[8, 50, 3]) == 0
    assert value(CountdownReward(), "<answer>(1 / 3) * 9</answer>", "3", nums=[1, 3, 9]) == 1  # exact on the way
    assert value(CountdownReward(numbers="given"), "<answer>2+2</answer>", "4", given=[2, 2]) == 1
    with pytest.raises(ValueError, match="column 'nums'"):
        CountdownReward().score([item("1", "1", nums="1 2")])


NUMBERS = st.integers(0, 99).map(lambda n: (str(n), Fraction(n)))


def _joined(children):
    def join(left, sign, right):
        a, b = left[1], right[1]
        result = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b if b else None}[sign]()
        return (f"({left[0]} {sign} {right[0]})", result)

    return st.builds(join, children, st.sampled_from("+-*/"), children).filter(lambda pair: pair[1] is not None)


@given(st.recursive(NUMBERS, _joined, max_leaves=12))
@settings(max_examples=200, deadline=None)
def test_the_parser_computes_what_fractions_do(pair):
    found = evaluate(pair[0])
    assert found is not None
    assert found.value == pair[1]
    assert found == evaluate(pair[0].replace("*", r"\times ").replace("(", "{").replace(")", "}"))


@given(st.text("0123456789+-*/^(){}[] .\\fractimes_xe,'\"\n½٣", max_size=60))
@settings(max_examples=500, deadline=None)
def test_the_parser_never_raises(text):
    found = evaluate(text)
    assert found is None or isinstance(found.value, Fraction)


@pytest.mark.parametrize(
    "text", ["(" * 900, "9^9^9^9", "9^9999999", "(9^500)^500", "-" * 900, "1" * 1001, "1/" * 400 + "1", "\ud800"]
)
def test_the_parser_is_bounded(text):
    found = evaluate(text)  # unbounded, some of these have no end
    assert found is None or text.startswith("1/")


def test_length():
    linear = LengthReward(max_tokens=100)
    assert [value(linear, length=n) for n in (0, 25, 100, 500)] == [1, 0.75, 0, 0]
    cosine = LengthReward(max_tokens=100, shape="cosine", at_zero=2, at_max=-2)
    assert [value(cosine, length=n) for n in (0, 50, 100)] == pytest.approx([2, 0, -2])
    assert value(cosine, length=25) == pytest.approx(math.sqrt(2))  # 2 cos(pi / 4)
    with pytest.raises(UserError, match="max_tokens is 0"):
        LengthReward(max_tokens=0)


def test_cosine_follows_the_paper():
    reward = CosineReward(ExactMatch(), max_tokens=100)
    assert value(reward, "a", "a", length=0) == 2
    assert value(reward, "a", "a", length=50) == pytest.approx(1.5)
    assert value(reward, "a", "b", length=0) == -10
    assert value(reward, "a", "b", length=50) == pytest.approx(-5)
    assert value(reward, "a", "a", length=100) == -10
    assert (reward.correct(1.2), reward.correct(-3), reward.needs_answer) == (True, False, True)
    (score,) = reward.score([item("a", "a")])
    assert score.details == {"inner": 1.0}
    with pytest.raises(UserError, match="does not say whether an answer is right"):
        CosineReward(FormatReward(), max_tokens=100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b c d e", 0), ("a b a b a b", 2 / 5 - 1), ("no " * 100, 1 / 99 - 1), ("A a", 0), ("a a a", -0.5), ("", 0)],
)
def test_repetition(text, expected):
    assert value(RepetitionPenalty(ngram=2), text) == pytest.approx(expected)


def test_repetition_of_a_script_without_spaces():
    assert value(RepetitionPenalty(ngram=2), "他他他他") == pytest.approx(1 / 3 - 1)


@pytest.mark.slow
def test_functions_of_the_user():
    batch = [item("please", "please"), item("no", "x")]
    polite = FunctionReward(f"{USER}.polite")
    assert polite.name == "polite"
    assert [score.value for score in score_all([polite], batch)["polite"]] == [1.0, 0.0]
    both = FunctionReward(f"{USER}:both", arguments={"factor": 3}, name="x", correct_threshold=3.0)
    assert score_all([both], batch)["x"] == [Score(3.0), Score(0.0)]
    assert both.correct(3.0)
    assert score_all([FunctionReward(f"{USER}.all_at_once")], batch)["all_at_once"] == [Score(6.0), Score(2.0)]
    slowly = FunctionReward(f"{USER}.slowly", limit=2.0, concurrency=100)
    scores = score_all([slowly], [item("a", "a")] * 50 + [item("hang", "a")])["slowly"]
    assert scores == [Score(1.0)] * 50 + [Score(0.0, timed_out=True, seconds=2.0)]


@pytest.mark.slow
def test_a_function_that_hangs_or_dies_is_killed_at_its_limit():
    reward = FunctionReward(f"{USER}.hanging", limit=1.5)
    try:
        scores = reward.score([item("a", n=7), item("hang", n=1)])
        assert [(s.value, s.timed_out) for s in scores if isinstance(s, Score)] == [(7.0, False), (0.0, True)]
        dying = [item("a", n=7), item("die", n=1)]
        found = score_all([reward], dying, on_error="zero")["hanging"]
        assert [(s.value, s.failed) for s in found] == [(7.0, False), (0.0, True)]
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (f"{USER}.polit", "did you mean tests.rewards.user_functions.polite"),
        (f"{USER}.NotAFunction", "has no function"),
        (f"{USER}.strange", "of one completion and 'texts' of a batch"),
        (f"{USER}.unknown", "asks for 'reference'"),
        (f"{USER}.nothing", "asks for nothing"),
        ("no_such_module.f", "cannot be imported"),
        ("f", "no import path"),
    ],
)
def test_a_function_that_cannot_serve_is_refused(function, said):
    with pytest.raises(UserError) as caught:
        FunctionReward(function)
    assert said in str(caught.value)


def test_an_argument_that_a_function_does_not_take():
    with pytest.raises(UserError, match="no parameter 'x'"):
        FunctionReward(f"{USER}.polite", arguments={"x": 1})


def test_a_regular_expression_that_explodes_costs_its_limit():
    reward = ExactMatch(pattern="(a|aa)+$", limit=0.3)
    (score,) = reward.score([item("a" * 60 + "b", "x")])
    assert (score.value, score.timed_out, score.no_answer) == (0.0, True, True)
    with pytest.raises(UserError, match="limit is 0"):
        ExactMatch(limit=0)


def test_votes_are_in_a_normal_form():
    assert NumericReward().final_answers([item(r"\boxed{0.50}"), item(r"\boxed{\frac12}"), item("no")]) == [
        "1/2",
        "1/2",
        None,
    ]
    assert ChoiceReward().final_answers([item("(C)"), item("Answer: C"), item("B or C")]) == ["C", "C", None]
    assert CosineReward(ExactMatch(), max_tokens=10).final_answers([item(" x ")]) == ["x"]
    assert ExactMatch(pattern="(a|aa)+$", limit=0.2).final_answers([item("a" * 60 + "b")]) == [None]
