"""A whole run on two engine processes, one of which is killed, ends as one in this process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.engines import EngineConfig
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.types import Sampling
from tests import tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares weights to the bit; CUDA has bfloat16"),
]
POLICY = PolicyConfig(tiny=TinyModel(layers=2, width=64, heads=2))


class Killer(pl.Callback):
    """Kills a process of the engine after the first step, so that the next rollout finds it dead."""

    killed = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        engine = trainer.datamodule.producer.engine
        if not self.killed:
            supervisor = engine._group._processes[0]._process.pid
            self.killed = int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text())
            os.kill(self.killed, signal.SIGKILL)


def run(processes: int, *callbacks: Any) -> tuple[Any, tiny.Recorder]:
    recorder = tiny.Recorder()
    module = tiny.module(policy=POLICY)
    engine = EngineConfig(name="vllm", max_num_seqs=8, processes=processes, args={"kv_cache_memory_bytes": 2**26})
    data = tiny.data(rollouts=3, engine=engine, sampling=Sampling(max_new_tokens=24))
    tiny.trainer(callbacks=[recorder, *callbacks]).fit(module, datamodule=data)
    return module, recorder


def test_a_run_through_a_death_is_the_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone, seen = run(1)
    killer = Killer()
    several, again = run(2, killer)
    assert killer.killed
    assert again.ids == seen.ids
    assert torch.equal(tiny.weights(several), tiny.weights(alone))


# -------------------------------------------------------------------------------------------------- adapters


class Agreement(pl.Callback):
    """The largest gap, in nats, between what engine and learner say of a token, step by step."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.gaps.append(float(pl_module.step_metrics["sampler_mismatch/logprob_diff_max"]))
