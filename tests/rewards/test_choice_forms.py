"""Every usual way to write a choice is taken; naming several options, or taking one back, never pays."""

from __future__ import annotations

import itertools
import string

import pytest

from lit_grpo.rewards import ChoiceReward, ExactMatch, MathReward, NumericReward, Reward, score_all
from lit_grpo.rewards.code.reward import program_in
from lit_grpo.types import Completion, Prompt, RewardInput

RIGHT = [
    "<answer>B</answer>",
    "<think>x</think> <answer>(B)</answer>",
    "<answer>B. Paris</answer>",
    "Option B is correct.",
    "B. Because a dog is a mammal.",
    "The answer is b",
    "\\boxed{B}",
    "**Answer: B**",
    "B",
    "(B)",
    "b)",
    "B)",
    "[B]",
    "B.",
    "Answer: B",
    "answer: (b)",
    "The correct answer is B.",
    "The correct option is (B).",
    "The correct choice is B, because dogs bark.",
    "I choose B.",
    "So the answer is option B",
    "Therefore, B is the correct answer.",
    "B is correct",
    "(B) is correct.",
    "Final answer: B",
    "#### B",
    "\\boxed{\\text{B}}",
    "\\boxed{\\text{(B) Paris}}",
    "<answer>Option B</answer>",
    "<answer>\nB\n</answer>",
    "<answer>The answer is B</answer>",
    "<answer>b</answer>",
    "A is wrong. C is wrong. So the answer is B.",
    "<answer>A</answer> wait <answer>B</answer>",
    "The answer is A. No, the answer is B.",
    "It must be B.",
    "I'd go with B",
    "Correct answer: **B. Paris**",
    "$B$",
    "\\textbf{B}",
    "**B**",
    "The answer is $\\boxed{B}$.",
    "Answer is B) Paris",
    "B: Paris",
    "B - Paris",
    "The answer is **(B)**.",
    "<answer>B) Paris or Berlin</answer>",
    "Let me think. A dog is a mammal. Hence the answer is (B).",
    "答案是B",
    "My answer is B!",
    "The right answer is letter B.",
    "It's B.",
    "Thus the best answer is B",
    "A dog is a mammal.\n\nB",
]
"""Texts that choose B."""
WRONG = [
    "A or B",
    "B or C",
    "not B",
    "The answer is not B",
    "A, B, C, D",
    "The answer is A or B.",
    "<answer>A or B</answer>",
    "<answer>A, B</answer>",
    "<answer>not B</answer>",
    "(A) Rome (B) Paris (C) Berlin (D) Madrid",
    "A. Rome\nB. Paris\nC. Berlin\nD. Madrid",
    "Options: A) x B) y",
    "It could be B or C.",
    "B is wrong.",
    "Option B is incorrect.",
    "Option B is not correct.",
    "I don't know. Maybe B? Or C?",
    "B and C",
    "both B and C",
    "<answer></answer>",
    "<answer>B</answer><answer>C</answer>",
    "\\boxed{B} or \\boxed{C}",
    "The answer is B. Wait, the answer is C.",
    "Answer: A/B",
    "A. Because... or B.",
    "All of A, B",
    "either A or B",
    "The answer could be B.",
    "B?",
    "neither B",
    "none of the above",
    "a dog is b",
    "Bob",
    "The answer is Berlin",
    "B is not the answer.",
    "<answer>B</answer> <answer>A or C</answer>",
    "Option B is correct. No, option C is correct.",
    "B. Because a dog... Actually C.",
    "The answer is B or maybe D",
    "anything but B",
    "B is correct. C is correct.",
    "The answer is B, C",
    "The answer is B & C",
    "I am not sure it is B",
    "A. yes B. no",
    "<answer>B. Paris or C. Rome</answer>",
    "<answer>B (or C)</answer>",
    "<answer>B|C</answer>",
    "\\boxed{B, C}",
    "\\boxed{A/B}",
    "The answer is B? The answer is C.",
]
"""Texts that choose nothing, several options, or another one."""


