"""What trainer.strategy means, and who reads folders of shards."""

from __future__ import annotations

import pytest
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lit_grpo.cli.strategy import add_checkpoint_reader, resolve_strategy
from lit_grpo.distributed.checkpoint import AnyCheckpointIO
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.errors import UserError


def test_fsdp_and_lightnings_class_for_it_mean_fsdp2():
    assert isinstance(resolve_strategy("fsdp"), FSDP2Strategy)
    chosen = resolve_strategy(ModelParallelStrategy(process_group_backend="gloo"))
    assert isinstance(chosen, FSDP2Strategy)
    assert chosen.process_group_backend == "gloo"


@pytest.mark.parametrize("strategy", ["auto", "ddp", DDPStrategy(), FSDP2Strategy()])
def test_other_strategies_stay(strategy):
    assert resolve_strategy(strategy) is strategy


class FSDPStrategy:
    """Stands for Lightning's, which cannot be made without a GPU."""


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("fsdp_cpu_offload", r"FSDP1(.|\n)*cpu_offload: true"),
        (FSDPStrategy(), r"FSDP1(.|\n)*strategy: fsdp"),
        (ModelParallelStrategy(tensor_parallel_size=2), "no tensor parallelism"),
    ],
)
def test_what_the_learner_cannot_do_is_refused(strategy, words):
    with pytest.raises(UserError, match=words):
        resolve_strategy(strategy)


def test_only_runs_that_are_not_sharded_need_a_reader_of_shards():
    assert [type(plugin) for plugin in add_checkpoint_reader(None, "ddp")] == [AnyCheckpointIO]
    assert add_checkpoint_reader(None, FSDP2Strategy()) == []
    own = TorchCheckpointIO()
    assert add_checkpoint_reader(own, "auto") == [own]
