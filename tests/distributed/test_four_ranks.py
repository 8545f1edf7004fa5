"""FSDP2 and DDP on four ranks take the steps of one process: losses, gradient norms, weights, rollout by rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.distributed.test_sharded import agree, run, seen
from tests.ranks import enter, on_ranks

pytestmark = pytest.mark.slow

RANKS = 4
# One prompt a rank and two updates of each rollout against a reference; and minibatches of which each has work for one
# rank alone, so that three of four have none in every step.
CASES = [("ddp", "frozen reference"), ("fsdp", "frozen reference"), ("fsdp", "minibatches")]


def job(rank: int, folder: str) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for strategy, name in CASES:
        enter(rank, RANKS)
        module, recorder = run(name, RANKS, strategy)
        out[strategy, name] = seen(module, recorder) | {"sharded": module.sharded}
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_ranks(RANKS, job, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_four_ranks_take_the_steps_of_one_process(ranks: Any, strategy: str, name: str) -> None:
    module, single = run(name, 1, "auto")
    each = [rank[strategy, name] for rank in ranks]
    assert [one["sharded"] for one in each] == [strategy == "fsdp"] * RANKS
    for step, expected in enumerate(single.metrics):
        assert [ids for one in each for ids in one["ids"][step]] == single.ids[step], "the same completions"
        for one in each:
            agree(one["metrics"][step], expected)
    for one in each:
        assert torch.equal(one["weights"], each[0]["weights"])
    torch.testing.assert_close(each[0]["weights"], tiny.weights(module), atol=1e-4, rtol=0)
    untrained = tiny.module()
    untrained.configure_model()
    assert not torch.allclose(tiny.weights(untrained), tiny.weights(module), atol=1e-3), "steps of a size that shows"
    if name == "frozen reference":
        assert sum(abs(metrics["loss"]) for metrics in single.metrics) > 1e-3
    else:
        assert all(0 in one["micro_batches"] for one in each), "every rank had steps without work"
