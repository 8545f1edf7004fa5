"""Rows that are tokenised together have the ids that each has alone, whatever tokenizer and template there are."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lit_grpo.data import PromptFormat, PromptTooLongError, Row
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = [
    "1+1=",
    "",
    "Wie viele Äpfel? \n\n",
    "a" * 300,
    "<s>twice",
    "日本語 \u200d🙂",
    "  two  spaces ",
    "1+1=",
    "\\boxed{}",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "so it is "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


def byte_pairs(bos: bool) -> Any:
    """A byte-level BPE with few merges, as large models have it; ``bos`` begins every text with ``<s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["how many apples are two and two apples?"] * 8, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    # Left over from a training script, which must not pad or cut what is tokenised here.
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(5)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def rows(questions: list[str] = QUESTIONS) -> list[Row]:
    return [Row(f"set/{i}", question, "2", where=f"set.jsonl:{i + 1}") for i, question in enumerate(questions)]


def alone(form: PromptFormat, of: list[Row], tokenizer: Any) -> list[tuple[int, ...]]:
    return [form.encode(row, tokenizer).token_ids for row in of]


def with_chat(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHAT
    return tokenizer


class Counted(PreTrainedTokenizerFast):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("form", [
    PromptFormat(), PromptFormat(question_format="Q: {question} \\boxed{}"), PromptFormat(system_prompt="Be brief."),
    PromptFormat(chat_template="none"), PromptFormat(chat_template="say {question}!"),
    PromptFormat(chat_template="{% for m in messages %}{{ m['content'] }}|{% endfor %}"),
    *(PromptFormat(chat_template=name) for name in ("qwen_math", "r1")),
])  # fmt: skip
@pytest.mark.parametrize("make", [
    lambda: byte_pairs(bos=False), lambda: byte_pairs(bos=True), lambda: with_chat(byte_pairs(bos=False)),
    lambda: with_chat(byte_pairs(bos=True)), ByT5Tokenizer, lambda: with_chat(ByT5Tokenizer()),
], ids=["plain", "bos", "chat", "chat and bos", "python", "python chat"])  # fmt: skip
def test_the_ids_are_those_of_each_row_alone(make, form):
    tokenizer = make()
    # An empty prompt is refused either way.
    given = [row for row in rows() if row.question or form.wraps(tokenizer) or form.system_prompt]
    if form.uses_chat(tokenizer):
        given += [Row(f"set/c{i}", "c", "2", messages=tuple(chat)) for i, chat in enumerate(CHATS)]
    many = form.encode_all(given, tokenizer, "set").prompts
    assert [prompt.token_ids for prompt in many] == alone(form, given, tokenizer)
    assert [(prompt.id, prompt.source) for prompt in many] == [(row.id, "set") for row in given]
    assert len({len(prompt.token_ids) for prompt in many}) > 3


def test_many_rows_are_few_calls():
    tokenizer = byte_pairs(bos=False)
    tokenizer.__class__ = Counted
    Counted.calls = 0
    encoded = PromptFormat().encode_all(rows([f"{i}+1=" for i in range(2500)]), tokenizer)
    assert Counted.calls == 3
    assert [prompt.id for prompt in encoded.prompts] == [f"set/{i}" for i in range(2500)]


def test_too_long_rows_are_found_among_many():
    tokenizer, given = byte_pairs(bos=False), rows(["1+1=", "a" * 50, "2+2=", "b" * 60])
    dropped = PromptFormat(max_prompt_tokens=20, on_long="drop").encode_all(given, tokenizer)
    assert [row.id for row in dropped.too_long] == ["set/1", "set/3"]
    assert [prompt.id for prompt in dropped.prompts] == ["set/0", "set/2"]
    with pytest.raises(PromptTooLongError) as caught:
        PromptFormat(max_prompt_tokens=20).encode_all(given, tokenizer)
    assert caught.value.where == "set.jsonl:2"


def test_the_row_that_cannot_be_tokenised_is_named():
    with pytest.raises(UserError) as caught:
        PromptFormat().encode_all(rows(["1+1=", "2+2=", "2*2="]), char_tokenizer("0123456789+="))
    assert caught.value.where == "set.jsonl:3"
    assert "'*'" in caught.value.what


def test_the_row_that_the_template_refuses_is_named():
    tokenizer = byte_pairs(bos=False)
    tokenizer.chat_template = "{% if 'b' in messages[0]['content'] %}{{ raise_exception('no b') }}{% endif %}x"
    with pytest.raises(UserError) as caught:
        PromptFormat().encode_all(rows(["a", "ab", "c"]), tokenizer)
    assert caught.value.where == "set.jsonl:2"
    assert "no b" in caught.value.what


def test_a_finished_chat_is_found_among_many():
    tokenizer = with_chat(byte_pairs(bos=False))
    with pytest.raises(UserError, match="looks finished") as caught:
        PromptFormat().encode_all(rows(["a", "hello <|im_start|>user", "c"]), tokenizer)
    assert caught.value.where == "set.jsonl:2"


def test_a_tokenizer_with_chats_of_its_own_is_asked_for_each():
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            assert isinstance(conversation[0], dict), "it takes one chat"
            return super().apply_chat_template(conversation, *args, **kwargs)

    tokenizer = with_chat(byte_pairs(bos=False))
    ids = [prompt.token_ids for prompt in PromptFormat().encode_all(rows(), tokenizer).prompts]
    tokenizer.__class__ = Own
    assert [prompt.token_ids for prompt in PromptFormat().encode_all(rows(), tokenizer).prompts] == ids
