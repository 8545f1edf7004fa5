"""Whose code a file is."""

import logging
import os
import subprocess
import sys
import sysconfig

import pytest

from lit_grpo.utils.own_code import is_of_this_package, is_ours, is_the_persons
from tests.paths import ROOT

SITE = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        (f"{ROOT}/lit_grpo/module.py", True),
        (f"{ROOT}/lit_grpo/callbacks/rollback.py", True),
        (f"{ROOT}/callbacks/rollback.py", True),
        ("/home/someone/project/reward.py", True),
        (f"{SITE}/vllm/engine.py", False),
        (os.path.realpath(f"{SITE}/vllm/engine.py"), False),
        (logging.__file__, False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_whose_a_file_is(path, ours):
    assert is_ours(path) is ours
    packages = path.startswith((f"{ROOT}/lit_grpo/", f"{ROOT}/callbacks/"))
    assert is_of_this_package(path) is packages
    assert is_the_persons(path) is (ours and not packages)


def test_packages_in_a_folder_of_their_own_are_installed_too(tmp_path):
    for name in ("target/torch-2.13.0.dist-info", "target/torch", "project"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "project/pyproject.toml").touch()
    code = "import sys; from lit_grpo.utils.own_code import is_ours; print(*map(is_ours, sys.argv[1:]))"
    files = [tmp_path / "target/torch/lowering.py", tmp_path / "project/reward.py", tmp_path / "targets/mine.py"]
    path = os.pathsep.join(map(str, (ROOT, tmp_path / "target", tmp_path / "project", tmp_path / "gone")))
    done = subprocess.run([sys.executable, "-c", code, *map(str, files)], capture_output=True, text=True, check=True,
                          env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert done.stdout.split() == ["False", "True", "True"]
