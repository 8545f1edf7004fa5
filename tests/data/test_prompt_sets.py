"""Sets of prompts by name: each made once for a vocabulary, the shortest and the longest of all, and their limits."""

from __future__ import annotations

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
    assert not sets.holds("test/sums", FORM, TOKENIZER)


def test_the_shortest_and_the_longest_of_all_sets():
    sets = both()
    assert PromptSets().longest == 0
    assert sets.longest == 6
    assert [prompt.question for prompt in sets.shortest(2)] == ["2=", "1+1="]
    assert len(sets.shortest(10)) == 3, "one that is in both sets comes once"


def test_the_report_names_what_is_trained_on_and_held_out():
    told = list(both().report(FORM, TOKENIZER))
    assert any("1 training questions are also in data.prompts" in remark.text for remark in told)
    assert told[0].text.startswith("prompts are made with")
    assert not told[0].warns


def test_prompts_must_leave_room_for_completions():
    prompts, samplings = made("1+1=", "10+10="), [Sampling(max_new_tokens=4), Sampling(max_new_tokens=10)]
    check_lengths(prompts, "data.prompts", samplings, vocabulary=20, positions=16)
    check_lengths(prompts, "data.prompts", samplings, vocabulary=20, positions=None)
    with pytest.raises(
        UserError, match=r"has 6 tokens; with 10 new tokens that is more than the 15 positions"
    ) as error:
        check_lengths(prompts, "data.prompts", samplings, vocabulary=20, positions=15)
    assert "max_prompt_tokens: 5" in str(error.value.remedy)
    with pytest.raises(UserError, match="stop_token_ids holds 20, and the tokenizer has 20 tokens"):
        check_lengths(prompts, "data.prompts", [Sampling(stop_token_ids=(20,))], vocabulary=20, positions=None)
