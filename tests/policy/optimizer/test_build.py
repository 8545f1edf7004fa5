"""Optimizers and schedulers by import path; what does not fit is refused before a model is made."""

from __future__ import annotations

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.policy import OptimizerConfig
from lit_grpo.policy.optimizer.build import check_optimizer, make_optimizer
from tests import tiny


def made(**settings):
    model = torch.nn.Linear(3, 2)
    return make_optimizer(model, OptimizerConfig(**settings), 10)


def test_adamw_is_the_default_and_vectors_do_not_decay():
    optimizer, _ = made(lr=0.1, betas=(0.8, 0.7), weight_decay=0.5)
    assert type(optimizer) is torch.optim.AdamW
    assert [(g["weight_decay"], g["betas"], g["lr"]) for g in optimizer.param_groups] == [
        (0.5, (0.8, 0.7), 0.1),
        (0.0, (0.8, 0.7), 0.1),
    ]


def test_adam_is_fused_unless_told_otherwise():
    for kind in ("AdamW", "Adam"):
        assert made(type=f"torch.optim.{kind}")[0].defaults["fused"] is True
        assert not made(type=f"torch.optim.{kind}", args={"foreach": True})[0].defaults["fused"]


def test_another_optimizer_gets_what_it_knows():
    optimizer, _ = made(type="torch.optim.SGD", lr=0.1, args={"momentum": 0.9})
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_another_scheduler_is_stepped():
    optimizer, scheduler = made(
        lr=0.1, scheduler="torch.optim.lr_scheduler.StepLR", scheduler_args={"step_size": 1, "gamma": 0.5}
    )
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "AdamW"}, "no import path"),
        ({"type": "torch.optim.AdmW"}, "did you mean torch.optim.AdamW"),
        ({"type": "torch.nn.Linear"}, "no torch.optim.Optimizer"),
        ({"type": "nowhere.Adam"}, "cannot be imported"),
        ({"type": "torch.optim.SGD", "betas": (0.1, 0.2)}, "has no betas"),
        ({"args": {"eps": 1e-3}}, "key of its own"),
        ({"scheduler_args": {"gamma": 1}}, "none is named"),
        ({"scheduler": "torch.optim.lr_scheduler.StepLR", "warmup_steps": 3}, "leave one out"),
        ({"scheduler": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "without a figure"),
        ({"lr": 0.0}, "in \\(0, 1000]"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "both warmup_steps"),
        ({"scheduler": "torch.optim.lr_scheduler.StepLR", "warmup_ratio": 0.1}, "leave one out"),
        ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0"),
        ({"warmup_ratio": -0.1}, "warmup_ratio is -0.1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        check_optimizer(OptimizerConfig(**settings))
    with pytest.raises(UserError, match=message):
        tiny.module(optimizer=OptimizerConfig(**settings))


def rates(steps: int, total: int, **settings) -> list[float]:
    optimizer, scheduler = make_optimizer(torch.nn.Linear(3, 2), OptimizerConfig(lr=1.0, **settings), total)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_warm_up_as_a_share_of_the_run():
    """GTPO's listing: 0.005 of the 7473 questions of GSM8K, one a step, is 38 steps (37.4, rounded up)."""
    found = rates(40, 7473, warmup_ratio=0.005)
    assert found[:38] == pytest.approx([(k + 1) / 39 for k in range(38)])
    assert found[38:] == [1.0, 1.0]
    assert rates(40, 7473, warmup_steps=38) == found
    assert rates(10, 100, warmup_ratio=0.07) == rates(10, 100, warmup_steps=7), "0.07 x 100 is 7, not 8"
    assert rates(10, 10**6, total_steps=10, warmup_ratio=0.2, schedule="linear") == pytest.approx(
        [1 / 3, 2 / 3, *(1 - k / 8 for k in range(8))]
    ), "of total_steps where that is set"


def test_a_share_of_a_run_of_unknown_length_is_refused():
    with pytest.raises(UserError, match="warmup_ratio needs the length of the run"):
        make_optimizer(torch.nn.Linear(3, 2), OptimizerConfig(warmup_ratio=0.1), 0)


def test_unknown_arguments_are_named():
    with pytest.raises(UserError, match=r"refuses its arguments.*speed"):
        made(args={"speed": 1})


def test_missing_bitsandbytes_says_how_to_get_it(monkeypatch):
    import sys

    for name in ("bitsandbytes", "bitsandbytes.optim"):  # an earlier test may have imported both
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"lit-grpo\[quantized\]"):
        check_optimizer(OptimizerConfig(type="bitsandbytes.optim.AdamW8bit"))


def test_eight_bit_states():
    pytest.importorskip("bitsandbytes", reason="extra `quantized` is not installed")
    model = torch.nn.Linear(128, 64)
    optimizer, scheduler = make_optimizer(model, OptimizerConfig(type="bitsandbytes.optim.AdamW8bit", lr=1e-2), 10)
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(1, 128)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    state = optimizer.state[model.weight]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    assert not torch.equal(model.weight, before)
