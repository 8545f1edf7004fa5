"""Sums and maxima over ranks go to the device of the rank and come back."""

from __future__ import annotations

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
        # What comes back of `meta` has no numbers, so the copy to the CPU is one of a tensor that has.
        return torch.zeros(2)


def made(world_size: int) -> RankReduction:
    return RankReduction(TwoRanks(), "cpu", world_size)  # type: ignore[arg-type]


def test_tensors_are_reduced_on_the_device_of_the_rank_and_come_back():
    ranks = RankReduction(OnItsDevice(), "meta", 2)  # type: ignore[arg-type]
    found = ranks.sum(torch.ones(2))
    assert found.device == torch.device("cpu")


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
