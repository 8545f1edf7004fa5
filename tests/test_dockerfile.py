"""The Dockerfile, read line by line: no container is built here, but what it names must be there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the file in order: name and text, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_every_instruction_is_one_that_docker_knows():
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known
    assert instructions()[0][0] == "FROM"


def test_the_image_has_a_python_that_the_project_takes():
    found = re.fullmatch(r"python:(\d+)\.(\d+)-slim", of("FROM")[0])
    assert found
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert least
    assert tuple(map(int, found.groups())) >= tuple(map(int, least.groups()))


def test_everything_that_is_copied_exists_and_is_in_the_clone():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for text in of("COPY"):
        *sources, _ = shlex.split(text)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source == "." or not tracked or source in tracked, source


def test_its_requirements_are_those_of_the_project_at_the_known_versions(tmp_path: Path):
    (script,) = re.findall(r'python -c "(.*?)" > /tmp/requirements.txt', " ".join(of("RUN")))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    written = set(done.stdout.split("\n")) - {""}
    extras = PROJECT["optional-dependencies"]
    assert written == {*PROJECT["dependencies"], *extras["vllm"], *extras["lora"], *extras["hub"]}
    assert "-c constraints.txt" in " ".join(of("RUN"))


def test_the_known_versions_are_within_the_bounds_of_the_project():
    requirements = pytest.importorskip("packaging.requirements")
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    extras = PROJECT["optional-dependencies"].values()
    wanted = [
        requirements.Requirement(text) for text in [*PROJECT["dependencies"], *(one for e in extras for one in e)]
    ]
    pinned = [one for one in wanted if one.name in pins]
    assert {"torch", "transformers", "mlflow", "vllm", "lightning", "optuna"} <= {one.name for one in pinned}
    for one in pinned:
        assert one.specifier.contains(pins[one.name]), f"{one} and {pins[one.name]}"


def test_vllm_transformers_and_mlflow_are_bounded_by_what_was_tried():
    page = (ROOT / "docs" / "installing.md").read_text()
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["vllm"], *extras["sweep"]]:
        name, _, bounds = re.split(r"([>=<!])", text, maxsplit=1)[0], "", text
        if name not in ("transformers", "mlflow", "vllm", "optuna"):
            continue
        assert "<" in bounds, f"{text} has no upper bound"
        assert f"| {name} |" in page


def test_the_command_of_the_image_is_the_program_of_the_project():
    assert of("ENTRYPOINT") == ['["lit-grpo"]']
    assert "lit-grpo" in PROJECT["scripts"]
    installs = [text for text in of("RUN") if "--no-deps ." in text]
    assert len(installs) == 1
