"""Optimizers with 8-bit states and stochastic rounding (torchao), compiled by nobody here: a minute for each run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.callbacks.diagnosis.remedies import scale_learning_rate
from lit_grpo.distributed import optimizer_state
from lit_grpo.errors import UserError
from lit_grpo.learner.rollout_metrics import update_size
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.policy.optimizer import quantized_state as lb
from lit_grpo.policy.optimizer.build import check_optimizer, initialize_optimizer_state, lost_share, make_optimizer
from tests import tiny
from tests.distributed.test_sharded_checkpoints import Back

pytest.importorskip("torchao", reason="extra `quantized` is not installed")
TINY = TinyModel(width=64, layers=1, heads=2)
SETTINGS = OptimizerConfig(type="torchao.optim.AdamW8bit", args={"bf16_stochastic_round": True}, lr=1e-3)


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def module(**changes: Any) -> Any:
    return tiny.module(**({"policy": PolicyConfig(tiny=TINY, dtype="bfloat16"), "optimizer": SETTINGS} | changes))


def fit(folder: Path, rollouts: int, path: Any = None, **changes: Any) -> tuple[Any, tiny.Recorder, RolloutCheckpoint]:
    made, recorder, saver = module(**changes), tiny.Recorder(), RolloutCheckpoint(dirpath=str(folder / "c"))
    trainer = tiny.trainer(callbacks=[recorder, saver], enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(made, datamodule=tiny.data(rollouts=rollouts), ckpt_path=path)
    return made, recorder, saver


def kinds(value: Any) -> set[type]:
    if isinstance(value, dict):
        return set().union(*(kinds(v) for v in value.values()), *(kinds(k) for k in value))
    if isinstance(value, (list, tuple)):
        return {type(value)}.union(*map(kinds, value))
    return {type(value)}


@pytest.mark.slow
def test_a_cut_run_goes_on_to_the_same_bits_from_plain_tensors(tmp_path: Path) -> None:
    whole, recorder, _ = fit(tmp_path / "a", 4)
    (optimizer,) = whole.trainer.optimizers
    states = [s for s in optimizer.state.values() if optimizer_state.is_quantized(s["exp_avg"])]
    assert len(states) >= 7, "every matrix of the block"
    assert all(s["exp_avg_sq"].codes.dtype == torch.uint8 for s in states)
    assert all(0 < metrics["optim/update_to_weight_ratio"] < 0.1 for metrics in recorder.metrics)
    assert all(metrics["optim/lr"] == pytest.approx(1e-3) for metrics in recorder.metrics)

    _, _, saver = fit(tmp_path / "b", 2)
    assert saver.last_path is not None
    content = torch.load(saver.last_path, weights_only=True)
    assert kinds(content["optimizer_states"]) <= {torch.Tensor, torch.dtype, list, tuple, str, int, float, bool}
    torch.rand(3)
    again, _, _ = fit(tmp_path / "b", 4, saver.last_path)
    assert torch.equal(tiny.weights(again), tiny.weights(whole))
    other = again.trainer.optimizers[0]
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert type(a["exp_avg"]) is type(b["exp_avg"])
        assert torch.equal(optimizer_state.full_tensor(a["exp_avg"]), optimizer_state.full_tensor(b["exp_avg"]))


def test_a_rollback_takes_the_same_step_again(tmp_path: Path) -> None:
    back = Back(str(tmp_path))
    tiny.trainer(callbacks=[back], default_root_dir=tmp_path).fit(module(), datamodule=tiny.data(rollouts=4))
    assert len(back.metrics) == 5
    assert back.metrics[2] == back.metrics[3]


def test_plain_and_back_is_the_same() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        optimizer, _ = make_optimizer(torch.nn.ParameterList([weight]), changed(type=f"torchao.optim.{kind}"), 1)
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        optimizer.step()
        before = optimizer.state_dict()
        found = optimizer_state.to_quantized(optimizer_state.to_plain(before))["state"][0]["exp_avg"]
        assert type(found) is type(before["state"][0]["exp_avg"])
        assert torch.equal(found.dequantize(), before["state"][0]["exp_avg"].dequantize())


def changed(**changes: Any) -> OptimizerConfig:
    return replace(SETTINGS, **changes)


def one_step(settings: OptimizerConfig, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in bfloat16 before and after a step against the gradient 1."""
    weight = torch.nn.Parameter(0.05 + torch.rand(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16())
    before = weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer, _ = make_optimizer(torch.nn.ParameterList([weight]), settings, 1)
    weight.grad = torch.ones_like(weight)
    with lb.rounding_seed(optimizer, seed):
        optimizer.step()
    return before, weight.detach()


def test_a_small_step_is_lost_by_rounding_and_kept_on_average_by_chance() -> None:
    before, after = one_step(OptimizerConfig(lr=1e-6))
    assert torch.equal(before, after)
    before, after = one_step(changed(lr=1e-6))
    moved = (before.double() - after.double()).mean()
    # One element moves by up to 2**-8 with a chance of 1e-6 / 2**-8 or more: 262,144 of them, of about 110 that move.
    assert float(moved) == pytest.approx(1e-6, rel=0.5)


def test_rounding_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    _, first = one_step(SETTINGS)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the run's random numbers"
    torch.manual_seed(2)
    _, second = one_step(SETTINGS)
    assert torch.equal(first, second)
    assert not torch.equal(first, one_step(SETTINGS, seed=1)[1])


def test_begin_optimizer_makes_quantized_states_and_no_step() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    before = weight.detach().clone()
    optimizer, _ = make_optimizer(torch.nn.ParameterList([weight]), SETTINGS, 1)
    state = torch.get_rng_state()
    initialize_optimizer_state(optimizer)
    assert torch.equal(weight, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(optimizer.state[weight]["step"]) == 0
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, before)


def test_moments_that_are_not_quantized_can_be_loaded() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer, _ = make_optimizer(torch.nn.ParameterList([weight]), SETTINGS, 1)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    state = optimizer.state_dict()
    own = {name: optimizer_state.full_tensor(value) for name, value in state["state"][0].items()}
    optimizer.load_state_dict({"state": {0: own}, "param_groups": state["param_groups"]})
    found = optimizer.state[weight]["exp_avg"]
    assert optimizer_state.is_quantized(found)
    torch.testing.assert_close(optimizer_state.full_tensor(found), own["exp_avg"], rtol=0.02, atol=1e-6)


def test_update_size_is_that_of_adamw() -> None:
    sizes = []
    for settings in (OptimizerConfig(lr=1e-3), SETTINGS):
        weight = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
        optimizer, _ = make_optimizer(torch.nn.ParameterList([weight]), settings, 1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            weight.grad = torch.randn(64, 64, generator=generator)
            optimizer.step()
        sizes.append(update_size(optimizer))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_a_remedy_can_lower_the_learning_rate(tmp_path: Path) -> None:
    made, _, _ = fit(tmp_path, 1)
    scale_learning_rate(made.trainer, 0.5)
    (optimizer,) = made.trainer.optimizers
    made.trainer.lr_scheduler_configs[0].scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(5e-4)


def warned(**changes: Any) -> str:
    made = module(**changes)
    made.configure_model()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made.configure_optimizers()
    return "\n".join(str(w.message) for w in seen if "bfloat16" in str(w.message))


def test_lost_updates_are_warned_of_where_they_are_lost() -> None:
    text = warned(optimizer=OptimizerConfig())
    assert re.search(r"learning rate 1e-06 leaves (9\d|100)% of the weights", text)
    assert "strategy: fsdp" in text
    assert "bf16_stochastic_round: true" in text
    assert "torchao" in warned(optimizer=changed(args={}, lr=1e-6))
    assert not warned(optimizer=OptimizerConfig(lr=0.1))
    assert not warned(optimizer=changed(lr=1e-6))
    assert not warned(optimizer=OptimizerConfig(), policy=PolicyConfig(tiny=TINY))


def test_lost_share_is_counted() -> None:
    weights = [torch.tensor([1.0, 0.001, 1.0, 0.001]).bfloat16(), torch.zeros(4).bfloat16()]
    assert lost_share(weights, 1e-5) == pytest.approx(0.25)
    assert lost_share([torch.ones(4)], 1e-5) == 0
    assert lost_share([*weights, torch.zeros(0, 8).bfloat16()], 1e-5) == pytest.approx(0.25), "an empty shard"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no C\+\+ compiler \(no-such-compiler\)(.|\n)*apt-get"):
        check_optimizer(SETTINGS)
    check_optimizer(OptimizerConfig())
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.optim")
    with pytest.raises(UserError, match=r"lit-grpo\[quantized\]"):
        check_optimizer(SETTINGS)


@pytest.mark.slow
def test_the_step_is_taken_without_a_compiler_where_the_environment_says_so() -> None:
    """In a process of its own: torch reads the variable when it is imported."""
    program = (
        "import torch\n"
        "from lit_grpo.policy import OptimizerConfig\n"
        "from lit_grpo.policy.optimizer.build import make_optimizer\n"
        "model = torch.nn.Linear(64, 64, bias=False).bfloat16()\n"
        "before = model.weight.detach().clone()\n"
        "settings = OptimizerConfig(type='torchao.optim.AdamW8bit', args={'bf16_stochastic_round': True}, lr=1e-2)\n"
        "optimizer, scheduler = make_optimizer(model, settings, 1)\n"
        "model(torch.ones(1, 64).bfloat16()).sum().backward()\n"
        "optimizer.step()\n"
        "scheduler.step()\n"
        "assert (model.weight != before).any()\n"
    )
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
