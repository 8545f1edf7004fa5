"""Weights in files: whole, or with adapters apart from what they belong to; and what is said where none come to be."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm_processes import engine as module
from lit_grpo.engines.vllm_processes import reserve
from lit_grpo.engines.vllm_processes.engine import VLLMProcesses
from lit_grpo.engines.vllm_processes.weight_files import WeightFiles
from tests.engines.vllm_processes.test_group import StandIn

BASE = {"layer.weight": torch.ones(2, 2)}
ADAPTERS = {"layer.lora_A.weight": torch.zeros(1, 2), "layer.lora_B.weight": torch.zeros(2, 1)}


def names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def test_merged_weights_are_in_one_folder(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, adapted=False)
    assert files.write(BASE.items(), adapters_alone=False) == files.folders
    assert [names(folder) for folder in files.folders] == [set(BASE)]


def test_adapters_that_come_alone_leave_the_others_where_they_are(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, adapted=True)
    assert files.write((BASE | ADAPTERS).items(), adapters_alone=False) == files.folders
    base, adapters = files.folders
    assert (names(base), names(adapters)) == (set(BASE), set(ADAPTERS))
    one = dict([next(iter(ADAPTERS.items()))])
    assert files.write(one.items(), adapters_alone=True) == [adapters]
    # A process that is started again reads both.
    assert (names(base), names(adapters)) == (set(BASE), set(one))


def test_what_comes_beside_adapters_that_come_alone_is_refused(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, adapted=True)
    with pytest.raises(EngineError, match=r"layer\.weight came beside the adapters"):
        files.write((ADAPTERS | BASE).items(), adapters_alone=True)


# -------------------------------------------------------------------------------------------------- what failed where


class Writing(StandIn):
    """A process that takes all files."""

    def send(self, message: tuple[Any, ...]) -> None:
        super().send(message)
        if message[0] == "sync":
            self.answers.append(("synced",))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMProcesses]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(reserve, "EngineProcess", Writing)
    monkeypatch.setattr(StandIn, "seen", [], raising=False)
    monkeypatch.setattr(StandIn, "measures", None, raising=False)
    monkeypatch.setattr(module, "check_in_process", lambda: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(module, "make_scratch_folder", lambda chosen, weight_bytes: tmp_path / "scratch")
    engine = VLLMProcesses(tmp_path / "model", processes=2, end_token_ids=(1,))
    yield engine
    engine.close()


def test_a_stream_that_breaks_off_is_the_learners(engine: VLLMProcesses) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(2)
        raise OSError("the shard is gone")

    with pytest.raises(EngineError, match=r"^the learner could not give the weights of version 3: the shard"):
        engine.sync(stream(), 3)
    engine.sync([("a", torch.ones(2))], 4)


def test_a_file_that_cannot_be_written_is_told_with_its_folder(engine: VLLMProcesses, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "scratch")
    with pytest.raises(EngineError, match=f"^the weights of version 3 cannot be written to {tmp_path / 'scratch'}: "):
        engine.sync([("a", torch.ones(2))], 3)
