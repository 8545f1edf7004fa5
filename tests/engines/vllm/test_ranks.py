"""Several processes that train, each with an engine of its own in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.engines.vllm.start import place_among_processes
from lit_grpo.types import Request, Sampling
from lit_grpo.utils.ports import free_port


def test_vllm_is_told_rank_and_device_as_torchrun_would_and_only_while_it_starts(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")  # the second device of the second machine
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with place_among_processes():
        assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]
    assert "RANK" not in os.environ
    assert os.environ["LOCAL_RANK"] == "1"


def test_a_process_alone_is_told_nothing(monkeypatch: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with place_among_processes():
        assert "RANK" not in os.environ


@pytest.mark.vllm
def test_each_rank_samples_its_own_number_of_tokens(tmp_path: Path) -> None:
    """Ranks never wait for each other while they sample, and the learner's collectives work afterwards."""
    from tests.engines.vllm.vllm_fixtures import make_model

    make_model(True, 0).save_pretrained(tmp_path)
    torch.multiprocessing.spawn(_sample, args=(str(tmp_path), free_port()), nprocs=2)


def _sample(rank: int, folder: str, port: int) -> None:
    from lit_grpo.engines.vllm.engine import VLLMEngine

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() > 1 else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=2)
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(rank)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = VLLMEngine(folder, end_token_ids=(), dtype=dtype, max_model_len=32, max_num_seqs=4,
                        gpu_memory_utilization=0.1)  # fmt: skip
    length = 3 + 5 * rank
    made = [len(c.token_ids) for c in engine.generate([Request(0, (1, 2, 3), (7, 8))], Sampling(max_new_tokens=length))]
    assert made == [length, length]
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    assert total.item() == 1.0
    assert "RANK" not in os.environ
    engine.close()
    torch.distributed.destroy_process_group()
