"""Two-digit addition in two forms: the rows, and the warm start that reinforcement learning begins from."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from lit_grpo.data import TwoFormAddition
from lit_grpo.data.sources.two_form_addition import ALPHABET, ANSWER, MAX_NEW_TOKENS, long_form, short_form
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from tests.paths import ROOT


def warm_start() -> Any:
    path = ROOT / "scripts/warm_start_two_form_addition.py"
    spec = importlib.util.spec_from_file_location("warm_start_two_form_addition", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("a", "b", "short", "long"),
    [(27, 15, ":42", "7+5=12c1:42"), (10, 10, ":20", "0+0=0c0:20"), (99, 99, ":198", "9+9=18c1:198")],
)
def test_both_forms(a, b, short, long):
    assert short_form(a, b) == short
    assert long_form(a, b) == long


def test_every_row_holds_both_forms_and_both_end_in_the_answer():
    rows = TwoFormAddition().rows()
    assert len(rows) == len({row.id for row in rows}) == 8100
    for row in rows[::97]:
        a, b = row.extra["operands"]
        assert row.question == f"{a}+{b}="
        for form in ("short", "long"):
            found = re.search(ANSWER, row.extra[form])
            assert found is not None
            assert found[1] == row.answer == str(a + b)


def test_both_forms_fit_with_room_to_grow():
    tokenizer = char_tokenizer(ALPHABET)
    lengths = {
        form: [len(tokenizer(row.extra[form])["input_ids"]) + 1 for row in TwoFormAddition(n=500).rows()]
        for form in ("short", "long")
    }
    assert set(lengths["short"]) == {4, 5}
    assert (min(lengths["long"]), max(lengths["long"])) == (11, 13)
    assert MAX_NEW_TOKENS >= 24


def test_a_drawn_part_is_disjoint_from_the_next():
    first, second = (TwoFormAddition(n=300, skip=skip).rows() for skip in (0, 300))
    assert not {row.id for row in first} & {row.id for row in second}
    with pytest.raises(UserError):
        TwoFormAddition(n=8101).rows()


@pytest.mark.slow
def test_the_warm_start_learns_is_seeded_and_can_be_loaded(tmp_path):
    from lit_grpo.policy import PolicyConfig
    from lit_grpo.policy.model.load import end_token_ids, load_model, load_tokenizer

    script = warm_start()
    losses = script.warm_start(tmp_path / "a", steps=8)
    assert losses[-1] < losses[0] < 6
    again = script.warm_start(tmp_path / "b", steps=2)
    assert again == losses[:2]
    assert script.warm_start(tmp_path / "c", steps=2, seed=1) != again
    config = PolicyConfig(path=str(tmp_path / "a"))
    tokenizer = load_tokenizer(config)
    assert tokenizer.decode(tokenizer("27+15=")["input_ids"]) == "27+15="
    assert end_token_ids(config, tokenizer) == (tokenizer.eos_token_id,)
    assert load_model(config).config.hidden_size == 96
