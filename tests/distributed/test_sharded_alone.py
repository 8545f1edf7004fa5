"""FSDP2 on one device: the numbers of a run without shards, and weights that change while their root is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils._pytree import tree_leaves

from lit_grpo.distributed import sharding
from lit_grpo.distributed.checkpoint import read_sharded
from lit_grpo.distributed.sharding import ShardingConfig, dtype_of
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig, PolicyConfig
from lit_grpo.policy.forward.batching import pad_rows
from lit_grpo.policy.forward.policy import TokenStats
from tests import tiny
from tests.learner.helpers import Given, rollout


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    yield
    torch.distributed.destroy_process_group()


UNIFORM = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
"""Rewards of two groups: one to learn from, and one whose completions only stand for themselves in the metrics."""


def fit(strategy: Any, *, batches: int = 2, callbacks: Any = (), **changes: Any) -> tuple[Any, tiny.Recorder]:
    module, recorder = tiny.module(**changes), tiny.Recorder()
    loader = Given(*(rollout(seed=k, rewards=UNIFORM) for k in range(batches)))
    module.connect(tiny.context(batches))
    tiny.trainer(devices=1, strategy=strategy, callbacks=[recorder, *callbacks]).fit(module, loader)
    return module, recorder


RUNS: dict[str, dict[str, Any]] = {
    # The probes of an update are its last passes, without gradient: they leave the root gathered, and the second update
    # would go on with the weights from before the first.
    "updates": {"updates_per_rollout": 2},
    "shared backbone": {
        "objective": ObjectiveConfig(recipe="ppo", gae_lambda=0.9),
        "critic": CriticConfig(backbone="shared", warmup_rollouts=1, measure_every=1),
        "updates_per_rollout": 2,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_one_device_in_shards_takes_the_steps_of_one_without(name: str) -> None:
    module, found = fit(FSDP2Strategy(), **RUNS[name])
    plain, expected = fit("auto", **RUNS[name])
    assert module.sharded
    assert not plain.sharded
    for a, b in zip(found.metrics, expected.metrics, strict=True):
        assert a.keys() == b.keys()
        for key in b.keys() - {"optim/update_to_weight_ratio", "critic/update_to_weight_ratio"}:
            assert a[key] == pytest.approx(b[key], abs=1e-5, nan_ok=True), key
    torch.testing.assert_close(tiny.weights(module), tiny.weights(plain), atol=1e-5, rtol=0)
    assert expected.metrics[-1]["optim/grad_norm"] > 1e-3


def test_every_tensor_of_a_pass_is_found_by_fsdp2_of_any_version() -> None:
    values = torch.zeros(1, requires_grad=True)
    found = tree_leaves(TokenStats(torch.ones(1), None, values=values))
    assert any(leaf is values for leaf in found)


class Disturbed(tiny.Recorder):
    """Once, after a rollout: a pass without gradient, then weights that change, then whoever asks for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.gathered: list[str] = []
        self.synced: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.disturb(pl_module)
        trainer.save_checkpoint(self.folder / "disturbed.ckpt")
        self.disturb(pl_module)
        self.synced = {name: weight.clone() for name, weight in pl_module.named_weights()}
        self.disturb(pl_module)
        trainer.strategy.load_checkpoint(self.folder / "disturbed.ckpt", weights_only=True)
        self.loaded = {name: weight.clone() for name, weight in pl_module.named_weights()}

    def disturb(self, module: Any) -> None:
        """Add 1 to every weight, as an optimizer step would, while the root is gathered."""
        shards = [p for group in module.trainer.optimizers[0].param_groups for p in group["params"]]
        with torch.no_grad():
            module.policy(pad_rows([(1, 2)], [(3, 4)], width=2), entropy="none")
            self.gathered.append(type(module.policy.model.get_input_embeddings().weight).__name__)
            for shard in shards:
                shard.add_(1.0)


@pytest.mark.parametrize("strategy", [FSDP2Strategy, ModelParallelStrategy])
def test_weights_that_change_while_gathered_reach_checkpoints_engines_and_what_is_loaded(
    tmp_path: Path, strategy: Any
) -> None:
    disturbed = Disturbed(tmp_path)
    settings = {} if strategy is FSDP2Strategy else {"data_parallel_size": 1, "tensor_parallel_size": 1}
    before = tiny.module()
    before.configure_model()
    fit(strategy(**settings), batches=1, callbacks=[disturbed], optimizer=OptimizerConfig(lr=1e-9))
    assert disturbed.gathered == ["Parameter"] * 3, "the pass did not leave the root gathered: nothing is tried here"
    start = dict(before.named_weights())
    saved = read_sharded(tmp_path / "disturbed.ckpt", optimizers=False)["state_dict"]
    for name, weight in start.items():
        torch.testing.assert_close(saved[f"policy.model.{name}"], weight + 1, msg=f"saved: {name}")
        torch.testing.assert_close(disturbed.synced[name], weight + 2, msg=f"synced: {name}")
        torch.testing.assert_close(disturbed.loaded[name], weight + 1, msg=f"loaded: {name}")