def item(text, gold="B", reason="stop"):
    completion = Completion(0, 0, (1,), (0.0,), reason, 0)
    return RewardInput(Prompt("1", "q", (1,), answer=gold), completion, text)


def value(text, gold="B", **arguments):
    return ChoiceReward("ABCD", **arguments).score([item(text, gold)])[0].value


def value_by(reward: Reward, text: str, gold: str) -> float:
    return score_all([reward], [item(text, gold)])[reward.name][0].value


@pytest.mark.parametrize("text", RIGHT)
def test_what_chooses_is_paid(text):
    assert value(text) == 1.0


@pytest.mark.parametrize("text", WRONG)
def test_what_hedges_is_not(text):
    assert value(text) == 0.0


@pytest.mark.parametrize("text", [*RIGHT, *WRONG])
def test_one_text_is_right_for_one_option_at_most(text):
    assert sum(value(text, gold) for gold in "ABCD") <= 1


@pytest.mark.parametrize(("first", "last"), list(itertools.permutations("ABCD", 2)))
@pytest.mark.parametrize(
    "form", ["<answer>{}</answer>", "\\boxed{{{}}}", "The answer is {}.", "Option {} is correct.", "I choose ({})."]
)
def test_the_last_final_answer_is_the_one(first, last, form):
    text = f"{form.format(first)} Let me check again.\n{form.format(last)}"
    assert (value(text, first), value(text, last)) == (0.0, 1.0)


@pytest.mark.parametrize("text", ["The answer is b", "Option B is correct", "B. Because", "I choose B"])
def test_a_text_that_was_cut_off_may_go_on(text):
    assert ChoiceReward("ABCD").score([item(text, reason="length")])[0].value == 0.0


@pytest.mark.parametrize("letter", string.ascii_uppercase[:10])
def test_every_letter_is_found(letter):
    reward = ChoiceReward()
    for text in (
        f"Option {letter} is correct.",
        f"It's {letter}.",
        f"{letter}. A long reason",
        f"<answer>{letter.lower()}</answer>",
    ):
        assert reward.final_answers([item(text)]) == [letter], text


FORMS = {
    "tag": "<think>3 and 4, so 9?</think> <answer>{}</answer>",
    "boxed": "3 and 4, so 9? \\boxed{{{}}}",
    "auto": "3 and 4, so 9? The answer is {}.",
    "last_line": "3 and 4, so 9?\n{}",
}


@pytest.mark.parametrize("extract", ["auto", "tag", "boxed"])
@pytest.mark.parametrize("form", ["tag", "boxed", "auto"])
def test_all_rewards_find_the_same_final_answer(form, extract):
    rewards = [
        (MathReward(extract=extract), "7"),
        (NumericReward(extract=extract), "7"),
        (ExactMatch(extract=extract), "7"),
        (ChoiceReward(extract=extract), "B"),
    ]
    expected = float(extract in ("auto", form))
    for reward, gold in rewards:
        assert value_by(reward, FORMS[form].format(gold), gold) == expected, type(reward)
        reward.close()


def test_exact_match_takes_the_last_line_and_the_whole():
    text = FORMS["last_line"].format("seven")
    assert ExactMatch(extract="last_line").score([item(text + "\n\n", "seven")])[0].value == 1.0
    assert ExactMatch().score([item(text, "seven")])[0].value == 0.0
    assert ExactMatch().score([item("seven ", "seven")])[0].value == 1.0
    assert ExactMatch(extract="last_line").score([item(text, "seven", "length")])[0].no_answer


def test_a_program_in_the_last_answer_tag_is_the_one():
    def block(text):
        return f"```python\n{text}\n```\n"

    assert program_in(f"<answer>{block('a')}{block('b')}</answer> For comparison: {block('c')}") == "b\n"
    assert program_in(f"<answer>{block('a')}</answer><answer>{block('b')}</answer>{block('c')}") == "b\n"
    assert program_in(f"<answer>in words</answer>{block('c')}") == "c\n"
    assert program_in(f"{block('a')}<answer>{block('b')}") == "b\n"
