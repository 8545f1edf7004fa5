"""Ranks under FSDP2, each with engine processes of its own, take the steps of one process with one engine in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.engines import EngineConfig
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.types import Sampling
from tests import tiny
from tests.engines.vllm_processes.test_process import alive, below
from tests.ranks import WORLD, enter, on_two_ranks
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares weights closely; CUDA has bfloat16"),
]


class Killer(tiny.Recorder):
    """Kills an engine process of the last rank after the first step, and notes which processes there are."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.engines = rank, list[int]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.engines:
            return
        started = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in below(os.getpid())}
        # The supervisor of each has the same words in its command, as arguments.
        self.engines = [pid for pid, words in started.items() if words[1:2] == [b"-m"] and b"worker" in words[2]]
        if self.rank == WORLD - 1:
            os.kill(self.engines[0], signal.SIGKILL)


def fit(processes: int, recorder: tiny.Recorder, **trainer: Any) -> Any:
    module = tiny.module(policy=PolicyConfig(tiny=TinyModel(layers=2, width=64, heads=2)), updates_per_rollout=2)
    args = {"kv_cache_memory_bytes": 2**26}
    engine = EngineConfig(name="vllm", max_num_seqs=8, processes=processes, args=args)
    data = tiny.data(rollouts=3, engine=engine, sampling=Sampling(max_new_tokens=12))
    tiny.trainer(callbacks=[recorder], **trainer).fit(module, datamodule=data)
    return module


def job(rank: int, folder: str) -> dict[str, Any]:
    enter(rank)
    os.chdir(folder)
    killer = Killer(rank)
    module = fit(2, killer, devices=WORLD, strategy=FSDP2Strategy())
    return {
        "ids": killer.ids, "versions": killer.versions, "engines": killer.engines, "weights": tiny.weights(module),
        "metrics": killer.metrics, "sharded": module.sharded,
    }  # fmt: skip


def test_two_ranks_with_two_engines_each_through_the_death_of_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    alone = tiny.Recorder()
    module = fit(1, alone)
    first, second = on_two_ranks(job, tmp_path)
    assert first["sharded"]
    assert [len(rank["engines"]) for rank in (first, second)] == [2, 2]
    assert not set(first["engines"]) & set(second["engines"])
    for step, expected in enumerate(alone.ids):
        assert first["ids"][step] + second["ids"][step] == expected, "the same prompts, seeds and weights"
    for rank in (first, second):
        assert rank["versions"] == [(k, k) for k in range(3)]
        torch.testing.assert_close(rank["weights"], tiny.weights(module), atol=1e-4, rtol=0)
        for found, single in zip(rank["metrics"], alone.metrics, strict=True):
            assert found["optim/grad_norm"] == pytest.approx(single["optim/grad_norm"], abs=1e-4)
            assert found["loss"] == pytest.approx(single["loss"], abs=1e-4)
    engines = [*first["engines"], *second["engines"]]
    wait_until(lambda: not any(map(alive, engines)), f"the end of {engines}", seconds=60)
