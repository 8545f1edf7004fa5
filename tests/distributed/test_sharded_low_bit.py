"""8-bit states and stochastic rounding in shards on two ranks: cut, gone on, gone on with alone, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.commands.export import export
from lit_grpo.distributed import optimizer_state
from lit_grpo.distributed.checkpoint import AnyCheckpointIO
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.policy.optimizer import quantized_state as lb
from lit_grpo.policy.optimizer.build import make_optimizer
from tests import tiny
from tests.distributed.sharded import fit
from tests.ranks import enter, on_two_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("torchao", reason="extra `quantized` is not installed")


def module() -> Any:
    return tiny.module(
        policy=PolicyConfig(tiny=TinyModel(width=64, layers=1, heads=2), dtype="bfloat16"),
        optimizer=OptimizerConfig(type="torchao.optim.AdamW8bit", args={"bf16_stochastic_round": True}, lr=1e-3),
        micro_batch_size=3,
    )


def part(folder: str, rollouts: int, *, ranks: int, strategy: str, resume: int | None = None, **changes: Any) -> Any:
    made = module()
    saver = RolloutCheckpoint(every_n_rollouts=1, keep_last=None, dirpath=f"{folder}/checkpoints")
    path = None if resume is None else f"{folder}/checkpoints/rollout-{resume:06d}.ckpt"
    recorder = fit(
        made,
        tiny.data(rollouts=rollouts),
        ranks=ranks,
        strategy=strategy,
        callbacks=[saver],
        enable_checkpointing=True,
        default_root_dir=folder,
        ckpt_path=path,
        **changes,
    )
    quantized = [
        optimizer_state.is_quantized(lb._local(s["exp_avg"])) for o in made.trainer.optimizers for s in o.state.values()
    ]
    return recorder.metrics, tiny.weights(made), sum(quantized)


def job(rank: int, folder: str) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")
    out: dict[str, Any] = {}
    enter(rank)
    out["whole"] = part(f"{folder}/whole", 3, ranks=2, strategy="fsdp")
    enter(rank)
    part(f"{folder}/cut", 2, ranks=2, strategy="fsdp")
    enter(rank)
    out["again"] = part(f"{folder}/cut", 3, ranks=2, strategy="fsdp", resume=2)
    if rank == 0:
        out["alone"] = part(f"{folder}/cut", 3, ranks=1, strategy="auto", resume=2, plugins=[AnyCheckpointIO()])
    torch.distributed.barrier()
    out["parts"] = {kind: parts(rank, kind) for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}
    out["fused"] = fused(rank)
    return out


class Weights(torch.nn.Module):
    """Shards of two ranks are alike, uneven (12,800 numbers and 12,544), not quantized, and empty on one of them."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"even": (64, 256), "uneven": (99, 256), "plain": (31, 151), "one": (1, 256), "vector": (64,)}
        for seed, (name, shape) in enumerate(shapes.items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            setattr(self, name, torch.nn.Parameter(value))


def local(value: Any) -> torch.Tensor:
    return optimizer_state.full_tensor(lb._local(value)).detach().clone()


def parts(rank: int, kind: str) -> tuple[list[bool], list[int]]:
    """Three steps of two ranks in parts of 4096, beside whole steps of this rank's shards by torchao's own step."""
    model, mesh = Weights(), init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    settings = OptimizerConfig(type=f"torchao.optim.{kind}", lr=1e-2, weight_decay=0.1)
    optimizer, _ = make_optimizer(model, settings, 1)
    shards = torch.nn.ParameterList([local(p) for p in model.parameters()])
    alone, _ = make_optimizer(shards, settings, 1)
    for step in range(3):
        for seed, (p, shard) in enumerate(zip(model.parameters(), shards, strict=True)):
            gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + seed)).bfloat16()
            p.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            shard.grad = local(p.grad)
        with mock.patch.object(lb, "SLICE", 4096):
            optimizer.step()
        cast(Any, type(alone)).step(alone)
    same = [torch.equal(local(p), shard) for p, shard in zip(model.parameters(), shards, strict=True)]
    for p, shard in zip(model.parameters(), shards, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            same.append(torch.equal(local(optimizer.state[p][name]), local(alone.state[shard][name])))
            same.append(optimizer.state[p][name].shape == p.shape)
    return same, [shard.numel() for shard in shards]


def fused(rank: int) -> list[bool]:
    """The defaults of torch's own, in shards, and whether a step moves the weights."""
    out = []
    for kind in ("Adam", "AdamW"):
        model = Weights()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer, _ = make_optimizer(model, OptimizerConfig(type=f"torch.optim.{kind}", lr=0.1), 1)
        before = local(model.even)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        out += [optimizer.defaults["fused"], not torch.equal(before, local(model.even))]
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    import os

    before = os.environ.get("TORCH_COMPILE_DISABLE")
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # a minute for each shape of weight otherwise
    try:
        return on_two_ranks(job, folder)
    finally:
        os.environ.pop("TORCH_COMPILE_DISABLE")
        if before is not None:
            os.environ["TORCH_COMPILE_DISABLE"] = before


def test_a_cut_run_goes_on_to_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        metrics, weights, quantized = rank["whole"]
        assert quantized >= 3, "the larger matrices"
        again, same, _ = rank["again"]
        assert torch.equal(weights, same)
        assert again == metrics[2:]
        assert all(0 < m["optim/update_to_weight_ratio"] < 0.1 for m in metrics)
    assert torch.equal(ranks[0]["whole"][1], ranks[1]["whole"][1])


def test_steps_in_parts_are_those_of_the_shards_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for same, _ in rank["parts"].values():
            assert len(same) == 5 * 5
            assert all(same)
    assert ranks[0]["parts"]["AdamW8bit"][1] == [8192, 12800, 2416, 256, 32]
    assert ranks[1]["parts"]["AdamW8bit"][1] == [8192, 12544, 2265, 0, 32]


def test_adam_is_fused_in_shards(ranks: list[dict[str, Any]]) -> None:
    assert all(all(rank["fused"]) for rank in ranks)


def test_it_goes_on_without_shards(ranks: list[dict[str, Any]]) -> None:
    expected, _, _ = ranks[0]["whole"]
    found, _, quantized = ranks[0]["alone"]
    assert quantized >= 7, "every matrix of the block"
    assert found[0]["reward"] == expected[2]["reward"], "the same weights sample the same completions"
    assert found[0]["optim/update_to_weight_ratio"] == pytest.approx(
        expected[2]["optim/update_to_weight_ratio"], rel=0.1
    )


def test_such_a_checkpoint_is_exported(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    assert export(folder / "whole/checkpoints/last.ckpt", tmp_path / "out").dtype == "bfloat16"
