"""New weights are the same wherever they are made, and nobody's random numbers change by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lit_grpo.policy import LoraConfig, PolicyConfig
from lit_grpo.policy.model.load import load_model
from lit_grpo.utils.random import drawn_from
from tests import tiny

NEW = [
    lambda: load_model(PolicyConfig(tiny=tiny.TINY)),
    lambda: load_model(PolicyConfig(tiny=tiny.TINY, lora=LoraConfig(rank=2))),
]


def test_numbers_are_those_of_the_seed_and_the_runs_go_on() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    with drawn_from(3):
        one = torch.rand(5)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(11)
    with drawn_from(3):
        assert torch.equal(torch.rand(5), one)


@pytest.mark.parametrize("make", NEW, ids=["tiny", "adapters"])
def test_generators_of_cards_are_left_alone(
    make: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    make()
    assert seeded == []


@pytest.mark.parametrize("make", NEW, ids=["tiny", "adapters"])
def test_a_skeleton_stays_one(make: Callable[[], torch.nn.Module]) -> None:
    with torch.device("meta"):
        assert all(weight.is_meta for weight in make().parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("make", NEW, ids=["tiny", "adapters"])
def test_weights_are_the_same_on_a_card(make: Callable[[], torch.nn.Module]) -> None:
    expected = dict(make().named_parameters())
    with torch.device("cuda"):
        found = dict(make().named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.is_cuda, name
        assert torch.equal(weight.cpu(), expected[name]), name
