"""Stop strings: the end that is found token by token is the first at which the whole text holds one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.stop_strings import StopStrings, stop_strings
from lit_grpo.errors import UserError
from lit_grpo.types import Sampling

PIECES = ("<", "/", "answer", ">", ">\n", "</answer>", "a", "ns", "wer", " ", "\n", "x", "</", "7")


class Pieces:
    """A tokenizer whose tokens are these texts."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += 1
        return "".join(PIECES[i] for i in ids)


def expected(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> int | None:
    """The first number of tokens whose whole text holds a string."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop)),
        None,
    )


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    st.sampled_from([("</answer>",), ("\n\n",), ("swer", "7x"), ("> ",), ("x", "</answer>")]),
)
def test_the_end_is_that_of_the_whole_text(ids: list[int], stop: tuple[str, ...]) -> None:
    found = StopStrings(Pieces(), stop)
    end = expected(Pieces(), ids, stop)
    assert found.end(ids) == end
    one_by_one = [found.end(ids[: n + 1], start=n) for n in range(len(ids) if end is None else end)]
    assert one_by_one == [None] * (len(one_by_one) - 1) + [end] if one_by_one else end is None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer with merges and special tokens, as most models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<eos>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text = ["the answer is <answer>7</answer>\n\nso. 答案是七。 </answer>\n <reasoning>x</reasoning>"] * 20
    made.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", additional_special_tokens=["</think>"])


@pytest.mark.parametrize("stop", [("</answer>",), ("。",), ("七。 <",), ("</think>",), ("\n\n", "er>\n"), ("r",)])
def test_a_byte_level_tokenizer(tokenizer: Any, stop: tuple[str, ...]) -> None:
    generator, ends = random.Random(0), 0
    texts = [
        "the answer",
        "<answer>7</answer>\n\n",
        "答案是七。 </answer>",
        " </",
        "answer>",
        "</think>",
        "\n",
        "<eos>",
    ]
    for _ in range(200):
        ids = []
        for _ in range(generator.randrange(1, 8)):
            # Whole texts, and tokens at random: halves of characters, unfinished words.
            if generator.random() < 0.5:
                ids += tokenizer(generator.choice(texts))["input_ids"]
            else:
                ids.append(generator.randrange(len(tokenizer)))
        end = expected(tokenizer, ids, stop)
        assert StopStrings(tokenizer, stop).end(ids) == end
        ends += end is not None
    assert 20 < ends < 200, "the test needs both"


def test_most_tokens_are_decoded_once() -> None:
    tokenizer = Pieces()
    found = StopStrings(tokenizer, ("</answer>",))
    for _ in range(100):
        assert found.end([6, 7, 8, 11, 13]) is None
    assert tokenizer.decoded == 5


def test_what_is_no_list_of_texts_is_refused() -> None:
    for stop in ("</answer>", ("",), ("a", ""), (3,)):
        with pytest.raises(UserError, match="not a list of texts that hold something"):
            Sampling(stop=stop)  # type: ignore[arg-type]
    assert stop_strings(Sampling(), None) is None
    with pytest.raises(EngineError, match="needs the policy's tokenizer"):
        stop_strings(Sampling(stop=("a",)), None)