def test_master_weights_move_in_float32_where_bfloat16_would_stand_still() -> None:
    """Steps of 1e-6 on weights above 0.01, where neighbouring bfloat16 numbers are 6e-5 apart or more."""
    settings: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-6, weight_decay=0.0), "updates_per_rollout": 2}
    started = tiny.module()
    started.configure_model()
    start = tiny.weights(started)
    large = start.abs() > 0.01
    module, recorder = fit(FSDP2Strategy(), sharding=ShardingConfig(param_dtype="bfloat16"), **settings)
    plain, _ = fit("auto", policy=PolicyConfig(tiny=tiny.TINY, dtype="bfloat16"), **settings)
    states = module.trainer.optimizers[0].state.values()
    assert {p.dtype for p in module.policy.parameters()} == {s["exp_avg"].dtype for s in states} == {torch.float32}
    assert dtype_of(module.policy) == torch.bfloat16
    masters: list[Any] = list(module.policy.model.parameters())
    held = torch.cat([p.detach().full_tensor().flatten() for p in masters])
    moved = (held - start).abs()[large]
    assert 0 < float(moved.max()) < 1e-5
    assert float((moved > 0).double().mean()) > 0.5
    assert torch.equal(tiny.weights(plain)[large], start.bfloat16()[large]), "in bfloat16 alone no weight moves"
    assert recorder.metrics[0]["optim/grad_norm"] > 0
    assert torch.equal(tiny.weights(module), held.bfloat16()), "engines sample with what the passes compute with"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_gathers_nothing_and_gives_an_engine_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, dtype: Literal["float32", "bfloat16"]
) -> None:
    module, _ = fit(FSDP2Strategy(), batches=1, sharding=ShardingConfig(param_dtype=dtype))
    with monkeypatch.context() as patch:
        for part in module.policy.modules():
            if hasattr(part, "unshard"):
                patch.setattr(type(part), "unshard", lambda self: pytest.fail("gathered"), raising=False)
        found = dict(module.named_weights())
    monkeypatch.setattr(sharding, "_is_whole", lambda weight: False)
    expected = dict(module.named_weights())
    assert list(found) == list(expected)
    own = {weight.to_local().untyped_storage().data_ptr() for weight in module.policy.parameters()}
    for name, weight in found.items():
        assert weight.dtype is getattr(torch, dtype)
        assert torch.equal(weight, expected[name])
        assert not weight.requires_grad
        assert weight.untyped_storage().data_ptr() not in own, "it may be kept, and written to"


def test_weights_for_an_engine_are_gathered_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on several ranks, where a shard is a part.
    monkeypatch.setattr(sharding, "_is_whole", lambda weight: False)
    module, _ = fit(FSDP2Strategy(), batches=1)
    units: dict[str, Any] = {n: part for n, part in module.policy.named_modules() if hasattr(part, "unshard")}
    assert len(units) == 1 + 2, "the whole and two blocks"

    def gathered() -> list[str]:
        return [n for n, part in units.items() if not hasattr(next(part.parameters()), "device_mesh")]

    seen = {}
    for name, weight in module.named_weights():
        assert not hasattr(weight, "device_mesh")
        (unit,) = gathered()
        assert f"model.{name}".startswith(unit)
        seen[name] = weight
    assert not gathered()
    names = [name for name, _ in module.policy.model.named_parameters()]
    assert list(seen) == names
    for _ in module.named_weights():
        break  # an engine that refuses the first one
    assert not gathered()


class BreaksOff(torch.autograd.Function):
    """Identity whose backward pass runs out of memory once."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_device_in_shards_goes_on_after_memory_ran_out_within_a_pass(monkeypatch: Any, where: str) -> None:
    """In the second of two blocks: one has its weights gathered, or its gradient, and the other has not."""
    settings: dict[str, Any] = {
        "optimizer": OptimizerConfig(type="torch.optim.SGD", lr=0.1),
        "micro_batch_size": None,
        "updates_per_rollout": 2,
        "step_kl_samples": 0,
    }
    plain, expected = fit("auto", **settings)
    block = type(next(m for m in plain.policy.modules() if type(m).__name__.endswith("DecoderLayer")))
    forward, calls = block.forward, 0

    def faulty(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if torch.is_grad_enabled():
            calls += 1
            if calls == 4 and where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            if calls == 4 and where == "backward":
                hidden = BreaksOff.apply(hidden)
        return forward(self, hidden, *args, **kwargs)

    monkeypatch.setattr(block, "forward", faulty)
    module, found = fit(FSDP2Strategy(), **settings)
    assert calls > 4
    assert module.counters.repeated_steps == 1
    assert torch.allclose(tiny.weights(module), tiny.weights(plain), atol=1e-6, rtol=0)
    for now, then in zip(found.metrics, expected.metrics, strict=True):
        assert now["optim/grad_norm"] == pytest.approx(then["optim/grad_norm"], rel=1e-5)
        assert now["loss"] == pytest.approx(then["loss"], abs=1e-6)


def test_shards_to_be_saved_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saves copies them, once; copying them before takes as long again, while the training waits."""
    kept: dict[str, Any] = {}

    def offload(*_: Any, **__: Any) -> None:
        raise AssertionError("copied to main memory, which is where a CPU's are")

    monkeypatch.setattr("torch.distributed.checkpoint.state_dict._offload_state_dict_to_cpu", offload)

    class Saved(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            strategy = trainer.strategy
            kept["model"] = strategy.lightning_module_state_dict()
            kept["optimizer"] = strategy.optimizer_state(trainer.optimizers[0])["state"]
            kept["own"] = {name: _local(weight) for name, weight in pl_module.state_dict(keep_vars=True).items()}
            kept["moments"] = {_local(v).data_ptr() for s in trainer.optimizers[0].state.values() for v in s.values()}
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    fit(FSDP2Strategy(), callbacks=[Saved()])
    own = kept["own"]
    assert {name: _local(weight).data_ptr() for name, weight in kept["model"].items()} == {
        name: weight.data_ptr() for name, weight in own.items()
    }
    saved = [_local(value).data_ptr() for state in kept["optimizer"].values() for value in state.values()]
    assert saved
    assert set(saved) <= kept["moments"]
    written = read_sharded(tmp_path / "saved.ckpt", optimizers=False)["state_dict"]
    assert written.keys() == own.keys()
    for name, weight in own.items():
        assert torch.equal(written[name], weight), name


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
