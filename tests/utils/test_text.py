"""A shortened text fits, says what is missing, and keeps the end that is asked for."""

import doctest

import pytest

from lit_grpo.utils import text
from lit_grpo.utils.text import shorten


def test_the_examples_of_the_docstring_hold():
    assert doctest.testmod(text).failed == 0
    assert doctest.testmod(text).attempted == 4


@pytest.mark.parametrize("keep_end", [False, True])
@pytest.mark.parametrize("mark", ["...", " […{omitted} characters…] ", ""])
def test_what_fits_stays_and_what_does_not_is_cut_to_the_limit(mark, keep_end):
    letters = "".join(chr(ord("a") + i % 26) for i in range(100))
    for limit in (40, 41, 99):
        short = shorten(letters, limit, mark, keep_end=keep_end)
        assert limit - 1 <= len(short) <= limit
        assert short.startswith("abc")
        assert short.endswith(letters[-3:]) == keep_end
    for limit in (100, 101):
        assert shorten(letters, limit, mark, keep_end=keep_end) == letters


def test_the_mark_counts_what_is_missing():
    short = shorten("0123456789" * 10, 30, "<{omitted}>", keep_end=True)
    head, _, rest = short.partition("<")
    number, _, tail = rest.partition(">")
    assert len(head) + len(tail) + int(number) == 100
