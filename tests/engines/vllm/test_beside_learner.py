"""Whole runs on vLLM, in this process or in two more: beside the learner, and going on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.engines import EngineConfig
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.types import Sampling
from tests import tiny
from tests.rollout.test_staleness import Truth

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares float32 log-probabilities; CUDA has bfloat16"),
]
POLICY = PolicyConfig(tiny=TinyModel(layers=2, width=64, heads=2))  # vLLM on CPU wants heads of 32 or more


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning saves into the working folder where a trainer has callbacks and no folder."""
    monkeypatch.chdir(tmp_path)


def engine(processes: int) -> EngineConfig:
    return EngineConfig(name="vllm", max_num_seqs=32, processes=processes, args={"kv_cache_memory_bytes": 2**26})


def run(
    staleness: int, *callbacks: Any, rollouts: int = 4, processes: int = 1, **fit: Any
) -> tuple[Any, tiny.Recorder]:
    recorder = tiny.Recorder()
    module = tiny.module(policy=POLICY, max_staleness=staleness, updates_per_rollout=2)
    data = tiny.data(rollouts=rollouts, engine=engine(processes), sampling=Sampling(max_new_tokens=8))
    trainer = tiny.trainer(callbacks=[recorder, *callbacks], enable_checkpointing=bool(callbacks))
    trainer.fit(module, datamodule=data, **fit)
    return module, recorder


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
def test_rollouts_are_exactly_as_old_as_allowed(staleness: int, processes: int) -> None:
    truth = Truth()
    run(staleness, truth, processes=processes)
    expected = [max(0, k - staleness) for k in range(4)]
    assert truth.sampled_by == expected
    assert truth.said == [{version} for version in expected]


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """It even goes on with another number of engine processes, and equals it to the bit."""
    whole, seen = run(0, RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), keep_last=None))
    for processes in (1, 2):
        check_resumed(whole, seen, tmp_path, processes)


def check_resumed(whole: Any, seen: tiny.Recorder, folder: Path, processes: int) -> None:
    checkpoint = folder / "rollout-000002.ckpt"
    again, rest = run(0, processes=processes, ckpt_path=checkpoint, weights_only=False)
    assert rest.ids == seen.ids[2:]
    assert torch.equal(tiny.weights(again), tiny.weights(whole))
