"""Main memory that a GPU copies into: made ahead, locked page by page, and given back. Without a GPU."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import host_memory
from lit_grpo.callbacks.host_copy import plain_tensors
from lit_grpo.callbacks.host_memory import HostMemory
from lit_grpo.utils.memory import is_out_of_memory

MEGABYTE = 2**20


class Driver:
    """Stands in for CUDA's: knows which bytes are locked, and refuses what the real one refuses."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.most = 10**12
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        pages = range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1)
        for other, length in self.locked.items():
            taken = range(other // mmap.PAGESIZE, (other + length - 1) // mmap.PAGESIZE + 1)
            if pages.start < taken.stop and taken.start < pages.stop:
                return 712
        if sum(self.locked.values()) + size > self.most:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.locked.pop(address, None) else 713


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found, empty = Driver(), torch.empty

    def small(shape: Any, *, dtype: Any, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(host_memory, "torch", SimpleNamespace(**vars(torch) | {"empty": small}))
    yield found
    assert not [t for t in threading.enumerate() if t.name == "checkpoint-memory"]


class OnCard(torch.Tensor):
    """A tensor that says that it is a GPU's."""

    is_cuda = True


def on_card(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(*shape, dtype=dtype).as_subclass(OnCard)


def made() -> None:
    """Wait until nothing is made any more."""
    end = time.monotonic() + 60
    while [t for t in threading.enumerate() if t.name == "checkpoint-memory"]:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("shape", [(3,), (1,), (2**18,), (513, 1025), (7, 2**17, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_buffer_has_the_form_of_the_tensor_and_holds_it(driver: Driver, shape: Any, dtype: Any) -> None:
    memory, like = HostMemory(), (torch.rand(shape) * 100).to(dtype)
    buffer = memory.take(like)
    assert (buffer.shape, buffer.dtype) == (like.shape, like.dtype)
    buffer.copy_(like)
    assert torch.equal(buffer, like)
    size = like.numel() * like.element_size()
    assert list(driver.locked.values()) == ([size] if size >= MEGABYTE else [])
    memory.close()
    assert not driver.locked
    # It is no longer locked, and still the tensor's own.
    assert torch.equal(buffer, like)


def test_buffers_share_no_page(driver: Driver) -> None:
    memory = HostMemory()
    buffers = [memory.take(torch.empty(MEGABYTE + odd, dtype=torch.uint8)) for odd in (0, 1, 4095, 17, 1)]
    assert len(driver.locked) == 5
    memory.give_back(buffers)
    assert memory.take(buffers[0]) is buffers[0]
    assert driver.calls == 5
    memory.close()


def test_what_was_made_ahead_is_taken(driver: Driver) -> None:
    weight, moment, half = on_card(512, 1024), on_card(512, 1024), on_card(512, 1024, dtype=torch.bfloat16)
    memory = HostMemory()
    tied = weight[:]
    memory.reserve([weight, moment, weight, tied, half, torch.zeros(2**20)])
    made()
    assert driver.calls == 3, "one of each, and none for what lies in main memory"
    for tensor in (weight, moment, half):
        memory.take(tensor)
    assert driver.calls == 3
    memory.take(weight)
    assert driver.calls == 4
    memory.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_memory_that_the_driver_does_not_lock_is_taken_all_the_same(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a limit, say: the copy takes longer, and the run goes on. It is said once."""
    asked: list[bool] = []
    monkeypatch.setattr(host_memory, "_forget_error", lambda: asked.append(True))
    driver.most = 3 * MEGABYTE
    weight, memory = on_card(2, MEGABYTE, dtype=torch.uint8), HostMemory()
    memory.reserve([weight, on_card(2, MEGABYTE, dtype=torch.uint8)])
    made()
    buffers = [memory.take(weight) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 3
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [int(buffer.sum()) for buffer in buffers] == [0, 2 * MEGABYTE, 4 * MEGABYTE]
    assert len(driver.locked) == 1
    assert len(asked) == 2, "each refusal leaves an error behind"
    assert caplog.text.count("locks no main memory") == 1
    memory.close()
    assert not driver.locked


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_system_without_memory_is_told_as_memory_that_ran_out(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes a buffer knows it by that, and writes the checkpoint without a copy then."""

    def full(*args: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "mmap", SimpleNamespace(mmap=full))
    memory = HostMemory()
    memory.reserve([on_card(2, MEGABYTE, dtype=torch.uint8)])
    made()
    with pytest.raises(MemoryError, match=r"1048576 bytes of main memory: .*Cannot allocate memory") as caught:
        memory.take(torch.empty(MEGABYTE, dtype=torch.uint8))
    assert is_out_of_memory(caught.value)


def test_a_closed_memory_keeps_no_buffer(driver: Driver) -> None:
    memory = HostMemory()
    buffer = memory.take(torch.empty(MEGABYTE, dtype=torch.uint8))
    seen = weakref.ref(buffer)
    memory.give_back([buffer])
    del buffer
    gc.collect()
    assert seen() is not None
    memory.close()
    gc.collect()
    assert seen() is None


def test_a_process_that_ends_asks_the_driver_for_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be gone by then."""
    made = SimpleNamespace(atexit=True)
    monkeypatch.setattr(host_memory, "weakref", SimpleNamespace(finalize=lambda *args: made))
    HostMemory()
    assert made.atexit is False


def test_nothing_stays_locked_of_memory_that_nobody_closed(driver: Driver) -> None:
    memory = HostMemory()
    memory.take(torch.empty(MEGABYTE, dtype=torch.uint8))
    assert driver.locked
    del memory
    gc.collect()
    assert not driver.locked


def test_pages_are_there_until_they_are_unlocked(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, unlock = HostMemory(), driver.cudaHostUnregister
    memory.take(torch.empty(MEGABYTE, dtype=torch.uint8))
    raw = weakref.ref(memory._locked[0])
    there: list[bool] = []

    def look(address: int) -> int:
        there.append(raw() is not None)
        return unlock(address)

    monkeypatch.setattr(driver, "cudaHostUnregister", look)
    memory.close()
    gc.collect()
    assert there == [True]
    assert raw() is None


def test_closing_ends_what_is_being_made(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    go, memory = threading.Event(), HostMemory()
    lock = driver.cudaHostRegister

    def slowly(*args: int) -> int:
        assert go.wait(60)
        return lock(*args)

    monkeypatch.setattr(driver, "cudaHostRegister", slowly)
    memory.reserve([on_card(MEGABYTE), on_card(MEGABYTE)])
    memory.close()
    go.set()
    made()
    assert driver.calls == 1
    assert not driver.locked


def test_the_plain_tensors_of_a_checkpoint_are_found() -> None:
    inner = torch.ones(3)
    content = {"state": [{"step": torch.tensor(1.0), "moment": inner}], "text": "x", "none": torch.empty(0)}
    found = list(plain_tensors(content))
    assert len(found) == 2
    assert found[1] is inner
