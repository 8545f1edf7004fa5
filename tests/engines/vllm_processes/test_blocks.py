"""Weights that go through blocks are those that were sent, and a block is written again only when it was asked for."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lit_grpo.engines import EngineError
from lit_grpo.engines.vllm_processes.blocks import Buffer, number_of, opened, packed

CPU = torch.device("cpu")


def sent() -> list[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shared = torch.randn(7, 5, generator=draw)
    return [
        ("float", shared),
        ("turned", shared.T),
        ("half", torch.randn(33, generator=draw).bfloat16()),
        ("large", torch.randn(400, generator=draw)),
        ("tied", shared),
        ("number", torch.tensor(3)),
        ("none", torch.empty(0, 4)),
        ("ids", torch.arange(9).view(3, 3)),
        ("trained", torch.nn.Parameter(torch.randn(3, generator=draw))),
    ]


def test_weights_come_out_as_they_went_in_however_they_are_cut(tmp_path: Path) -> None:
    for size in (64, 700, 10**6):
        found: dict[str, Tensor] = {}
        buffers: set[int] = set()
        for block in packed(iter(sent()), CPU, tmp_path, size):
            # As another process sees it, which copies before the next block is asked for.
            memory = opened(block.buffer.handle())
            buffers.add(id(block.buffer))
            found |= {entry.name: entry.of(memory).clone() for entry in block.entries}
        expected = dict(sent())
        assert list(found) == list(expected), "in their order"
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor.detach())
            assert found[name].dtype == tensor.dtype
        assert len(buffers) <= 3, "a buffer is made anew only for a larger weight"
        assert not list(tmp_path.iterdir()), "no file stays"


def test_a_block_is_not_written_before_the_next_one_is_asked_for(tmp_path: Path) -> None:
    blocks = packed(iter(sent()), CPU, tmp_path, 200)
    first = next(blocks)
    kept = first.buffer.bytes.clone()
    memory = opened(first.buffer.handle())
    assert torch.equal(memory, kept)
    memory[0] += 1
    assert not torch.equal(first.buffer.bytes, kept), "the same memory, not a copy"
    blocks.close()  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


def test_a_card_is_known_by_its_uuid_whatever_number_it_has_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ["GPU-b", "GPU-a"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=seen[number]))
    assert number_of("GPU-a") == 1
    assert number_of("GPU-b") == 0
    with pytest.raises(EngineError, match="GPU-c, and this process sees GPU-b, GPU-a"):
        number_of("GPU-c")


def test_whoever_has_opened_a_buffer_keeps_it_when_it_is_closed(tmp_path: Path) -> None:
    buffer = Buffer(100, CPU, tmp_path)
    buffer.bytes.fill_(7)
    memory = opened(buffer.handle())
    buffer.close()
    buffer.close()
    assert memory.tolist() == [7] * 100


def test_a_buffer_that_cannot_grow_is_memory_that_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its screen says what is short; and the old memory was given back before more was asked for."""
    made, held = Buffer.__init__, list[weakref.ref[Tensor]]()

    def full(self: Buffer, size: int, device: torch.device, folder: Path) -> None:
        if held:
            assert held[0]() is None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 890.00 MiB")
        made(self, size, device, folder)
        held.append(weakref.ref(self.bytes))

    monkeypatch.setattr(Buffer, "__init__", full)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 890"):
        # As those who read them hold a block until the next one comes.
        for _block in packed([("a", torch.ones(4)), ("embed", torch.ones(2**19))], CPU, tmp_path, 2**16):
            pass
    assert not list(tmp_path.iterdir()), "no file stays"
