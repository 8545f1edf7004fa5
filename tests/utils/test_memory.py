"""What is said of memory that ran out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.errors import EngineError, UserError
from lit_grpo.utils import memory
from lit_grpo.utils.memory import (
    Holder,
    MemoryReport,
    MemoryShortageError,
    bytes_asked,
    is_out_of_memory,
    processes_on_card,
    report,
    screen_if_out_of_memory,
)

GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.52 GiB is free."
)
VLLM = (
    "Free memory on device cuda:0 (10.21/79.1 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.19 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
CACHE = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
)
CARD = "GPU-0b1c"


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(GPU), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (ValueError(VLLM), True),
        (ValueError(CACHE), True),
        (caused(EngineError("vLLM does not start"), ValueError(CACHE)), True),
        (caused(UserError("vLLM does not start with these settings"), ValueError(VLLM)), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("no memory of that"), False),
        (caused(MemoryShortageError("told already"), torch.OutOfMemoryError(GPU)), False),
        (None, False),
    ],
)
def test_it_is_known_whether_memory_ran_out(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_allocator_of_the_cpu_is_understood():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert bytes_asked(str(caught.value)) == 2**55


def test_a_report_of_a_card_names_who_holds_it():
    found = MemoryReport("GPU 0 (NVIDIA H200)", 2 * 2**30, 2**29, 140 * 2**30, 90 * 2**30, 80 * 2**30,
                         (Holder(12, "python3", 40 * 2**30), Holder(13, "Xorg", 2**28)))  # fmt: skip
    text = str(found)
    assert "2.00 GiB were asked for; 512.0 MiB of GPU 0 (NVIDIA H200) are free, which has 140.00 GiB" in text
    assert "This process holds 90.00 GiB, 80.00 GiB of it tensors" in text
    assert "python3 (pid 12) 40.00 GiB, Xorg (pid 13) 256.0 MiB" in text
    assert "9.25 GiB are held by what is not seen from here" in text


def test_what_is_not_known_is_said_to_be_unknown():
    text = str(MemoryReport("GPU 0 (NVIDIA H200)"))
    assert "ow much was asked for is not known" in text
    assert "how much of GPU 0 (NVIDIA H200) is free is not known" in text
    assert "What this process holds is not known" in text
    assert "nvidia-smi gives no answer" in text


def test_main_memory_is_reported_from_what_the_system_says():
    found = report("cpu", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes.")
    assert found.asked == 1024
    if Path("/proc/meminfo").exists():
        assert found.free is not None
        assert found.total is not None
        assert 0 < found.free < found.total
        assert found.own is not None
        assert found.own > 2**26
        assert all(holder.pid != os.getpid() for holder in found.others or ())


def answer(monkeypatch: Any, folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_other_processes_on_a_card_are_those_that_nvidia_smi_lists(monkeypatch, tmp_path):
    lines = [
        f"{CARD}, {os.getpid()}, python, 900",
        f"{CARD}, 41, /usr/bin/a,b, 1000",
        f"{CARD}, 42, big, 30000",
        f"{CARD}, 43, hidden, [N/A]",
        "GPU-other, 44, elsewhere, 5",
    ]
    answer(monkeypatch, tmp_path, "\n".join(f"echo '{line}'" for line in lines))
    assert processes_on_card(CARD) == (
        Holder(42, "big", 30000 * 2**20),
        Holder(41, "/usr/bin/a,b", 1000 * 2**20),
        Holder(43, "hidden", None),
    )


@pytest.mark.parametrize("script", ["exit 9", "sleep 30"])
def test_no_answer_is_no_list(monkeypatch, tmp_path, script):
    monkeypatch.setattr(memory, "_NVIDIA_SMI_SECONDS", 0.3)
    answer(monkeypatch, tmp_path, script)
    assert processes_on_card(CARD) is None


def test_without_the_program_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes_on_card(CARD) is None


def test_a_report_never_fails(monkeypatch):
    def broken(*_: Any) -> Any:
        raise subprocess.SubprocessError

    monkeypatch.setattr(memory, "_in_main_memory", broken)
    assert "cpu (SubprocessError while it was asked)" in str(report("cpu", GPU))


def test_the_engine_s_own_words_are_kept_where_it_names_no_bytes():
    error = caused(UserError("vLLM does not start with these settings"), ValueError(f"{CACHE}\nmore"))
    with (
        pytest.raises(MemoryShortageError) as caught,
        screen_if_out_of_memory("starting the engine", "cpu", where="data.engine", remedies=("ask for less",)),
    ):
        raise error
    assert f"memory ran out while starting the engine ({CACHE})" in caught.value.what
    assert caught.value.where == "data.engine"
    assert "ask for less" in str(caught.value.remedy)


def test_other_errors_pass_the_screen():
    with pytest.raises(KeyError), screen_if_out_of_memory("x", "cpu", where=None, remedies=()):
        raise KeyError("other")
