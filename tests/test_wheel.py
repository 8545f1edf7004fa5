"""What is built from the clone holds everything that runs, and runs where the clone is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT


def tracked() -> set[str]:
    """Return the files of the package as they are named when it is installed."""
    listed = subprocess.run(
        ["git", "ls-files", "lit_grpo", "callbacks"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return {f"lit_grpo/{name}" if name.startswith("callbacks/") else name for name in listed if name.count("/")} - {
        "lit_grpo/callbacks"
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows, so that nothing is built into the clone."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    folder = tmp_path_factory.mktemp("source")
    # The working tree and not HEAD: what is about to be committed is what counts.
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel built from the clone, and one built from a source distribution."""
    out = tmp_path_factory.mktemp("wheels")
    build = "from setuptools import build_meta; print(build_meta.build_sdist(r'{}'))"
    done = subprocess.run(
        [sys.executable, "-c", build.format(out)], cwd=source, capture_output=True, text=True, check=True
    )
    archive = out / done.stdout.splitlines()[-1]
    found = {}
    for name, origin in (("clone", source), ("sdist", archive)):
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
        subprocess.run([*command, "-w", str(out / name), str(origin)], check=True, capture_output=True)
        (found[name],) = (out / name).glob("*.whl")
    return found


@pytest.mark.parametrize("origin", ["clone", "sdist"])
def test_a_wheel_holds_every_file_of_the_package_and_no_other(wheels: dict[str, Path], origin: str):
    names = {name for name in zipfile.ZipFile(wheels[origin]).namelist() if ".dist-info/" not in name}
    assert names == tracked()


def test_an_installed_wheel_begins_a_project_and_trains_where_the_clone_is_not(wheels: dict[str, Path], tmp_path: Path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheels["sdist"])], check=True, capture_output=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment = clean | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*words: str, cwd: Path) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert str(site) in run("-c", "import lit_grpo; print(lit_grpo.__file__)", cwd=tmp_path)
    assert "0.1.0" in run("-m", "lit_grpo", "--version", cwd=tmp_path)
    run("-m", "lit_grpo", "init", "mine", cwd=tmp_path)
    run("-m", "lit_grpo", "fit", "--config", "config.yaml", "--data.rollouts", "2", cwd=tmp_path / "mine")
    (folder,) = [path for path in (tmp_path / "mine/runs").iterdir() if (path / "config.yaml").exists()]
    assert (folder / "checkpoints").is_dir()
    run("-m", "lit_grpo", "report", str(folder), cwd=tmp_path / "mine")
    assert (folder / "report.html").exists()
