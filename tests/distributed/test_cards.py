"""Ranks on cards of their own, over NCCL, take the steps of one process on one card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.distributed.sharding import ShardingConfig
from tests import tiny
from tests.distributed.sharded import Unequal, fit
from tests.distributed.test_sharded import RUNS, agree, seen
from tests.ranks import enter, on_ranks

RANKS = 4 if torch.cuda.device_count() >= 4 else 2
NAME = "frozen reference"
STRATEGIES = ("ddp", "fsdp")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
]


def run(ranks: int, strategy: str) -> tuple[Any, Unequal]:
    settings, data = RUNS[NAME]
    # In float32, as on a CPU: in bfloat16 the order of a sum shows.
    sharding = ShardingConfig(param_dtype="float32")
    module = tiny.module(**({"micro_batch_size": 3, "zero_advantage_samples": None, "sharding": sharding} | settings))
    return module, fit(module, tiny.data(**data), ranks=ranks, strategy=strategy, accelerator="cuda")


def job(rank: int, folder: str) -> dict[str, Any]:
    out = {}
    for strategy in STRATEGIES:
        enter(rank, RANKS)
        module, recorder = run(RANKS, strategy)
        out[strategy] = seen(module, recorder) | {"sharded": module.sharded}
        out[strategy]["weights"] = out[strategy]["weights"].cpu()
    return out


def test_ranks_on_cards_take_the_steps_of_one_card(tmp_path: Any) -> None:
    module, single = run(1, "auto")
    ranks = on_ranks(RANKS, job, tmp_path)
    for strategy in STRATEGIES:
        each = [rank[strategy] for rank in ranks]
        assert [one["sharded"] for one in each] == [strategy == "fsdp"] * RANKS
        for step, expected in enumerate(single.metrics):
            assert [ids for one in each for ids in one["ids"][step]] == single.ids[step], "the same completions"
            for one in each:
                agree(one["metrics"][step], expected)
        for one in each:
            torch.testing.assert_close(one["weights"], tiny.weights(module).cpu(), atol=1e-4, rtol=0)
