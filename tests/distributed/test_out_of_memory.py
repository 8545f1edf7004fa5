"""Memory that runs out on one of two ranks: under DDP it mends itself, in shards that rank says so and all end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.learner.optimizer_step import OptimizerStepper
from lit_grpo.policy import OptimizerConfig
from lit_grpo.utils.memory import MemoryShortageError
from tests import tiny
from tests.distributed.sharded import fit
from tests.learner.helpers import Given, part, rollout
from tests.ranks import enter, on_two_ranks

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "optimizer": OptimizerConfig(type="torch.optim.SGD", lr=0.1),
    "micro_batch_size": None,
    "step_kl_samples": 0,
    "zero_advantage_samples": None,
}


def train(rank: int, strategy: str, *, faults: bool) -> Any:
    enter(rank)
    module = tiny.module(**SETTINGS)
    module.connect(tiny.context(2))
    original, calls = OptimizerStepper._micro_batch, 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if faults and rank == 1 and calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return result

    OptimizerStepper._micro_batch = faulty  # type: ignore[method-assign]
    try:
        recorder = fit(module, Given(*(part(rollout(seed=k), rank) for k in range(2))), ranks=2, strategy=strategy)
    finally:
        OptimizerStepper._micro_batch = original  # type: ignore[method-assign]
    return module, recorder


def ddp_job(rank: int, folder: str) -> Any:
    out = {}
    for faults in (False, True):
        module, recorder = train(rank, "ddp", faults=faults)
        out[faults] = {
            "weights": tiny.weights(module),
            "metrics": recorder.metrics,
            "budget": module.budget.tokens,
            "repeated": module.counters.repeated_steps,
        }
    return out


def fsdp_job(rank: int, folder: str) -> str:
    try:
        train(rank, "fsdp", faults=True)
    except MemoryShortageError as error:
        return f"{type(error).__name__}: {error}"
    # The other rank waits in a collective that fails when this one is gone.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_rank_repeats_its_part_and_all_keep_to_the_smaller_micro_batches(tmp_path: Any) -> None:
    ranks = on_two_ranks(ddp_job, tmp_path)
    for rank in ranks:
        assert torch.allclose(rank[True]["weights"], rank[False]["weights"], atol=1e-6, rtol=0)
        for now, then in zip(rank[True]["metrics"], rank[False]["metrics"], strict=True):
            assert now["loss"] == pytest.approx(then["loss"], abs=1e-6)
            assert now["completions/length"] == then["completions/length"]
    assert torch.equal(ranks[0][True]["weights"], ranks[1][True]["weights"])
    assert [rank[True]["repeated"] for rank in ranks] == [0, 1]
    assert ranks[0][True]["budget"] == ranks[1][True]["budget"] < ranks[0][False]["budget"]


def test_in_shards_it_is_told_at_once_and_no_rank_hangs(tmp_path: Any) -> None:
    ranks = on_two_ranks(fsdp_job, tmp_path)
    assert ranks[1].startswith("MemoryShortageError: memory ran out while learning from a rollout")
    assert "ranks that hold shards of one model wait for one another" in ranks[1]
    assert "set model.micro_batch_tokens to" in ranks[1]
    assert ranks[0] != "nothing happened"
