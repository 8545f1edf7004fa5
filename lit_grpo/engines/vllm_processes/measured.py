"""What vLLM found room for on this machine's cards in earlier runs, so that a run need not measure it again.

While an engine measures, nothing else may take or free memory on the card: not the learner either, which would have to
wait. The size follows from the card, the model and the settings, all of which are part of the key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lit_grpo.engines.vllm_processes.choose import measured_file
from lit_grpo.utils.files import write_atomically

log = logging.getLogger(__name__)

_WITHOUT_EFFECT = ("seed", "end_token_ids")
"""Options that change nothing of the memory."""
_MOST = 100
"""Measurements that are kept, the newest."""


def key(model_config: Mapping[str, Any], options: Mapping[str, Any], processes: int) -> str:
    """Return what a measurement holds for: the card, the model, the settings, and the versions of what computes.

    Args:
        model_config: transformers configuration of the model.
        options: of the engine of one process.
        processes: number of processes.
    """
    card: tuple[Any, ...] = ()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        card = (properties.name, properties.total_memory)
    about = {
        "card": card,
        "model": model_config,
        "options": {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT},
        "processes": processes,
        "versions": [_version(package) for package in ("vllm", "torch", "triton")],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def read(key: str) -> int | None:
    """Return the size of a process's key-value cache, in bytes; None where nothing was measured, or cannot be read."""
    found = _known().get(key)
    return found if isinstance(found, int) and found > 0 else None


def write(key: str, cache_bytes: int | None) -> None:
    """Keep what was measured; None: nothing was. Without a place for it the next run measures again."""
    if cache_bytes is None or read(key) == cache_bytes:
        return
    known = {**{k: v for k, v in _known().items() if k != key}, key: cache_bytes}
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dict(list(known.items())[-_MOST:]), indent=1) + "\n")
    except OSError as error:
        log.info("what vLLM measured on the card is not kept: %s", error)


def _known() -> dict[str, Any]:
    try:
        known = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _file() -> Path:
    return measured_file().with_name("engine_memory.json")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
