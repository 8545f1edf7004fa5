"""Sets of prompts by name: each made once for a vocabulary, the shortest and the longest of all, and their limits."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import pytest

from lit_grpo.data import InMemoryPrompts, PromptFormat
from lit_grpo.data.prompt_set import PromptSet, prepare
from lit_grpo.data.prompt_sets import TRAIN, PromptSets, check_lengths
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.types import Sampling

FORM = PromptFormat()
TOKENIZER = char_tokenizer("0123456789+= \n")


def made(*questions: str, tokenizer: Any = TOKENIZER) -> PromptSet:
    source = InMemoryPrompts([{"prompt": q, "answer": "1"} for q in questions], name="sums")
    return prepare(source, "data.prompts", form=FORM, tokenizer=tokenizer, rewards=[])


def both() -> PromptSets:
    sets = PromptSets()
    sets.put(TRAIN, made("1+1=", "10+10="), FORM, TOKENIZER, [])
    sets.put("val/sums", made("1+1=", "2="), FORM, TOKENIZER, [])
    return sets


def test_a_set_is_made_again_for_another_vocabulary_or_another_use():
    sets = both()
    assert sets.holds(TRAIN, FORM, TOKENIZER)
    assert sets.holds(TRAIN, FORM, char_tokenizer("0123456789+= \n")), "an equal tokenizer means the same ids"
    assert not sets.holds(TRAIN, FORM, char_tokenizer("9876543210+= \n"))
    assert not sets.holds(TRAIN, FORM, TOKENIZER, taught=True)
    assert not sets.holds(TRAIN, PromptFormat(question_format="{question} ="), TOKENIZER)
    assert not sets.holds("test/sums", FORM, TOKENIZER)
    sets.put("demonstrations", made("1+1="), FORM, TOKENIZER, [], taught=True)
    assert sets.holds("demonstrations", FORM, TOKENIZER, taught=True)
    assert not sets.holds("demonstrations", FORM, TOKENIZER)


def test_a_checkpoint_tells_other_prompts_another_template_and_another_vocabulary_apart():
    def identity(*questions: str, form: PromptFormat = FORM, tokenizer: Any = TOKENIZER) -> dict[str, Any]:
        sets = PromptSets()
        sets.put(TRAIN, made(*questions, tokenizer=tokenizer), form, tokenizer, [])
        sets.put("val/sums", made("7="), form, tokenizer, [])
        return sets.identity(form, tokenizer)

    mine = identity("1+1=", "2=")
    assert identity("1+1=", "2=", tokenizer=char_tokenizer("0123456789+= \n")) == mine
    others = (
        identity("2=", "1+1="),
        identity("1+1="),
        identity("1+1=", "2=", form=PromptFormat(question_format="{question} =")),
        identity("1+1=", "2=", tokenizer=char_tokenizer("9876543210+= \n")),
    )
    assert mine not in others
    assert PromptSets().vocabulary(TOKENIZER) != PromptSets().vocabulary(char_tokenizer("9876543210+= \n"))


def test_the_shortest_and_the_longest_of_all_sets():
    sets = both()
    assert PromptSets().longest == 0
    assert sets.longest == 6
    assert [prompt.question for prompt in sets.shortest(2)] == ["2=", "1+1="]
    assert len(sets.shortest(10)) == 3, "one that is in both sets comes once"


def test_the_report_names_what_is_trained_on_and_held_out():
    sets = PromptSets()
    sets.put("val/sums", replace(made("1+1=", "2="), name="data.val.sums"), FORM, TOKENIZER, [])
    held_out_alone = list(sets.report(FORM, TOKENIZER))
    assert "| 1+1=\n" in held_out_alone[1].text
    assert len(held_out_alone) == 2, "nothing is trained on that could also be held out"
    sets.put(TRAIN, made("10+10=", "1+1="), FORM, TOKENIZER, [])
    told = list(sets.report(FORM, TOKENIZER))
    assert not any(remark.warns for remark in told)
    assert told[0].text.startswith("prompts are made with")
    assert "| 10+10=\n" in told[1].text, "the first prompt that is trained on"
    assert told[2].text.startswith("1 training questions are also in data.val.sums; ")
    assert len(told) == 3


def test_the_report_warns_of_what_looks_wrong_with_prompts_and_template():
    sets, form = PromptSets(), PromptFormat(chat_template="qwen_math")
    tokenizer = char_tokenizer(string.printable)
    (last,) = tokenizer("=")["input_ids"][-1:]
    sets.put(TRAIN, made("1+1=", tokenizer=tokenizer), FORM, tokenizer, [last])
    told = list(sets.report(form, tokenizer))
    warned = [remark.text for remark in told if remark.warns]
    assert any(text.startswith("data.format: the template qwen_math uses <|im_start|>") for text in warned)
    assert any(text.startswith("data.prompts: 1 prompts end in an end-of-sequence token") for text in warned)
    assert all("Remedy: " in text for text in warned if text.startswith("data.prompts"))
    assert [remark.warns for remark in told] == [False, *[True] * len(warned), False]


def test_prompts_must_leave_room_for_completions():
    prompts, samplings = made("1+1=", "10+10="), [Sampling(max_new_tokens=4), Sampling(max_new_tokens=10)]
    check_lengths(prompts, "data.prompts", samplings, vocabulary=20, positions=16)
    check_lengths(prompts, "data.prompts", samplings, vocabulary=20, positions=None)
    nothing = replace(prompts, prompts=[])
    check_lengths(nothing, "data.prompts", samplings, vocabulary=20, positions=1)
    with pytest.raises(
        UserError, match=r"has 6 tokens; with 10 new tokens that is more than the 15 positions"
    ) as error:
        check_lengths(prompts, "data.prompts", samplings, vocabulary=20, positions=15)
    assert "max_prompt_tokens: 5" in str(error.value.remedy)
    longest = prompts.prompts[1].id
    for locations, where in (({}, "data.prompts"), ({longest: "sums.jsonl, line 2"}, "sums.jsonl, line 2")):
        placed = replace(prompts, locations=locations)
        # The completion alone is as long as the model reaches: no prompt could be short enough.
        with pytest.raises(UserError, match="the 10 positions of the model") as error:
            check_lengths(placed, "data.prompts", samplings, vocabulary=20, positions=10)
        assert error.value.where == where
        assert error.value.remedy == "lower data.sampling.max_new_tokens below 5"
        # As the remedy says.
        check_lengths(placed, "data.prompts", [Sampling(max_new_tokens=4)], vocabulary=20, positions=10)
    with pytest.raises(UserError, match="stop_token_ids holds 20, and the tokenizer has 20 tokens"):
        check_lengths(prompts, "data.prompts", [Sampling(stop_token_ids=(20,))], vocabulary=20, positions=None)
