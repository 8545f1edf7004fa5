"""Copies of a checkpoint: every tensor once, in borrowed memory, whole before anybody reads it. Without a GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from lit_grpo.callbacks.host_copy import HostCopy, plain_tensors

Pair: Any = TwoTensor
"""A class around two plain tensors, as shards and moments in 8 bits are classes around theirs."""


class Memory:
    """Stands in for page-locked memory; notes what was taken and what came back."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []
        self.back: list[torch.Tensor] = []

    def take(self, like: torch.Tensor) -> torch.Tensor:
        self.taken.append(torch.full(like.shape, 99, dtype=like.dtype))
        return self.taken[-1]

    def give_back(self, buffers: Any) -> None:
        self.back += buffers


def ids(tensors: list[torch.Tensor]) -> list[int]:
    return [id(tensor) for tensor in tensors]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let tensors of two dimensions say that they are a GPU's; one entry for each time that the GPU was waited for."""
    found: list[str] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.dim() == 2), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("waited"))
    return found


def test_what_lies_on_a_gpu_is_borrowed_memory_that_comes_back_once(waited: list[str]) -> None:
    memory, weight = Memory(), torch.rand(2, 3)
    host = HostCopy(memory)  # type: ignore[arg-type]
    # One in main memory comes last: there is still something to wait for.
    found = host.of({"weight": weight, "tied": [weight], "pair": (torch.rand(3, 2), 0.5), "step": torch.tensor(1.0)})
    assert waited == ["waited"], "the copies were only begun"
    assert len(memory.taken) == 2
    assert found["weight"] is found["tied"][0] is memory.taken[0]
    assert found["pair"][0] is memory.taken[1]
    assert torch.equal(found["weight"], weight)
    assert not memory.back
    host.release()
    host.release()
    assert ids(memory.back) == ids(memory.taken)
    # Another moment: what the weight is now.
    weight.zero_()
    assert not host.of({"weight": weight})["weight"].any()
    host.of({"step": torch.tensor(2.0)})
    assert len(waited) == 2, "nothing of the last one lies on a GPU"


def test_two_views_of_one_memory_are_told_apart() -> None:
    square = torch.arange(16.0).view(4, 4)
    views = {
        "first": square[:2],
        "second": square[2:],
        "turned": square.t(),
        "whole": square,
        "bits": square.view(torch.int32),
        "again": square[:],
    }
    found = HostCopy(Memory()).of(views)  # type: ignore[arg-type]
    assert {key: value.tolist() for key, value in found.items()} == {key: v.tolist() for key, v in views.items()}
    assert found["bits"].dtype == torch.int32
    assert found["again"] is found["whole"]


def test_a_source_lives_as_long_as_its_copy_is_known_by_its_place() -> None:
    """Else another tensor could come to lie there, and be taken for it."""
    host, weight = HostCopy(Memory()), torch.rand(3)  # type: ignore[arg-type]
    seen = weakref.ref(weight)
    host.of({"weight": weight})
    del weight
    gc.collect()
    assert seen() is not None
    host.release()
    gc.collect()
    assert seen() is None


def test_the_parts_of_a_shard_are_copied_into_a_shard(waited: list[str]) -> None:
    memory, one, other = Memory(), torch.rand(2, 2), torch.rand(2, 2)
    given = Pair(one.clone(), other.clone())
    copied = HostCopy(memory).of({"moment": given})["moment"]  # type: ignore[arg-type]
    assert ids(list(plain_tensors([copied]))) == ids(memory.taken)
    given.a.zero_()
    given.b.zero_()
    assert isinstance(copied, TwoTensor)
    assert torch.equal(copied.a, one)
    assert torch.equal(copied.b, other)


def test_what_has_no_plain_memory_is_copied_as_it_is() -> None:
    sparse, empty = torch.eye(3).to_sparse(), torch.empty(0, 4)
    found = HostCopy(Memory()).of([(sparse, empty)])  # type: ignore[arg-type]
    assert found[0][0] is not sparse
    assert torch.equal(found[0][0].to_dense(), torch.eye(3))
    assert found[0][1].shape == (0, 4)
    assert not list(plain_tensors([(sparse, empty)]))
