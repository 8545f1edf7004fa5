"""Weights in files: whole, or with adapters apart from what they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm_processes.weight_files import WeightFiles

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
