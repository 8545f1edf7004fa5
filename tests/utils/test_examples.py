"""The example in the refusal of a wrong value is a right value of its type, and within its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import yaml

from lit_grpo.utils.bounds import Bound
from lit_grpo.utils.examples import example_of


@dataclass(frozen=True)
class Settings:
    size: int = 3


@pytest.mark.parametrize(
    ("hint", "read"),
    [
        (list[int] | None, [0, 1]),
        (list[str], ["text"]),
        (tuple[int, float], [8, 0.5]),
        (dict[str, float], {"name": 0.5}),
        (Annotated[int, Bound(least=200)], None),
        (Annotated[float, Bound(above=0, below=1)], 0.5),
        (Annotated[float | None, Bound(above=0, below=0.2)], 0.1),
        (bool, True),
        (str | None, "text"),
        (Literal["a", "b"], "a"),
        (Settings | None, {"size": 3}),
        (list[Settings], [{"size": 3}]),
        (Any, None),
        (type(None), None),
    ],
)
def test_it_is_of_its_type(hint: Any, read: Any) -> None:
    text = example_of(hint)
    assert (None if text is None else yaml.safe_load(text)) == read


def test_a_default_that_says_something_is_the_example():
    assert example_of(int, 16) == "16"
    assert example_of(list[float], (0.9, 0.95)) == "[0.9, 0.95]"
    assert example_of(list[str], []) == "[text]"
    assert example_of(float, float("inf")) == "0.5"
    assert example_of(str, "x" * 100) == "text"


def test_a_word_in_the_place_of_a_list_is_its_item():
    assert example_of(list[str], None, "wq") == "[wq]"
    assert example_of(list[int], None, "wq") == "[0, 1]"
    assert example_of(list[str], None, "a: b, {") == "[text]"
