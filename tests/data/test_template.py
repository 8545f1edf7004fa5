"""From rows to token ids: once, with at most one beginning-of-sequence token, and never too long unnoticed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.data import AdditionPrompts, PromptFormat, PromptTooLongError, Row
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer

ALPHABET = "0123456789+= \n\\{}abcdefghijklmnopqrstuvwxyz<>|"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROW = Row("set/1", "1+1=", "2", {"level": 3}, where="set.jsonl:1")


@pytest.fixture
def plain():
    return char_tokenizer(ALPHABET)


@pytest.fixture
def chat():
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT
    return tokenizer


def text_of(row, tokenizer, **arguments):
    return tokenizer.decode(PromptFormat(**arguments).encode(row, tokenizer).token_ids)


def test_everything_of_the_row_is_kept(plain):
    prompt = PromptFormat().encode(ROW, plain, source="set")
    assert (prompt.id, prompt.question, prompt.answer, prompt.source, prompt.extra) == (
        "set/1",
        "1+1=",
        "2",
        "set",
        {"level": 3},
    )
    assert prompt.token_ids == tuple(plain("1+1=").input_ids)


def test_templates(plain, chat):
    assert text_of(ROW, plain) == "1+1="
    assert text_of(ROW, chat) == "<user>1+1=\n<assistant>"
    assert text_of(ROW, chat, chat_template="chat") == "<user>1+1=\n<assistant>"
    assert text_of(ROW, chat, chat_template="none") == "1+1="
    assert text_of(ROW, chat, system_prompt="add") == "<system>add\n<user>1+1=\n<assistant>"
    assert text_of(ROW, chat, chat_template="none", system_prompt="add") == "add\n\n1+1="
    own = "{{ messages[0]['content'] }}|"
    assert text_of(ROW, plain, chat_template=own) == "1+1=|"
    assert text_of(ROW, chat, chat_template=own) == "1+1=|"
    assert chat.chat_template == CHAT


SYSTEM = {"role": "system", "content": "add"}
TURNS = (
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
)


def chat_row(*messages):
    return Row("set/2", messages[-1]["content"], "4", where="set.jsonl:2", messages=messages)


def test_messages_go_through_the_template_as_they_are(plain, chat):
    assert text_of(chat_row(SYSTEM, *TURNS), chat) == ("<system>add\n<user>1+1=\n<assistant>2\n<user>2+2=\n<assistant>")
    assert text_of(chat_row(*TURNS), chat, system_prompt="add").startswith("<system>add\n<user>1+1=\n")
    wrapped = text_of(chat_row(SYSTEM, *TURNS), chat, question_format="{question} in words")
    assert wrapped.endswith("<user>1+1=\n<assistant>2\n<user>2+2= in words\n<assistant>"), "the last question alone"
    assert text_of(chat_row(SYSTEM, *TURNS), plain, chat_template=CHAT) == text_of(chat_row(SYSTEM, *TURNS), chat)
    prompt = PromptFormat().encode(chat_row(SYSTEM, *TURNS), chat)
    assert (prompt.question, prompt.messages) == ("2+2=", (SYSTEM, *TURNS))
    # A template of text has a place for one question, and where it has {system}, for a system message.
    assert text_of(chat_row(TURNS[0]), plain, chat_template="q {question} a") == "q 1+1= a"
    assert "system\nadd<|im_end|>" in shown(chat_row(SYSTEM, TURNS[0]), chat_template="qwen_math")


@pytest.mark.parametrize(
    ("messages", "arguments", "message", "remedy"),
    [
        ((SYSTEM, TURNS[0]), {"system_prompt": "x"}, "has a system message of its own", "leave system_prompt out"),
        ((SYSTEM, TURNS[0]), {"chat_template": "gtpo"}, "has another \\(chat_template: gtpo\\)", "leave chat_template"),
        ((TURNS[0],), {"chat_template": "none"}, "a list of messages, and chat_template: none makes", "qwen_math"),
        ((SYSTEM, TURNS[0]), {"chat_template": "r1"}, "cannot take the chat of row 'set/2'.* system, user", "Jinja"),
        (TURNS, {"chat_template": "r1"}, "are of user, assistant, user", "chat_template: chat"),
    ],
)
def test_chats_that_cannot_be_said_are_refused(chat, messages, arguments, message, remedy):
    with pytest.raises(UserError, match=message) as caught:
        PromptFormat(**arguments).encode(chat_row(*messages), chat)
    assert caught.value.where == "set.jsonl:2"
    assert remedy in (caught.value.remedy or "")


def test_messages_and_a_tokenizer_without_a_chat_template(plain):
    with pytest.raises(UserError, match=r"is a list of messages, and the tokenizer .* has no chat template") as caught:
        PromptFormat().encode(chat_row(TURNS[0]), plain)
    assert "data.format.chat_template" in (caught.value.remedy or "")


THINK = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}"


def test_variables_of_the_chat_template(plain, chat):
    chat.chat_template = THINK
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    assert text_of(ROW, chat) == "<user>1+1=\n<assistant>"
    assert text_of(ROW, chat, **off) == "<user>1+1=\n<assistant><think>"
    assert text_of(ROW, plain, chat_template=THINK, **off) == "<user>1+1=\n<assistant><think>"
    assert PromptFormat(**off).warnings(chat) == []
    with pytest.raises(UserError, match=r"does not read thinking, .* it reads enable_thinking") as caught:
        PromptFormat(chat_template_kwargs={"thinking": False}).encode(ROW, chat)
    assert caught.value.remedy == "did you mean enable_thinking?"
    assert PromptFormat(**off).identity(chat)["chat_template_kwargs"] == '{"enable_thinking": false}'
    assert "chat_template_kwargs" not in PromptFormat().identity(chat), "as in older checkpoints"
    refused: tuple[dict[str, Any], ...] = ({}, {"chat_template": "r1"}, {"chat_template": "none"})
    for arguments in refused:
        with pytest.raises(UserError, match="chat_template_kwargs are variables of a chat template, and prompts are"):
            PromptFormat(**arguments, **off).encode(ROW, plain)


def test_the_prompt_of_gtpo():
    tokenizer = char_tokenizer(ALPHABET + "YGT,./")
    tokenizer.chat_template = CHAT
    assert text_of(ROW, tokenizer, chat_template="gtpo") == (
        "<system>You are a helpful assistant for solving math problems.\nGiven a question, first think step by step "
        "between <reasoning> and </reasoning>.\nThen, give the final answer between <answer> and </answer>.\n"
        "<user>1+1=\n<assistant>"
    )
    assert text_of(ROW, tokenizer, chat_template="gtpo", system_prompt="add").startswith("<system>add\n")
    assert PromptFormat(chat_template="gtpo").describe(tokenizer) == "template gtpo"
    assert PromptFormat(chat_template="gtpo").identity(tokenizer)["system_prompt"].startswith("You are a helpful")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        PromptFormat(chat_template="gtpo").encode(ROW, tokenizer)


class Plain:
    """A tokenizer that shows the text it is given: one id a character, each known marker one id."""

    chat_template = CHAT
    bos_token_id = None
    markers = ("<|im_start|>", "<|im_end|>")

    def __call__(self, text, add_special_tokens=True):
        self.text = text
        for marker in self.markers:
            text = text.replace(marker, "#")
        return {"input_ids": [ord(c) for c in text]}


def shown(row=ROW, **arguments):
    tokenizer = Plain()
    PromptFormat(**arguments).encode(row, tokenizer)
    return tokenizer.text


def test_named_templates_are_those_of_the_papers():
    assert shown(chat_template="qwen_math") == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    )
    r1 = shown(chat_template="r1")
    assert r1.startswith("A conversation between User and Assistant.")
    assert r1.endswith("<answer> answer here </answer>.\nUser: 1+1=\nAssistant: <think>")
    assert "system\nBe brief.<|im_end|>" in shown(chat_template="qwen_math", system_prompt="Be brief.")
    assert shown(chat_template="qwen_math", question_format="{question}?").count("1+1=?") == 1


def test_a_text_of_ones_own():
    assert shown(chat_template="Q: {question}\nA:") == "Q: 1+1=\nA:"
    assert shown(chat_template="{system}|{question}", system_prompt="{question}") == "{question}|1+1="
    assert shown(chat_template="{question} in \\boxed{{}}") == "1+1= in \\boxed{{}}"
    assert PromptFormat(chat_template="{{question}}").uses_chat(Plain())  # Jinja


def test_which_template_is_said_and_told_apart():
    def identity(**arguments):
        return PromptFormat(**arguments).identity(Plain())

    settings: list[dict[str, Any]] = [
        {}, {"chat_template": "none"}, {"chat_template": "r1"}, {"chat_template": "qwen_math"}, {"system_prompt": "x"},
        {"question_format": "{question}!"}, {"chat_template": "Q {question}"}, {"chat_template": "{{ messages }}"},
    ]  # fmt: skip
    assert len({tuple(identity(**s).items()) for s in settings}) == len(settings)
    assert identity() == identity(chat_template="chat") == identity(max_prompt_tokens=5)
    words = [PromptFormat(**s).describe(Plain()) for s in settings]
    assert words[:4] == [
        "the tokenizer's chat template",
        "plain text, no template",
        "template r1",
        "template qwen_math",
    ]
    assert words[6:] == ["a text template of your own", "Jinja template of your own"]


def test_doubts_about_a_template():
    assert PromptFormat(chat_template="qwen_math").warnings(Plain()) == []
    stranger = Plain()
    stranger.markers = ("<|im_start|>", "<|other|>")
    (doubt,) = PromptFormat(chat_template="qwen_math").warnings(stranger)
    assert "<|im_end|>, which is no token" in doubt
    (doubt,) = PromptFormat(chat_template="{{ strftime_now('%d') }}").warnings(Plain())
    assert "writes the date" in doubt


def test_a_template_from_a_file(plain, tmp_path):
    (tmp_path / "own.jinja").write_text(CHAT)
    assert text_of(ROW, plain, chat_template=str(tmp_path / "own.jinja")) == "<user>1+1=\n<assistant>"
    with pytest.raises(UserError, match="cannot read the chat template"):
        PromptFormat(chat_template=str(tmp_path / "none.jinja"))


def test_braces_around_the_question_are_literal(plain):
    assert text_of(ROW, plain, question_format=r"solve {question} in \boxed{}") == r"solve 1+1= in \boxed{}"
    assert text_of(Row("x", "{question} {0} {a}"), plain) == "{question} {0} {a}"


@given(st.text(ALPHABET, min_size=1).filter(lambda text: text.strip() and "<eos>" not in text and "<pad>" not in text))
def test_plain_ids_are_those_of_the_text(question):
    tokenizer = char_tokenizer(ALPHABET)
    prompt = PromptFormat().encode(Row("x", question), tokenizer)
    assert len(prompt.token_ids) == len(question)
    assert tokenizer.decode(list(prompt.token_ids)) == question


def test_the_text_is_tokenised_once(chat, monkeypatch):
    calls = []
    encode = type(chat)._encode_plus

    def counted(self, *args, **kwargs):
        calls.append(args)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(chat), "_encode_plus", counted)
    monkeypatch.setattr(type(chat), "decode", lambda *_: pytest.fail("decoded"))
    PromptFormat().encode(ROW, chat)
    assert len(calls) == 1


def with_bos(template=None):
    """A tokenizer that puts <bos> before every text by itself, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer


def test_one_beginning_of_sequence_at_most():
    tokenizer = with_bos()
    assert PromptFormat().encode(ROW, tokenizer).token_ids.count(tokenizer.bos_token_id) == 1
    tokenizer = with_bos("<bos>{{ messages[0]['content'] }}")
    assert PromptFormat().encode(ROW, tokenizer).token_ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(UserError, match="two beginning-of-sequence tokens") as caught:
        PromptFormat(question_format="<bos>{question}").encode(ROW, with_bos())
    assert caught.value.where == "set.jsonl:1"


def test_no_chat_template_where_one_is_needed(plain):
    with pytest.raises(UserError, match="has no chat template") as caught:
        PromptFormat(chat_template="chat").encode(ROW, plain)
    assert caught.value.where == "chat_template"


def test_text_that_the_tokenizer_or_template_cannot_take(plain):
    with pytest.raises(UserError, match=r"question of row 'set/9' has characters .* no token for: '×'") as caught:
        PromptFormat().encode(Row("set/9", "1 × 1", where="set.jsonl:9"), plain)
    assert caught.value.where == "set.jsonl:9"
    assert "model.policy.tiny.alphabet" in (caught.value.remedy or "")
    with pytest.raises(UserError, match="the chat template cannot take row"):
        PromptFormat(chat_template="{{ raise_exception('no') }}").encode(ROW, plain)
    with pytest.raises(UserError, match="gives an empty prompt"):
        PromptFormat(chat_template="{% if false %}{{ messages }}{% endif %}").encode(ROW, plain)


