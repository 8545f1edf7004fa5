"""A question with characters that the tiny model has no token for is refused by their names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_grpo.data.alphabet import check_alphabet
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer


def test_the_missing_characters_are_named_with_where_to_add_them():
    with pytest.raises(UserError, match=r"row 3 has characters .* for: '\*', 'x'") as caught:
        check_alphabet(char_tokenizer("0123456789="), "2*x=", "row 3", "a.jsonl:3")
    assert caught.value.where == "a.jsonl:3"
    assert caught.value.remedy == "add them to the alphabet of the model: model.policy.tiny.alphabet"


def test_known_characters_and_other_tokenizers_are_let_through():
    check_alphabet(char_tokenizer("0123456789="), "2=", "row 3", None)
    words = SimpleNamespace(get_vocab=lambda: {"the": 0, "a": 1}, all_special_tokens=())
    check_alphabet(words, "*", "row 3", None)
