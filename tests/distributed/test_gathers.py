"""How often shards are gathered and gradients summed in a step, by which the docs compute the traffic between hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests import tiny
from tests.distributed.sharded import fit
from tests.learner.helpers import Given, rollout
from tests.ranks import WORLD, enter, on_ranks

pytestmark = pytest.mark.slow
MICRO_BATCHES = 4


class Counts(pl.Callback):
    """The numbers of weights of each gather and of each sum, step by step."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

        self.now: tuple[list[int], list[int]] = ([], [])
        self.steps: list[tuple[list[int], list[int]]] = []
        for number, name in enumerate(("foreach_all_gather", "foreach_reduce")):
            setattr(group, name, self.counted(getattr(group, name), number))

    def counted(self, inner: Any, number: int) -> Any:
        def outer(weights: Any, *args: Any, **kwargs: Any) -> Any:
            self.now[number].append(len(weights))
            return inner(weights, *args, **kwargs)

        return outer

    def on_train_batch_start(self, *args: Any) -> None:
        self.now = ([], [])

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(self.now)


def job(rank: int, folder: str) -> dict[str, Any]:
    enter(rank)
    counts = Counts()
    module = tiny.module(micro_batch_tokens=None, micro_batch_size=2)
    module.connect(tiny.context(2))
    # Each group has contrast: no completion goes through the model without gradient.
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    loader = Given(*(rollout(seed=k, rewards=rewards) for k in range(2)))
    fit(module, loader, ranks=WORLD, strategy="fsdp", callbacks=[counts])
    assert module.policy is not None
    return {"steps": counts.steps, "blocks": module.policy.model.config.num_hidden_layers}


def test_blocks_twice_a_micro_batch_and_the_rest_once_a_step(tmp_path: Path) -> None:
    for found in on_ranks(WORLD, job, tmp_path):
        blocks = found["blocks"]
        gathers, sums = found["steps"][1]
        rest, block = gathers[0], gathers[1]
        assert rest != block, "told apart by their numbers of weights"
        # The rest is gathered again by the pass that looks at the step.
        look = gathers.index(rest, 1)
        assert gathers.count(rest) == 2
        assert gathers[1:look] == [block] * (MICRO_BATCHES * 2 * blocks)
        assert sorted(sums) == sorted([block] * (MICRO_BATCHES * blocks) + [rest] * MICRO_BATCHES)
