"""What is built from the clone holds everything that runs, and runs where the clone is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
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


def needed_by(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """Return what has to be installed for some requirements, by name: they, what they require, and so on."""
    parse = pytest.importorskip("packaging.requirements").Requirement
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [(parse(text), "") for text in requirements], set()
    while waiting:
        wanted, extra = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        for one in {"", *wanted.extras}:
            if (name, one) in seen:
                continue
            seen.add((name, one))
            found[name] = metadata.distribution(name)
            waiting += [(parse(text), one) for text in found[name].requires or ()]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds what pyproject.toml declares and nothing else: no extra, no pytest.

    As links, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for distribution in needed_by(declared).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            origin = Path(str(distribution.locate_file(top)))
            if origin.exists() and not (site / top).exists():
                (site / top).symlink_to(origin)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["clone", "sdist"])
def test_an_installed_wheel_begins_a_project_and_trains_in_a_bare_environment(
    wheels: dict[str, Path], bare: Path, tmp_path: Path, origin: str
):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheels[origin])], check=True, capture_output=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment = clean | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}

    def run(*words: str, cwd: Path) -> str:
        done = subprocess.run(
            [str(bare), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    extras = "['datasets', 'peft', 'wandb', 'tensorboard', 'optuna', 'vllm', 'pytest', 'torchao', 'psutil']"
    there = f"import importlib.util as u; print([n for n in {extras} if u.find_spec(n)])"
    assert run("-c", there, cwd=tmp_path).strip() in ("[]", "['psutil']")
    assert str(site) in run("-c", "import lit_grpo; print(lit_grpo.__file__)", cwd=tmp_path)
    assert "0.1.0" in run("-m", "lit_grpo", "--version", cwd=tmp_path)
    run("-m", "lit_grpo", "init", "mine", cwd=tmp_path)
    run("-m", "lit_grpo", "fit", "--config", "config.yaml", "--data.rollouts", "2", cwd=tmp_path / "mine")
    (folder,) = [path for path in (tmp_path / "mine/runs").iterdir() if (path / "config.yaml").exists()]
    assert (folder / "checkpoints").is_dir()
    run("-m", "lit_grpo", "report", str(folder), cwd=tmp_path / "mine")
    assert (folder / "report.html").exists()
    run("-m", "lit_grpo", "export", "--checkpoint", str(folder), "--output", "out", cwd=tmp_path / "mine")
    assert (tmp_path / "mine/out/README.md").exists()
