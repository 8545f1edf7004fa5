"""Folders of owners that are gone are removed, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lit_grpo.engines.vllm_server import scratch
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder, remove_scratch_folder
from lit_grpo.engines.vllm_server.supervisor import LOG_NOTE
from tests.paths import ROOT

OWNER = """
import sys
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder
print(make_scratch_folder(sys.argv[1], 0), flush=True)
sys.stdin.readline()
"""


def made_by_another(where: Path) -> tuple[Path, subprocess.Popen[str]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(where)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip()), owner


def abandoned(where: Path) -> Path:
    folder, owner = made_by_another(where)
    owner.kill()
    owner.communicate()
    (folder / "weights").mkdir()
    (folder / "weights" / "00000.safetensors").write_bytes(b"0" * 1000)
    return folder


def test_the_next_folder_takes_the_place_of_abandoned_ones(tmp_path: Path) -> None:
    log = tmp_path / "engines.log"
    log.touch()
    left = abandoned(tmp_path / "new")
    (left / LOG_NOTE).write_text(str(log))
    folder = make_scratch_folder(str(tmp_path / "new"), 0)
    assert list((tmp_path / "new").iterdir()) == [folder]
    assert not log.exists()
    remove_scratch_folder(folder)
    remove_scratch_folder(folder)
    assert not folder.exists()


def test_a_folder_in_use_stays_and_so_do_those_of_nobody_known(tmp_path: Path) -> None:
    theirs, owner = made_by_another(tmp_path)
    own, other = make_scratch_folder(str(tmp_path), 0), make_scratch_folder(str(tmp_path), 0)
    without_lock = tmp_path / "lit-grpo-older"
    without_lock.mkdir()
    elsewhere = abandoned(tmp_path)
    (elsewhere / "owner.lock").write_text("another-host")
    last = make_scratch_folder(str(tmp_path), 0)
    assert set(tmp_path.iterdir()) == {theirs, own, other, without_lock, elsewhere, last}
    owner.communicate("\n")
    # The lock of this process is still held after it has looked at all of them.
    made_by_another(tmp_path)[1].communicate("\n")
    assert own.is_dir()
    assert other.is_dir()
    for folder in (own, other, last):
        remove_scratch_folder(folder)


def test_a_folder_without_locks_is_made_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(scratch.fcntl, "lockf", refuse)
    first = make_scratch_folder(str(tmp_path), 0)
    assert not list(first.iterdir())
    second = make_scratch_folder(str(tmp_path), 0)
    assert first.is_dir()
    remove_scratch_folder(first)
    remove_scratch_folder(second)
    assert not list(tmp_path.iterdir())


def test_shared_memory_and_the_folder_for_temporary_files_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "shared")
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    left = [abandoned(tmp_path / "shared"), abandoned(tmp_path / "temporary")]
    folder = make_scratch_folder(None, 0)
    assert folder.parent == tmp_path / "shared"
    assert not any(one.exists() for one in left)
    remove_scratch_folder(folder)


def test_a_forked_process_removes_no_folder_of_its_parent(tmp_path: Path) -> None:
    folder = make_scratch_folder(str(tmp_path), 0)
    child = os.fork()
    if child == 0:
        remove_scratch_folder(folder)
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.is_dir()
    shutil.rmtree(folder)
    remove_scratch_folder(folder)
