"""Engines on cards of their own: their processes see the card that the run names for their rank. Without cards."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineContext
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm_processes.choose import VLLM
from lit_grpo.engines.vllm_processes.early import EarlyProcesses
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.engines.vllm_processes.process import EngineProcess
from lit_grpo.engines.vllm_processes.settings import environment
from lit_grpo.engines.vllm_server.process_log import ProcessLog
from lit_grpo.errors import UserError
from lit_grpo.policy import PolicyConfig


@pytest.fixture(autouse=True)
def eight_cards_and_ranks_on_the_first_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 2 of four sees them; nothing is started."""
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda out, own: out.__setitem__(slice(None), [own] * 4)
    )
    monkeypatch.setattr(EngineGroup, "prepare_ahead", lambda self: None)


def gathered(out: list[str], own: str) -> None:
    out[:] = [own] * 4


def context() -> EngineContext:
    policy: Any = SimpleNamespace(model=torch.nn.Linear(4, 4))
    policy.model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="tiny"))
    return EngineContext(policy, PolicyConfig(), None, (1,), 64, 0)


@pytest.mark.parametrize(("settings", "seen"), [
    ({"cards": [4, 5, 6, 7], "processes": 2}, ["6,2"] * 2),
    ({"cards": [4, 5, 6, 7]}, ["6,2"]),
    ({"cards": [3, 0, 2, 1]}, ["2"]),
    ({"processes": 3}, ["2"] * 3),
])  # fmt: skip
def test_the_processes_of_a_rank_see_its_engines_card_and_its_own(settings: dict[str, Any], seen: list[str]) -> None:
    begun = VLLM.begin(context(), **settings)
    assert isinstance(begun, EarlyProcesses)
    try:
        found = [process.environment["CUDA_VISIBLE_DEVICES"] for process in begun._group._processes]
        assert found == seen
    finally:
        begun.close()


def test_an_engine_in_this_process_has_no_card_of_its_own() -> None:
    assert VLLM.begin(context()) is None


def test_as_many_cards_as_ranks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="4 ranks train on this machine, and 2 cards"):
        EarlyProcesses(context(), VLLMEngineConfig(cards=[4, 5]), 1)


def test_the_share_of_a_card_that_the_learner_is_held_to_is_not_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    with contextlib.closing(ProcessLog()) as log:
        process = EngineProcess(environment(1), tmp_path, log)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in process.environment
    assert process.environment["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/mps"
