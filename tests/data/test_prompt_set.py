"""From a source to prompts: nothing is lost without a word, and a checkpoint knows what it was trained on."""

from __future__ import annotations

from typing import Any

import pytest

from lit_grpo.data import CleanConfig, InMemoryPrompts, MixedPrompts, PromptFormat
from lit_grpo.data.prompt_set import PromptSet, check_resumed, in_both, prepare
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import ExactMatch


def source(name: str, *questions: str) -> InMemoryPrompts:
    return InMemoryPrompts([{"prompt": q, "answer": "1"} for q in questions], name=name)


def made(prompts: Any, clean: CleanConfig | None = None, held_out: Any = (), **form: Any) -> PromptSet:
    return prepare(
        prompts,
        "data.prompts",
        form=PromptFormat(**form),
        tokenizer=char_tokenizer("0123456789+= \n"),
        rewards=[ExactMatch()],
        clean=clean,
        held_out=held_out,
    )


def test_an_account_of_every_row():
    mixed = MixedPrompts([source("a", "1+1=", "1+1= ", "2+2="), source("b", "3+3=", "1+2+3+4+5=")], [3, 1])
    clean = CleanConfig(deduplicate=True, held_out=True)
    found = made(mixed, clean, [source("test", "2+2=")], max_prompt_tokens=6, on_long="drop")
    assert [p.id for p in found.prompts] == ["a/1", "b/1"]
    assert [p.source for p in found.prompts] == ["a", "b"]
    assert [(d.row.id, d.reason, d.other) for d in found.dropped] == [
        ("a/2", "duplicate", "a/1"),
        ("a/3", "contaminated", "test/1"),
        ("b/2", "too long", ""),
    ]
    assert found.summary_lines() == [
        "data.prompts: 2 prompts of 5 rows; dropped 1 duplicate, 1 contaminated, 1 too long (given away: test 1)",
        "  sources: a 1 (75% of the rollouts), b 1 (25% of the rollouts)",
    ]


def test_nothing_is_left_out_unasked():
    found = made(source("a", "1+1=", "1+1="), CleanConfig(), [source("test", "1+1=")])
    assert len(found.prompts) == 2
    assert found.summary_lines() == ["data.prompts: 2 prompts"]
    assert in_both(found.prompts, made(source("test", "1+1 =", "5+5=")).prompts) == 2


def test_nothing_left_is_an_error():
    clean = CleanConfig(held_out=True)
    with pytest.raises(UserError, match="of 1 rows none is left: 1 contaminated"):
        made(source("a", "1+1="), clean, [source("test", "1+1=")])
    mixed = MixedPrompts([source("a", "1+1="), source("b", "2+2=")], [1, 1])
    with pytest.raises(UserError, match="of the source 'b' no row is left, and it has a weight"):
        made(mixed, clean, [source("test", "2+2=")])


def test_a_checkpoint_of_other_prompts_is_refused_by_name():
    tokenizer = char_tokenizer()

    def state(prompts: Any, **form: Any) -> dict[str, Any]:
        found = made(prompts, **form)
        return {"format": PromptFormat(**form).identity(tokenizer), "prompts": found.identity()}

    before = state(source("a", "1+1=", "2+2="))
    check_resumed(before, state(source("a", "1+1=", "2+2=")))
    check_resumed(before, state(source("a", "1+1=", "2+2="), max_prompt_tokens=9))
    for other, what in (
        (state(source("a", "1+1=")), "other prompts: 2 prompts, not 1"),
        (state(source("a", "2+2=", "1+1=")), "others of the same number"),
        (state(source("a", "1+1=", "2+2="), chat_template="{question}"), "another chat_template: '', not '{question}'"),
        (state(source("a", "1+1=", "2+2="), system_prompt="1"), "another system_prompt"),
    ):
        with pytest.raises(UserError, match=what.replace("+", r"\+")) as caught:
            check_resumed(before, other)
        assert caught.value.where
        assert caught.value.remedy

    def mix(*weights: float) -> dict[str, Any]:
        return state(MixedPrompts([source("a", "1+1="), source("b", "2+2=")], list(weights)))

    def chat(*messages: str, **form: Any) -> dict[str, Any]:
        turns = [{"role": "system" if i < len(messages) - 1 else "user", "content": m} for i, m in enumerate(messages)]
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}{% endif %}"
        return state(InMemoryPrompts([{"prompt": turns, "answer": "1"}]), chat_template=template, **form)

    check_resumed(chat("1", "1+1="), chat("1", "1+1="))
    for ours in (chat("2", "1+1="), chat("1+1=")):
        with pytest.raises(UserError, match="others of the same number"):
            check_resumed(chat("1", "1+1="), ours)
    off = chat("1+1=", chat_template_kwargs={"enable_thinking": False})
    for one, other in ((off, chat("1+1=")), (chat("1+1="), off)):
        with pytest.raises(UserError, match="another chat_template_kwargs"):
            check_resumed(one, other)
    check_resumed(mix(1, 1), mix(2, 2))
    with pytest.raises(UserError, match="other weights of the sources"):
        check_resumed(mix(1, 1), mix(1, 2))
