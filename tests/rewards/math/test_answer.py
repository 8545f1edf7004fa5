"""Where the final answer of a text stands: tags, boxes, phrases, numbers; and which form counts."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.errors import UserError
from lit_grpo.rewards import (
    AdditionReward,
    ChoiceReward,
    CountdownReward,
    MathReward,
    NumericReward,
    ReasoningGymReward,
)
from lit_grpo.rewards.math.answer import final_answer, gold_answer, last_tag
from lit_grpo.rewards.math.grade import kind_of


@pytest.fixture(scope="module")
def verifier():
    reward = MathReward(limit=30.0, workers=1)
    yield reward
    reward.close()


TAGGED = [
    # gold, text, right
    ("7", "<answer>\n7\n</answer>", True),
    ("7", "<answer>7</answer>", True),
    ("7", "<answer> $7$ </answer>", True),
    ("7", r"<answer>\boxed{7}</answer>", True),
    ("7", "<answer>The answer is 7.</answer>", True),
    ("7", "<answer>#### 7</answer>", True),
    ("7", "<answer>**7**</answer>", True),
    ("7", "<answer>x = 7</answer>", True),
    ("7", "<answer>3 + 4 = 7</answer>", True),
    ("7", "<answer>7 dollars a day</answer>", True),
    ("7", "<answer>In two days she earns 7 dollars</answer>", True),
    ("7", "<answer>7 of them</answer>", True),
    ("7", "<answer>7</answer> So the answer is 9.", True),
    ("7", r"<answer>7</answer> and not \boxed{9}", True),
    ("7", "<answer>9</answer> No: <answer>7</answer>", True),
    ("7", "Answer between <answer> and </answer>: <answer>7</answer>", True),
    ("7", "<answer>7</answer>\nUser: What is 4 + 5?\nAssistant: <answer>9</answer>", True),
    ("1/2", r"<answer>\frac{1}{2}</answer>", True),
    ("1/2", "<answer>\n$$\n\\frac{1}{2}\n$$\n</answer>", True),
    (r"\sqrt{3}", r"<answer>The side has length $\sqrt{3}$.</answer>", True),
    ("(3, 4)", "<answer>(3, 4)</answer>", True),
    ("Friday", "<answer>friday</answer>", True),
    ("B", "<answer>B</answer>", True),
    ("B", "<answer>(B) Paris</answer>", True),
    ("B", "<answer>Option B</answer>", True),
    # What used to pass.
    ("2", r"<answer>\frac{1}{2}</answer>", False),
    ("1", r"<answer>\frac{1}{2} of the cake</answer>", False),
    ("3", r"<answer>\sqrt{3}</answer>", False),
    ("4", "<answer>(3, 4)</answer>", False),
    ("7", "The answer is 7. <answer>9</answer>", False),
    ("17", r"It is \boxed{17}. <answer>9</answer>", False),
    ("7", "<answer>7</answer> Wait. <answer>9</answer>", False),
    ("7", "The answer is 7. <answer></answer>", False),
    ("7", "<answer>7</answer> Or none: <answer> \n </answer>", False),
    ("7", "<answer>7 or 9</answer>", False),
    ("7", r"<answer>\boxed{7</answer>", False),
    ("7", "<answer>I cannot tell, maybe 7</answer>", False),
    # Siblings of the same faults, without tags.
    ("2", r"He ate \frac{1}{2} of the whole cake.", False),
    ("1/2", r"He ate \frac{1}{2} of the whole cake.", True),
    ("3", r"The side has a length of \sqrt{3}.", False),
    ("4", "It is the point (3, 4).", False),
    ("2", "It covers 5^2 square feet.", False),
    ("3000", "He pays all of it (3,000).", True),
    ("18", r"He has \textbf{18} apples.", True),
    ("4", r"The answer is $\$ 4$.", True),
    ("20", "The answer is 20 $cm^2$.", True),
    ("n!", "The answer is n!.", True),
    ("5", "The answer is 5! Hooray.", True),
    ("(0,1]", "The answer is (0,1].", True),
    ("1+1=2", r"\boxed{2+3=5}", False),
    ("3+2=5", r"\boxed{2+3=5}", True),
]


@pytest.mark.parametrize(("gold", "text", "right"), TAGGED)
def test_answers_in_tags_and_out_of_them(verifier, gold, text, right):
    (verdict,) = verifier.verify([gold], [text])
    assert verdict.correct is right, verdict


@pytest.mark.parametrize(("gold", "text", "right"), [case for case in TAGGED if case[0].isdigit()])
def test_the_numeric_reward_finds_the_same_answers(reward_input, gold, text, right):
    (score,) = NumericReward().score([reward_input(text, gold)])
    assert score.value == right


@pytest.mark.parametrize(
    ("text", "auto", "auto_cut", "tag", "boxed", "last_number"),
    [
        ("<answer>9</answer>", "9", "9", "9", None, "9"),
        (r"\boxed{7} <answer>9</answer>", "9", "9", "9", "7", "9"),
        (r"<answer>\boxed{9}</answer>", "9", "9", "9", "9", "9"),
        (r"\boxed{7}", "7", "7", None, "7", "7"),
        ("The answer is 7.", "7", "7", None, None, "7"),
        ("#### 7", "7", "7", None, None, "7"),
        ("That makes 7.", "7", None, None, None, "7"),
        # A stop string may be left out of the text; a completion that was cut off gives no answer.
        ("It is 7. <answer>9", "9", None, None, None, "9"),
        (r"\boxed{7} <answer>9", "9", None, None, "7", "9"),
        ("<answer>7</answer> or <answer>9", "7", "7", "7", None, "9"),
        # Prompts are often repeated.
        ("I must use <answer> tags. The answer is 7.", "7", None, None, None, "7"),
        # A prompt may end in the opening tag.
        ("9</answer>", "9", "9", None, None, "9"),
        ("The answer is 9.\n</answer> Is it 8?", "9", "9", None, None, "8"),
        (r"It is 7 times \sqrt{3}", None, None, None, None, None),
        ("It is 1,250.50 dollars, all in all.", "1,250.50 dollars", None, None, None, "1,250.50"),
        ("", None, None, None, None, None),
    ],
)
def test_which_form_counts(text, auto, auto_cut, tag, boxed, last_number):
    assert final_answer(text, "number") == auto
    assert final_answer(text, "number", truncated=True) == auto_cut
    for extract, expected in (("tag", tag), ("boxed", boxed), ("last_number", last_number)):
        assert final_answer(text, "number", extract=extract) == expected  # type: ignore[arg-type]
        if extract != "last_number":
            assert final_answer(text, "number", truncated=True, extract=extract) == expected  # type: ignore[arg-type]
    assert final_answer(text, "number", truncated=True, extract="last_number") is None


def test_another_tag():
    text = "<answer>7</answer> <solution>9</solution>"
    assert final_answer(text, "number", answer_tag="solution") == "9"
    assert final_answer(text, "number") == "7"


def test_the_setting_reaches_scores_and_votes(reward_input):
    tagged, boxed, bare = "<answer>4</answer>", r"\boxed{4}", "4"
    texts = [tagged, boxed, bare, "<result>4</result>"]
    all_arguments: list[dict[str, Any]] = [{}, {"extract": "tag"}, {"extract": "boxed"}]
    all_arguments.append({"extract": "tag", "answer_tag": "result"})
    for reward_class in (NumericReward, MathReward):
        found = {}
        for arguments in all_arguments:
            reward = reward_class(**arguments)
            batch = [reward_input(text, "4") for text in texts]
            scores = reward.score(batch)
            found["-".join(arguments.values())] = [s.value for s in scores]
            assert reward.final_answers(batch) == ["4" if s.value else None for s in scores] or not arguments
            assert [s.no_answer for s in scores] == [not s.value for s in scores] or not arguments
            reward.close()
        found[""] = found[""][:3]
        assert found == {"": [1, 1, 1], "tag": [1, 0, 0, 0], "boxed": [0, 1, 0, 0], "tag-result": [0, 0, 0, 1]}
    choice = [reward_input(text.replace("4", "C"), "C") for text in texts[:2]]
    assert [s.value for s in ChoiceReward(extract="tag").score(choice)] == [1, 0]
    assert ChoiceReward(extract="boxed").final_answers(choice) == [None, "C"]


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(UserError, match="extract is 'tags'"):
        MathReward(extract="tags")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="extract is 'last_number'"):
        ChoiceReward(extract="last_number")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="extract is 'last_number'"):
        CountdownReward(extract="last_number")  # type: ignore[arg-type]
    for reward_class in (MathReward, NumericReward, ChoiceReward, CountdownReward, ReasoningGymReward):
        with pytest.raises(UserError, match="answer_tag is '<answer>'"):
            reward_class(answer_tag="<answer>")


@pytest.mark.parametrize(
    ("text", "value"),
    [("<answer>7</answer>", 1), ("3+4=7 <answer>\n7\n</answer>", 1), ("7 <answer>8</answer>", 0),
     ("<answer>8</answer> 7", 0), ("<answer></answer> 7", 0), ("3+4=7", 1), ("<answer>7", 1)],
)  # fmt: skip
def test_the_integer_of_a_sum_in_a_tag(reward_input, text, value):
    reward = AdditionReward()
    batch = [reward_input(text, "7")]
    assert [s.value for s in reward.score(batch)] == [value]
    assert (reward.final_answers(batch) == ["7"]) is bool(value)


MARKS = st.sampled_from(["<answer>", "</answer>", "<answer", "a", "7", " "])


@given(text=st.lists(MARKS, max_size=12).map("".join))
@settings(max_examples=400, deadline=None)
def test_the_last_complete_tag(text):
    """Against one regular expression: an opening tag, anything without another one, and the first closing tag."""
    pairs = re.findall("<answer>((?:(?!<answer>).)*?)</answer>", text)
    content, found = last_tag(text, "answer")
    assert content == (pairs[-1] if pairs else None)
    assert found is ("<answer>" in text)
    rest = text.rpartition("<answer>")[2] if "<answer>" in text else None
    assert last_tag(text, "answer", rest=True)[0] == (pairs[-1] if pairs else rest)


def test_golds_may_be_whole_solutions():
    assert gold_answer("<reasoning>3 + 4</reasoning>\n<answer>\n7\n</answer>") == "7"
    assert gold_answer(r"<answer>\boxed{7}</answer>") == "7"
    assert gold_answer("3 + 4 = 7\n#### 7") == "7"
    assert gold_answer("(0, 1]") == "(0, 1]"


def test_golds_that_are_prose_are_told_from_formulas():
    assert kind_of("Yes, for all even $n$") == "words"
    assert kind_of(r"\text{even}") == "words"
    assert kind_of(r"\begin{array}{rrr} 1 & 2 & 3 \end{array}") == "other"
    assert kind_of(r"\operatorname{lcm}(a, b)") == "other"
    assert kind_of("18 dollars") == "number"