def test_long_prompts_are_refused_or_dropped_and_counted(plain):
    rows = [Row(f"r/{i}", "1" * i, where=f"set.jsonl:{i}") for i in range(1, 6)]
    with pytest.raises(PromptTooLongError, match="'r/4' has 4 tokens, more than max_prompt_tokens = 3") as caught:
        PromptFormat(max_prompt_tokens=3).encode_all(rows, plain)
    assert caught.value.where == "set.jsonl:4"
    encoded = PromptFormat(max_prompt_tokens=3, on_long="drop").encode_all(rows, plain, "set")
    assert ([p.id for p in encoded.prompts], encoded.too_long) == (["r/1", "r/2", "r/3"], rows[3:])
    with pytest.raises(UserError, match="all 2 prompts are longer"):
        PromptFormat(max_prompt_tokens=3, on_long="drop").encode_all(rows[3:], plain)
    assert PromptFormat().encode_all(rows, plain).too_long == []


@pytest.mark.parametrize(
    ("arguments", "where", "remedy"),
    [
        ({"chat_template": "atuo"}, "chat_template", "write auto"),
        (
            {"chat_template": "zzz"},
            "chat_template",
            "write one of auto, chat, none, qwen_math, r1, gtpo, text with {question}",
        ),
        ({"chat_template": "qwen_maths"}, "chat_template", "write qwen_math"),
        ({"chat_template": "r1", "system_prompt": "x"}, "system_prompt", "{system}"),
        ({"chat_template": "Q: {question}", "system_prompt": "x"}, "system_prompt", "{system}"),
        ({"chat_template": "{system} Q: {question}"}, "system_prompt", "set system_prompt"),
        ({"question_format": "solve it"}, "question_format", "write {question}"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens", None),
        ({"on_long": "cut"}, "on_long", "error, drop"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "enable_thinking"),
    ],
)
def test_bad_arguments_are_refused(arguments, where, remedy):
    with pytest.raises(UserError) as caught:
        PromptFormat(**arguments)
    assert caught.value.where == where
    assert remedy is None or remedy in (caught.value.remedy or "")


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_the_character_tokenizer_survives_saving(tmp_path, pad_is_eos):
    from transformers import AutoTokenizer

    tokenizer = char_tokenizer("0123456789+=", pad_is_eos=pad_is_eos)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer) == (13 if pad_is_eos else 14)
    assert (loaded.pad_token_id == loaded.eos_token_id) is pad_is_eos
    assert loaded.eos_token_id == 12
    for row in AdditionPrompts().rows():
        ids = loaded(row.question).input_ids
        assert ids == tokenizer(row.question).input_ids
        assert loaded.decode([*ids, loaded.eos_token_id, loaded.pad_token_id], skip_special_tokens=True) == row.question


def test_bad_alphabets_are_refused():
    with pytest.raises(UserError, match="holds '1' twice"):
        char_tokenizer("0121")
    with pytest.raises(UserError, match="is empty"):
        char_tokenizer("")
