"""Tensors of many plain numbers are those of torch.tensor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.utils.tensors import padded_rows, tensor_of

INTEGERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INTEGERS))
def test_integers(values: list[int]) -> None:
    assert torch.equal(tensor_of(iter(values), torch.int64), torch.tensor(values, dtype=torch.int64))


@given(st.lists(st.floats()))
def test_numbers(values: list[float]) -> None:
    found = tensor_of(values, torch.float64)
    torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.lists(INTEGERS, max_size=6), max_size=6), st.integers(0, 3))
def test_rows_are_filled_up(rows: list[list[int]], more: int) -> None:
    width = max(map(len, rows), default=0) + more
    expected = torch.tensor([row + [7] * (width - len(row)) for row in rows], dtype=torch.int64).view(len(rows), width)
    found = padded_rows(rows, width, 7, torch.int64)
    assert torch.equal(found, expected)
    # It is the caller's own.
    found += 1
    assert torch.equal(found, expected + 1)


def test_what_is_unknown_is_not_a_number() -> None:
    found = padded_rows([(-1.5,), ()], 2, math.nan, torch.float64)
    assert found.isnan().tolist() == [[False, True], [True, True]]
    assert found[0, 0] == -1.5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 numbers, more than 2"):
        padded_rows([(1, 2), (1, 2, 3)], 2, 0, torch.int64)
    with pytest.raises(OverflowError):
        tensor_of([2**63], torch.int64)
    with pytest.raises(TypeError):
        tensor_of([0.5], torch.int64)
