"""A model folder looked at before anything of it is loaded: are its files there, whole, and of a kind that is safe."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError, nearest

_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that safetensors itself reads."""
_PREFIX_BYTES = 8
"""The length of the header stands before it, as a little-endian number of 64 bits."""


def check_folder(path: Path, where: str) -> None:
    """Check that a folder holds a Hugging Face model whose weights are whole; reads their headers alone.

    Args:
        path: the folder.
        where: key of the configuration that names it.

    Raises:
        UserError: the folder or its configuration is missing or broken; it has no weights, or weights that are torn or
            that an index names and that are not there.
    """
    path = path.expanduser()
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        similar = nearest(path.name, siblings)
        what = f"{path} is a file, not a model folder" if path.exists() else f"there is no model folder {path}"
        raise UserError(
            what,
            where=where,
            remedy=f"did you mean {path.parent / similar}?"
            if similar and not path.exists()
            else "give a folder written by save_pretrained (scripts/get_smollm2 makes models/SmolLM2-135M-Instruct)",
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"the folder {path} holds no config.json, so it is no Hugging Face model",
            where=where,
            remedy="give the folder that save_pretrained or `lit-grpo export` wrote",
        )
    _read_json(path / "config.json", where)
    # Names the tokens that end a completion; without it those of the tokenizer alone do.
    if (path / "generation_config.json").is_file():
        _read_json(path / "generation_config.json", where)
    weights = sorted(path.glob("*.safetensors"))
    # The older kind is a pickle, of which transformers reads tensors alone.
    if not weights and not [*path.glob("*.bin")]:
        raise UserError(
            f"the folder {path} holds no weights (*.safetensors)",
            where=where,
            remedy="copy the whole folder, as save_pretrained wrote it",
        )
    _check_index(path, where)
    for file in weights:
        check_safetensors(file, where)


def check_safetensors(file: Path, where: str) -> None:
    """Check the header of a safetensors file, and that the file is as long as the header says.

    Raises:
        UserError: it is empty, cut off, or no such file.
    """
    remedy = "copy or download the file again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_PREFIX_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX_BYTES else 0
            whole = 0 < length <= min(size - _PREFIX_BYTES, _MOST_HEADER_BYTES)
            header = json.loads(stream.read(length)) if whole else None
    except OSError as error:
        raise UserError(f"the weights {file} cannot be read: {error.strerror}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the weights {file} are damaged: their header is none", where=where, remedy=remedy) from error
    if not isinstance(header, Mapping):
        raise UserError(f"the weights {file} are damaged: {size:,} bytes without a header", where=where, remedy=remedy)
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"the weights {file} are damaged: a bad header", where=where, remedy=remedy) from error
    expected = _PREFIX_BYTES + length + max(ends, default=0)
    if size != expected:
        raise UserError(
            f"the weights {file} are damaged: {size:,} bytes, and the header tells of {expected:,}",
            where=where,
            remedy=remedy,
        )


def _check_index(path: Path, where: str) -> None:
    if not (path / _INDEX).is_file():
        return
    index = _read_json(path / _INDEX, where)
    shards = index.get("weight_map")
    if not isinstance(shards, Mapping):
        raise UserError(f"{path / _INDEX} has no weight_map", where=where, remedy="copy the folder again")
    for name in sorted({str(shard) for shard in shards.values()}):
        if not (path / name).is_file():
            raise UserError(
                f"the folder {path} lacks {name}, which its index names", where=where, remedy="copy the folder again"
            )


def _read_json(file: Path, where: str) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON: {error}", where=where, remedy="copy the folder again") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{file} holds no JSON object", where=where, remedy="copy the folder again")
    return content
