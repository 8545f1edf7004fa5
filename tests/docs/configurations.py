"""The YAML of the documents as the command line reads it: parsed on top of a base, and its classes built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.docs.blocks import PYTHON, Block, blocks

BASE = {
    "model": {"policy": {"tiny": {"width": 32, "layers": 1, "heads": 2}}},
    "data": {"prompts": {"class_path": "lit_grpo.data.AdditionPrompts"},
             "rewards": [{"class_path": "lit_grpo.rewards.ExactMatch"}], "rollouts": 2},
    "trainer": {"accelerator": "cpu"},
}  # fmt: skip
"""The least that a fit needs."""


def whole(block: Block) -> dict[str, Any]:
    """Put a fragment where it belongs in a configuration; the keys at its top say where.

    Raises:
        ValueError: these keys have no place in a configuration.
    """
    value = yaml.safe_load(block.text)
    if not isinstance(value, dict):
        raise ValueError(f"{block} is no mapping")
    keys = set(value)
    if keys <= {"model", "data", "trainer", "checkpoint", "completions", "monitors", "seed_everything"} and not (
        isinstance(value.get("monitors"), list)
    ):
        return value
    if keys == {"rewards"}:
        return {"data": value}
    if keys == {"class_path", "init_args"}:
        return {"trainer": {"callbacks": [value]}}
    # Arguments of the monitor that most pages are about.
    if keys <= {"notify", "monitors", "actions", "remedies", "rollbacks"}:
        monitor = {"class_path": "lit_grpo.callbacks.HealthMonitor", "init_args": value}
        return {"trainer": {"callbacks": [monitor]}}
    raise ValueError(f"{block}: nothing here knows where {', '.join(sorted(keys))} belong in a configuration")


def read(parser: Any, block: Block, folder: Path) -> None:
    """Parse a fragment on top of :data:`BASE`, and build the model, the data module, callbacks and logger it names.

    Args:
        parser: of ``lit-grpo fit``.
        block: a YAML block.
        folder: where the two files may be written.

    Raises:
        Exception: whatever the parser or a class has against it.
    """
    base, fragment = folder / "base.yaml", folder / "fragment.yaml"
    # As it stands where it is a whole one: the parser reads YAML in its own way.
    layer = whole(block)
    given = layer.get("model", {}).get("policy", {})
    least = {**BASE, "model": {}} if "path" in given else BASE
    base.write_text(yaml.safe_dump(least), encoding="utf-8")
    same = yaml.safe_load(block.text) == layer
    fragment.write_text(block.text if same else yaml.safe_dump(layer), encoding="utf-8")
    with _reader_package(block.page, folder):
        config = parser.parse_args(["--config", str(base), "--config", str(fragment)])
        parser.instantiate(config)


@contextmanager
def _reader_package(page: str, folder: Path) -> Iterator[None]:
    """Make ``my_package``, as pages call the package of who reads them; the Python blocks of the page are in it."""
    package = folder / "my_package"
    package.mkdir()
    code = "\n".join(block.text for block in blocks(page) if block.language == PYTHON and block.mark is None)
    for name in ("__init__.py", "my_module.py"):
        (package / name).write_text(code if "my_package" in _text_of(page) else "", encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
            del sys.modules[name]


def _text_of(page: str) -> str:
    return "".join(block.text for block in blocks(page))
