"""Sums and maxima over ranks go to the device of the rank and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.distributed.reduction import RankReduction


class TwoRanks:
    """Stands in for a strategy whose other rank holds the same tensors, each number larger by one."""

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return 2 * tensor + 1 if reduce_op == "sum" else tensor + 1


class OnItsDevice:
    """Stands in for NCCL, which refuses tensors that are not on the device."""

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        assert tensor.device == torch.device("meta")
        return tensor


def made(world_size: int) -> RankReduction:
    return RankReduction(TwoRanks(), "cpu", world_size)  # type: ignore[arg-type]


def test_tensors_are_reduced_on_the_device_of_the_rank_and_come_back():
    ranks = RankReduction(OnItsDevice(), "meta", 2)  # type: ignore[arg-type]
    # Nothing can be copied off `meta`, and torch says so: the tensor went there, and was on its way back.
    with pytest.raises(NotImplementedError, match="out of meta tensor"):
        ranks.sum(torch.ones(2))


def test_sums_and_maxima():
    ranks = made(2)
    assert ranks.sum(torch.tensor([1.0, 2.0])).tolist() == [3.0, 5.0]
    assert ranks.max(torch.tensor([1.0, 2.0])).tolist() == [2.0, 3.0]
    assert ranks.several
    assert (ranks.sum_or_none, ranks.max_or_none) == (ranks.sum, ranks.max)


def test_one_rank_reduces_nothing():
    alone = made(1)
    assert not alone.several
    assert alone.sum_or_none is None
    assert alone.max_or_none is None
    assert alone.gather("mine") == ["mine"]


def test_values_of_all_ranks_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_rank_1(values: list[Any], mine: str) -> None:
        # Torch wants exactly one place for each rank.
        assert len(values) == 2
        values[:] = ["rank 0's", mine]

    monkeypatch.setattr(torch.distributed, "all_gather_object", as_rank_1)
    assert made(2).gather("mine") == ["rank 0's", "mine"]
