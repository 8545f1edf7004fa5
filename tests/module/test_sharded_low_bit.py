"""8-bit states and stochastic rounding in shards on two ranks: cut, gone on, gone on with alone, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.export import export
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.policy import low_bit as lb
from lit_grpo.sharded_checkpoint import AnyCheckpointIO
from tests import tiny
from tests.module.sharded import enter, fit, on_two_ranks

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
    quantized = [lb.is_quantized(lb._local(s["exp_avg"])) for o in made.trainer.optimizers for s in o.state.values()]
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
        assert all(0 < m["update_size"] < 0.1 for m in metrics)
    assert torch.equal(ranks[0]["whole"][1], ranks[1]["whole"][1])


def test_it_goes_on_without_shards(ranks: list[dict[str, Any]]) -> None:
    expected, _, _ = ranks[0]["whole"]
    found, _, quantized = ranks[0]["alone"]
    assert quantized >= 7, "every matrix of the block"
    assert found[0]["reward"] == expected[2]["reward"], "the same weights sample the same completions"
    assert found[0]["update_size"] == pytest.approx(expected[2]["update_size"], rel=0.1)


def test_such_a_checkpoint_is_exported(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    assert export(folder / "whole/checkpoints/last.ckpt", tmp_path / "out").dtype == "bfloat16"
