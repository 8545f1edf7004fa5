"""The form of an answer that prompts ask for, and the check of the verifier in that form."""

from typing import Any

import pytest

from lit_grpo.commands.check import prompts
from lit_grpo.commands.check.asked_form import asked_forms
from lit_grpo.data.template import NAMED_TEMPLATES
from lit_grpo.rewards import (
    AdditionReward,
    ChoiceReward,
    ExactMatch,
    FormatReward,
    GatedReward,
    NumericReward,
    Reward,
)
from lit_grpo.types import Prompt
from tests.commands.check.test_parts import Tokenizer

GTPO = (
    "You are a helpful assistant for solving math problems.\nGiven a question, first think step by step between "
    "<reasoning> and </reasoning>.\nThen, give the final answer between <answer> and </answer>.\n3 and 4?"
)
R1 = NAMED_TEMPLATES["r1"].text.replace("{question}", "3 and 4?")
QWEN = NAMED_TEMPLATES["qwen_math"].text.replace("{system}", NAMED_TEMPLATES["qwen_math"].system or "")


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        (GTPO, ("<reasoning>{answer}</reasoning><answer>{answer}</answer>",
                "<reasoning>{answer}</reasoning>\n<answer>\n{answer}\n</answer>")),
        (R1, ("{answer}</think><answer>{answer}</answer>", "{answer}</think>\n<answer>\n{answer}\n</answer>")),
        ("Think in <think></think>. Answer in <answer></answer>. 3+4? <answer>",
         ("{answer}</answer>", "{answer}\n</answer>")),
        ("Answer inside <answer> as \\boxed{}.",
         (r"<answer>\boxed{{answer}}</answer>", "<answer>\n\\boxed{{answer}}\n</answer>")),
        (QWEN, (r"\boxed{{answer}}",)),
        ("Think in <think></think>, then put it in \\boxed{}.",
         ("<think>{answer}</think>\\boxed{{answer}}", "<think>{answer}</think>\n\\boxed{{answer}}")),
        ("End with #### <number>.", ("#### {answer}",)),
        ("Give the number after ####.", ("#### {answer}",)),
        ("Q: 1+1? A: It is 2.\n#### 2\nQ: 2+2? A:", ("#### {answer}",)),
        ("#### Task\nWhat is 3+4?", ()),
        ("End with 'The answer is X'.", ("The answer is {answer}",)),
        ("The last line should be of the form Answer: $Answer (without quotes)", ("Answer: {answer}",)),
        ("3+4=", ()),
        ("What is 3+4? Answer:", ()),
        ("Is the answer: yes or no", ()),
        ("x < answer and a > b", ()),
    ],
)  # fmt: skip
def test_the_form_is_told_from_the_prompt(text, forms):
    assert asked_forms([text]) == forms


def test_one_question_does_not_speak_for_the_others():
    plain = [f"{n}+1=" for n in range(3)]
    assert asked_forms([*plain, r"What does \boxed{5} print?"]) == ()
    assert asked_forms([GTPO, GTPO, "3+4="])[0].startswith("<reasoning>")
    assert asked_forms([]) == ()


def golds(text: str, answers: Any = range(10)) -> list[Prompt]:
    return [Prompt(f"p{a}", "q", tuple(map(ord, text)), str(a)) for a in answers]


class Boxed(NumericReward):
    """Reads nothing but boxes."""

    def __init__(self) -> None:
        super().__init__(extract="boxed")


def gated() -> Reward:
    gate = FormatReward(tags=["reasoning", "answer"], rule="strict")
    return GatedReward(NumericReward(extract="tag"), gate)


@pytest.mark.parametrize(
    ("text", "reward", "status", "said"),
    [
        (GTPO, NumericReward(), "pass", "<reasoning>{answer}</reasoning><answer>{answer}</answer>', which the prompts"),
        (GTPO, gated(), "pass", "all 10 golds as '<reasoning>"),
        (GTPO, AdditionReward(), "pass", "all 10 golds"),
        (GTPO, ExactMatch(pattern="<answer>\n(.*)\n</answer>"), "pass", r"\n<answer>\n{answer}\n</answer>"),
        (GTPO, ExactMatch(), "fail", "takes none of 10 golds in that form, but 10 as '{answer}'"),
        (GTPO, Boxed(), "fail", r"takes none of 10 golds in that form, but 10 as '\\boxed{{answer}}'"),
        (QWEN, Boxed(), "pass", r"\\boxed"),
        (QWEN, NumericReward(extract="tag"), "fail", "the prompts ask for"),
        (QWEN, gated(), "fail", "takes none of 10 golds in that form"),
        ("3+4=", Boxed(), "pass", "takes all 10 golds as '\\\\boxed{{answer}}' and"),
    ],
)  # fmt: skip
def test_the_check_tries_what_the_prompts_ask_for(text, reward, status, said):
    (found,) = prompts.verifier(golds(text), [reward], Tokenizer(), None)
    assert (found.status, said in found.found) == (status, True), found.found
    if status == "fail":
        assert "init_args.extract" in found.remedy


def test_a_form_given_by_hand_comes_before_that_of_the_prompts():
    (found,) = prompts.verifier(golds(GTPO), [NumericReward()], Tokenizer(), "#### {answer}")
    assert (found.status, found.values["format"], found.values["asked"]) == ("pass", "#### {answer}", False)


def test_options_in_tags():
    (found,) = prompts.verifier(golds(GTPO, "ABCD"), [ChoiceReward("ABCD")], Tokenizer(), None)
    assert found.status == "pass"
