"""Memory that runs out in an engine: what is missing is asked for again in smaller portions, or one screen says so."""

from __future__ import annotations

from typing import Any

import pytest

from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import EngineError
from lit_grpo.rollout import engine_start
from lit_grpo.utils.memory import MemoryShortageError
from tests import tiny

CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


def run(**changes: Any) -> tiny.Recorder:
    recorder = tiny.Recorder()
    tiny.trainer(callbacks=[recorder]).fit(tiny.module(), datamodule=tiny.data(rollouts=1, **changes))
    return recorder


def fail_in(monkeypatch: Any, calls: Any) -> list[int]:
    original, sizes = TransformersEngine._decode, list[int]()

    def decode(self: Any, rows: Any, sampling: Any) -> Any:
        sizes.append(len(rows))
        if len(sizes) - 1 in calls:
            raise RuntimeError(CPU)
        return original(self, rows, sampling)

    monkeypatch.setattr(TransformersEngine, "_decode", decode)
    return sizes


def test_generation_on_a_cpu_goes_on_in_smaller_portions(monkeypatch):
    expected = run().ids
    # The first two calls are the check of the first sync.
    sizes = fail_in(monkeypatch, {2})
    assert run().ids == expected
    assert sizes[2:] == [16, 8, 8]


def test_generation_that_goes_on_failing_ends_in_one_screen(monkeypatch):
    fail_in(monkeypatch, range(2, 100))
    with pytest.raises(MemoryShortageError, match="sampling 4 completions at once, the fewest") as caught:
        run()
    assert caught.value.where == "data.engine"
    assert "0.0 MiB were asked for" in caught.value.what


@pytest.mark.parametrize("error", [
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    EngineError("vLLM does not start: RuntimeError: CUDA error: out of memory"),
    RuntimeError(CPU),
])  # fmt: skip
def test_an_engine_that_finds_no_memory_at_its_start_is_told_in_one_screen(monkeypatch, error):
    def make(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(engine_start, "make_engine", make)
    with pytest.raises(MemoryShortageError, match="memory ran out while starting the engine") as caught:
        run()
    assert "data.engine.gpu_memory_utilization" in str(caught.value.remedy)
