"""Products by oneDNN equal torch's own, forwards and backwards, and only layers that are fit for it take it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lit_grpo.policy.forward import head, onednn
from lit_grpo.policy.forward.head import head_stats
from lit_grpo.policy.forward.onednn import OneDNNLinear, is_linear, linear, takes_onednn, use_onednn
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take oneDNN on every machine: it computes the same everywhere."""
    monkeypatch.setattr(onednn, "is_faster", lambda: True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(520,), (1, 520), (37, 520), (3, 5, 520)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "weight", "input"])
def test_product_and_gradients_are_those_of_torch(shape: Any, with_bias: bool, frozen: str) -> None:
    def run(product: Any, dtype: torch.dtype) -> list[torch.Tensor | None]:
        x = draw(*shape).to(dtype).requires_grad_(frozen != "input")
        weight = draw(530, 520, seed=1).to(dtype).requires_grad_(frozen != "weight")
        bias = draw(530, seed=2).to(dtype).requires_grad_() if with_bias else None
        out = product(x, weight, bias)
        (out * draw(*out.shape, seed=3).to(dtype)).sum().backward()
        return [out.detach(), x.grad, weight.grad, None if bias is None else bias.grad]

    found, exact = run(linear, torch.float32), run(functional.linear, torch.float64)
    for one, other in zip(found, exact, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def test_views_of_every_kind_are_read_as_they_are() -> None:
    x, weight = draw(5, 7, 520).transpose(0, 1), draw(520, 530, seed=1).T
    torch.testing.assert_close(linear(x, weight), functional.linear(x, weight), rtol=1e-5, atol=1e-4)
    every_other = draw(40, 1040)[::2, ::2]
    torch.testing.assert_close(
        linear(every_other, weight), functional.linear(every_other, weight), rtol=1e-5, atol=1e-4
    )


def test_what_is_not_fit_for_it_goes_torchs_way() -> None:
    x, weight = draw(3, 520), draw(530, 520, seed=1)
    assert takes_onednn(x, weight)
    assert not takes_onednn(x, weight[:8])
    assert not takes_onednn(x.double(), weight.double())
    assert not takes_onednn(x.bfloat16(), weight.bfloat16())
    assert not takes_onednn(x[:0], weight)
    assert not takes_onednn(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_onednn(x, weight)
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(x[:0], weight).shape == (0, 530)


class Chosen(nn.Linear):
    """A layer that does more than a product."""


def test_only_mere_linear_layers_change_and_a_copy_has_weights_of_its_own() -> None:
    model: Any = nn.Sequential(nn.Linear(520, 530), nn.LayerNorm(530), Chosen(530, 520))
    names, x = list(model.state_dict()), draw(4, 520)
    before = model(x)
    use_onednn(model)
    assert [type(layer) for layer in model] == [OneDNNLinear, nn.LayerNorm, Chosen]
    assert [is_linear(layer) for layer in model] == [True, False, False]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), before)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    torch.testing.assert_close(model(x), before)


@pytest.mark.slow
def test_ever_new_numbers_of_rows_do_not_fill_the_memory() -> None:
    """The code for each number of rows is megabytes: without a bound 600 products grow a process by 0.8 GB."""
    program = """
import torch
from torch import nn
from lit_grpo.policy.forward import onednn
onednn.is_faster = lambda: True
layer = nn.Linear(576, 1536)
onednn.use_onednn(layer)

def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

with torch.no_grad():
    for rows in range(500, 600):
        layer(torch.zeros(rows, 576))
    before = memory()
    for rows in range(600, 900):
        layer(torch.zeros(rows, 576))
print(memory() - before)
"""
    clean = {k: v for k, v in os.environ.items() if k not in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")}
    grown = subprocess.run(
        [sys.executable, "-c", program], env=clean, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(grown.stdout) < 150


def test_nothing_changes_on_other_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    model = nn.Linear(520, 530)
    use_onednn(model)
    assert type(model) is nn.Linear
    assert not takes_onednn(draw(3, 520), model.weight)


def test_the_output_layer_in_chunks_gives_the_numbers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(faster: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(onednn, "is_faster", lambda: faster)
        monkeypatch.setattr(head, "takes_onednn", onednn.takes_onednn)
        layer = nn.Linear(520, 530, bias=False)
        layer.weight = nn.Parameter(draw(530, 520, seed=1) * 0.1)
        use_onednn(layer)
        hidden = draw(20, 520).requires_grad_()
        target = torch.arange(20)
        logprobs, entropy, _ = head_stats(
            layer, hidden, target, 0.7, entropy=True, entropy_gradient=True, squares=False, chunk=6
        )
        (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad is not None
        assert layer.weight.grad is not None
        return [logprobs.detach(), entropy.detach(), hidden.grad, layer.weight.grad]

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
