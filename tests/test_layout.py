"""Dependencies point down, heavy imports stay away, files stay short, packages are all listed."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_grpo"

ALLOWED = {
    # room: what it may import of lit_grpo, besides itself, types and errors
    "objectives": set(),
    "engines": {"quiet", "rng"},
    "rewards": set(),
    "tasks": set(),
    "policy": {"tasks"},
    "tracking": {"callbacks", "objectives"},
    "callbacks": {"tracking", "rng"},
    "evaluation": {"objectives", "rewards", "rng", "tasks", "tracking"},
    "report": {"tracking", "callbacks", "cli"},
    "filter": {"cli", "data", "difficulty", "engines", "module", "producer", "refill", "rng"},
    "check": {"cli", "experience", "objectives", "policy", "quiet", "rewards", "tasks"},
}
NOT_AT_IMPORT = {
    "objectives": {"lightning", "transformers", "vllm", "mlflow"},
    "policy": {"lightning", "transformers", "vllm", "mlflow"},
    "engines": {"lightning", "transformers", "vllm", "mlflow"},
    "rewards": {"torchmetrics", "lightning", "transformers", "vllm", "mlflow", "math_verify", "sympy"},
    "tasks": {"lightning", "transformers", "vllm", "mlflow", "datasets", "pyarrow"},
    "tracking": {"transformers", "vllm", "mlflow", "matplotlib"},
    "callbacks": {"transformers", "vllm", "mlflow"},
    "evaluation": {"transformers", "vllm", "mlflow"},
    "report": {"transformers", "vllm", "mlflow", "matplotlib", "PIL", "jinja2", "torch"},
    "check": {"transformers", "vllm", "mlflow"},
    "filter": {"transformers", "vllm", "mlflow"},
}


def files(room: str) -> list[Path]:
    folder = ROOT / "callbacks" if room == "callbacks" else PACKAGE / room
    return sorted(folder.rglob("*.py"))


def imports(path: Path, *, top_only: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    nodes = tree.body if top_only else list(ast.walk(tree))
    for node in nodes:
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_dependencies_point_down(room):
    allowed = ALLOWED[room] | {room, "types", "errors"}
    for path in files(room):
        for name in imports(path, top_only=False):
            if name.startswith("lit_grpo."):
                assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", sorted(NOT_AT_IMPORT))
def test_heavy_packages_are_imported_where_they_are_used(room):
    for path in files(room):
        if path.name == "math_symbolic.py":
            continue  # imported by the verifier's worker processes alone
        found = {name.split(".")[0] for name in imports(path, top_only=True)}
        assert not found & NOT_AT_IMPORT[room], f"{path.name} imports {found & NOT_AT_IMPORT[room]}"


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, lit_grpo; print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.strip() == "[]"


def test_no_file_is_longer_than_500_lines():
    for pattern in ("lit_grpo/**/*.py", "callbacks/**/*.py", "tests/**/*.py", "scripts/*"):
        for path in ROOT.glob(pattern):
            if path.is_file() and "callbacks" not in path.relative_to(ROOT).parts[1:]:
                assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path


def test_pyproject_lists_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"lit_grpo"} | {
        ".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE
    }
    assert set(settings["packages"]) == found | {"lit_grpo.callbacks"}
    assert (PACKAGE / "callbacks").resolve() == (ROOT / "callbacks").resolve()
