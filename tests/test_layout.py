"""Folders keep to their lines of allowed imports, there are no cycles, heavy imports stay where they are used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "lit_grpo"
LOOSE = {"__init__", "__main__", "types", "errors", "module", "datamodule", "context"}
"""Modules that may lie at the top of the package: vocabulary, two Lightning classes, their handshake, `python -m`."""
EVERYWHERE = {"types", "errors"}
LIGHTNINGS_OWN = {"_trainer"}
"""Private members of our two Lightning classes that Lightning gave them."""

# folder: what it may import of lit_grpo, besides itself and EVERYWHERE; a name stands for all that lies below it.
# Read from the top: a folder imports only what stands above it.
ALLOWED = {
    "utils": set(),
    "run": {"utils"},
    "terminal": {"run", "utils"},
    "objectives": {"utils"},
    "rewards": {"utils"},
    "rewards.isolation": set(),
    "rewards.math": {"rewards", "utils"},
    "rewards.code": {"rewards", "utils"},
    "data": {"rewards", "utils"},
    "data.sources": {"data", "rewards", "utils"},
    "distributed": {"run", "utils"},
    "policy": {"distributed", "utils"},
    "policy.model": {"policy", "distributed", "utils"},
    "policy.forward": {"policy", "distributed", "utils"},
    "policy.optimizer": {"policy.config", "distributed", "utils"},
    "engines": {"utils"},
    "engines.transformers": {"engines.base", "engines.config", "engines.stop_strings", "utils"},
    "engines.vllm": {"engines.base", "engines.config", "engines.stop_strings", "utils"},
    "engines.vllm_server": {
        *("engines.base", "engines.completion_checks", "engines.config", "engines.stop_strings", "engines.vllm"),
        "utils",
    },
    "engines.vllm_processes": {"engines.base", "engines.config", "engines.vllm", "engines.vllm_server", "utils"},
    "evaluation": {"data", "objectives", "rewards", "run", "utils"},
    "rollout": {"data", "engines", "rewards", "utils"},
    "context": set(),
    "learner": {"context", "distributed", "objectives", "policy", "utils"},
    "trainer": {"callbacks", "run", "tracking", "utils"},
    "module": {"context", "distributed", "evaluation", "learner", "objectives", "policy", "run", "trainer", "utils"},
    "datamodule": {"context", "data", "engines", "evaluation", "policy", "rewards", "rollout", "utils"},
    "callbacks": {"run", "utils"},
    "callbacks.monitors": {"callbacks", "run", "utils"},
    "callbacks.diagnosis": {"run", "utils"},
    "tracking": {"callbacks", "run", "terminal", "utils"},
    "report": {"run", "tracking", "utils"},
    "cli": {
        "callbacks",
        "datamodule",
        "distributed",
        "engines.vllm_processes.reserve",
        "evaluation",
        "learner",
        "module",
        "objectives",
        "report",
        "run",
        "terminal",
        "tracking",
        "trainer",
        "utils",
    },
    "commands": {
        *("cli", "data", "datamodule", "distributed", "engines", "learner", "module", "objectives", "policy", "report"),
        *("rewards", "rollout", "run", "terminal", "tracking", "utils"),
    },
}
NOT_AT_IMPORT = {
    "objectives": {"lightning", "transformers", "vllm", "mlflow"},
    "policy": {"lightning", "transformers", "vllm", "mlflow"},
    "engines": {"lightning", "transformers", "vllm", "mlflow"},
    "rewards": {"torchmetrics", "lightning", "transformers", "vllm", "mlflow", "math_verify", "sympy"},
    "data": {"lightning", "transformers", "vllm", "mlflow", "datasets", "pyarrow"},
    "terminal": {"torch", "transformers", "vllm", "mlflow"},
    "tracking": {"transformers", "vllm", "mlflow", "matplotlib"},
    "callbacks": {"transformers", "vllm", "mlflow"},
    "evaluation": {"transformers", "vllm", "mlflow"},
    "report": {"transformers", "vllm", "mlflow", "matplotlib", "PIL", "jinja2", "torch"},
    "run": {"lightning", "torch", "transformers", "vllm", "mlflow"},
    "utils": {"lightning", "transformers", "vllm", "mlflow"},
    "commands": {"transformers", "vllm", "mlflow"},
}


def source_files() -> list[tuple[str, Path]]:
    """(dotted module name below lit_grpo, path) of the whole package; callbacks/ lies beside it."""
    found = [(path.relative_to(PACKAGE), path) for path in PACKAGE.rglob("*.py")]
    found = [(name, path) for name, path in found if name.parts[0] != "callbacks"]
    found += [(path.relative_to(ROOT), path) for path in (ROOT / "callbacks").rglob("*.py")]
    return sorted((".".join(name.with_suffix("").parts).removesuffix(".__init__"), path) for name, path in found)


def imports(path: Path, *, top_only: bool, guarded_too: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    nodes = tree.body if top_only else list(ast.walk(tree))
    for node in nodes:
        if id(node) in guarded and not guarded_too:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            known = {name for name, _ in source_files()} if node.module.startswith("lit_grpo") else set()
            below = node.module.removeprefix("lit_grpo").removeprefix(".")
            for alias in node.names:
                whole = f"{below}.{alias.name}".removeprefix(".")
                yield f"lit_grpo.{whole}" if whole in known else node.module


def rule_of(name: str) -> str | None:
    """The longest entry of ALLOWED that covers a module."""
    covering = [key for key in ALLOWED if name == key or name.startswith(f"{key}.")]
    return max(covering, key=len, default=None)


def test_every_folder_has_its_line():
    folders = {name.rpartition(".")[0] for name, path in source_files() if path.name != "__init__.py"}
    assert {folder for folder in folders if folder and rule_of(folder) is None} == set()
    assert {name for name, _ in source_files() if "." not in name and (PACKAGE / f"{name}.py").exists()} <= LOOSE


def test_dependencies_point_down():
    for name, path in source_files():
        key = rule_of(name)
        if key is None:
            continue
        allowed = ALLOWED[key] | {key} | EVERYWHERE
        # Imports for type checkers count too: a file that needs a type of another knows that other.
        for imported in imports(path, top_only=False, guarded_too=True):
            below = imported.removeprefix("lit_grpo.")
            if imported.startswith("lit_grpo.") and not any(below == a or below.startswith(f"{a}.") for a in allowed):
                raise AssertionError(f"{path.relative_to(ROOT)} imports {imported}; {key} may import {sorted(allowed)}")


def parameters(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(function, its parameter with the annotation) of every annotated parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
                if parameter.annotation is not None:
                    yield node.name, f"{parameter.arg}: {ast.unparse(parameter.annotation)}"


def test_no_function_takes_the_module_or_the_data_module():
    """What a function needs of them is a narrower type; see context.py for the one that both sides know."""
    # The classes themselves may be handed over: the command line builds them.
    wide = re.compile(r"^(?!.*\btype\[).*: .*\b(LitGRPO|RolloutDataModule)\b")
    found = [
        f"{path.relative_to(ROOT)}: {function}({parameter})"
        for name, path in source_files()
        if name not in ("module", "datamodule")
        for function, parameter in parameters(ast.parse(path.read_text(encoding="utf-8")))
        if wide.search(parameter)
    ]
    assert found == []


def private_accesses(tree: ast.AST) -> set[str]:
    """``other._name`` where no class or function of the same file has or sets ``_name``."""
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and _is_name(node.target)}
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[a-z]", node.attr)
        and not _is_self(node.value)
        and node.attr not in own
    }


def _is_self(node: ast.AST) -> bool:
    return _is_name(node) and node.id in ("self", "cls")


def _is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def test_private_members_stay_in_their_file():
    """Of the module and the data module; private members of other libraries are another matter."""
    for name in ("module", "datamodule"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        private = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
        private = {attribute for attribute in private if re.match("_[a-z]", attribute)} - LIGHTNINGS_OWN
        assert private, "a check of nothing"
        for other, path in source_files():
            if other != name:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                touched = {access.rpartition(".")[2]: access for access in private_accesses(tree)}
                assert not touched.keys() & private, f"{path.relative_to(ROOT)}: {touched}"


def test_no_cycle_between_folders():
    edges: dict[str, set[str]] = {}
    for key, allowed in ALLOWED.items():
        edges.setdefault(key.split(".")[0], set()).update(name.split(".")[0] for name in allowed)
    done: set[str] = set()
    order = list(edges)
    while order:
        free = [room for room in order if edges[room] - {room} <= done]
        assert free, f"a cycle among {order}"
        done.update(free)
        order = [room for room in order if room not in done]


@pytest.mark.parametrize("room", sorted(NOT_AT_IMPORT))
def test_heavy_packages_are_imported_where_they_are_used(room):
    for name, path in source_files():
        if name.split(".")[0] != room or name == "rewards.math.symbolic":
            continue  # the symbolic comparison is imported by the verifier's worker processes alone
        found = {imported.split(".")[0] for imported in imports(path, top_only=True)}
        assert not found & NOT_AT_IMPORT[room], f"{path.name} imports {found & NOT_AT_IMPORT[room]}"


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, lit_grpo; print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.strip() == "[]"


def test_pyproject_lists_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(("lit_grpo", *folder.relative_to(top).parts))
        for top in (PACKAGE, ROOT)
        for folder in (path.parent for path in top.rglob("__init__.py"))
        if (top == PACKAGE and "callbacks" not in folder.parts[len(ROOT.parts) :])
        or (top == ROOT and folder.relative_to(ROOT).parts[0] == "callbacks")
    }
    assert set(settings["packages"]) == found
    assert (PACKAGE / "callbacks").resolve() == (ROOT / "callbacks").resolve()
