"""The exchange of gradients over ranks, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lit_grpo.distributed import gradients
from lit_grpo.distributed.gradients import GradientExchange


def test_other_strategies_exchange_nothing():
    exchange = GradientExchange.of(SingleDeviceStrategy(device=torch.device("cpu")), 1)
    weight = torch.nn.Parameter(torch.ones(2))
    exchange.average([weight])
    assert weight.grad is None
    with exchange.no_sync():
        weight.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("bucket", [1, 3, 1000])
def test_every_gradient_is_averaged_whatever_the_bucket(monkeypatch: Any, bucket: int) -> None:
    sent: list[torch.dtype] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        sent.append(tensor.dtype)
        tensor *= 3  # two ranks: this one, and one with twice its gradients

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", bucket)
    formats = (torch.float32, torch.float32, torch.float64, torch.float32)
    weights = [torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in formats]
    for value, weight in enumerate(weights[:3], 1):
        weight.grad = torch.full_like(weight, float(value))
    GradientExchange.of(DDPStrategy(), 2).average(weights)
    assert [float(weight.grad[0, 0]) for weight in weights if weight.grad is not None] == [1.5, 3.0, 4.5, 0.0]
    assert set(sent) == {torch.float32, torch.float64}
