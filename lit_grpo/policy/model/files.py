"""A model folder looked at before anything of it is loaded: are its files there, whole, and of a kind that is safe."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import nearest

_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that safetensors itself reads."""
_PREFIX_BYTES = 8
"""The length of the header stands before it, as a little-endian number of 64 bits."""


_SAFETENSORS = "give the folder of the same model with weights in safetensors"
_OTHER_WEIGHTS = (
    ("*.gguf", "weights for llama.cpp (GGUF)", _SAFETENSORS),
    ("*.onnx", "a model for ONNX, which cannot be trained", _SAFETENSORS),
    ("onnx/*.onnx", "a model for ONNX, which cannot be trained", _SAFETENSORS),
    ("tf_model.h5", "weights for TensorFlow", _SAFETENSORS),
    ("flax_model.msgpack", "weights for Flax", _SAFETENSORS),
    ("weights*.npz", "weights for MLX", _SAFETENSORS),
    ("consolidated*.pth", "weights as Meta gives them", "convert them (transformers: convert_llama_weights_to_hf)"),
    ("*.nemo", "a model of NeMo", "convert it to a Hugging Face model with NeMo"),
)
"""Pattern of a file, what it is, and what to do, for weights that are not read."""


def described(path: Path) -> tuple[str, str]:
    """Say what a folder without ``config.json`` is, as the predicate of a sentence, and what to do."""
    export = "make a model folder of it: lit-grpo export --checkpoint {} --output DIR, and give DIR"
    if (path / "checkpoints").is_dir() and [*(path / "checkpoints").glob("*.ckpt")]:
        return "is that of a run, whose checkpoints are no model folders", export.format(path)
    if (path / "meta.pt").is_file() or [*path.glob("*.distcp")]:
        return "is a checkpoint in shards and no model folder", export.format(path)
    if checkpoints := sorted(path.glob("*.ckpt")):
        newest = path / "last.ckpt" if (path / "last.ckpt") in checkpoints else checkpoints[-1]
        return f"holds checkpoints ({newest.name}) and no model", export.format(newest)
    if [*path.glob("zero_to_fp32.py")] or [*path.glob("global_step*")] or [*path.glob("mp_rank_*")]:
        return (
            "is a checkpoint of DeepSpeed or Megatron and no model folder",
            "convert it to a Hugging Face model first",
        )
    if (path / "model_index.json").is_file():
        return "holds a pipeline of diffusers, which makes pictures and no text", "give the folder of a language model"
    for pattern, kind, way in _OTHER_WEIGHTS:
        if found := sorted(path.glob(pattern)):
            return f"holds no config.json, but {found[0].name}: {kind}", way
    if (path.resolve().parent / "config.json").is_file():
        return "lies in a model folder and is none itself (no config.json)", f"did you mean {path.resolve().parent}?"
    # Also below models--owner--name of the hub's cache.
    below = sorted({file.parent for depth in ("*", "*/*", "*/*/*") for file in path.glob(f"{depth}/config.json")})
    if below:
        more = f" or another of {len(below)}" if len(below) > 1 else ""
        return "is no model folder (no config.json), but one lies below it", f"did you mean {below[-1]}{more}?"
    if sorted(path.glob("*.safetensors")):
        return "has weights, but no config.json that says what model they are", "copy the whole folder"
    return (
        "holds no config.json, so it is no Hugging Face model",
        "give the folder that save_pretrained or `lit-grpo export` wrote",
    )


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
        if path.is_file() and path.suffix == ".ckpt":
            raise UserError(
                f"{path} is a checkpoint, not a model folder",
                where=where,
                remedy=f"make a model folder of it: lit-grpo export --checkpoint {path} --output DIR, and give DIR",
            )
        what = f"{path} is a file, not a model folder" if path.exists() else f"there is no model folder {path}"
        raise UserError(
            what,
            where=where,
            remedy=f"did you mean {path.parent / similar}?"
            if similar and not path.exists()
            else "give a folder written by save_pretrained (scripts/get_smollm2 makes models/SmolLM2-135M-Instruct)",
        )
    if not (path / "config.json").is_file():
        what, remedy = described(path)
        raise UserError(f"the folder {path} {what}", where=where, remedy=remedy)
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"the folder {path} holds a model and adapters beside it (adapter_config.json): which is meant is unclear",
            where=where,
            remedy="move adapter_config.json and adapter_model.* into a folder of their own, and give the one you mean",
        )
    _read_json(path / "config.json", where)
    # Names the tokens that end a completion; without it those of the tokenizer alone do.
    if (path / "generation_config.json").is_file():
        _read_json(path / "generation_config.json", where)
    weights = sorted(path.glob("*.safetensors"))
    for index in (_INDEX, "pytorch_model.bin.index.json"):
        _check_index(path / index, where)
    # The older kind is a pickle, of which transformers reads tensors alone.
    if not weights and not [*path.glob("*.bin")]:
        what, remedy = "holds no weights (*.safetensors)", "copy the whole folder, as save_pretrained wrote it"
        for pattern, kind, way in _OTHER_WEIGHTS:
            if found := sorted(path.glob(pattern)):
                what, remedy = f"holds no weights in safetensors, but {found[0].name}: {kind}", way
                break
        raise UserError(f"the folder {path} {what}", where=where, remedy=remedy)
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
    if not isinstance(header, Mapping) and prefix == b"version ":
        raise UserError(
            f"the weights {file} are not there: the file is a pointer of Git LFS to them",
            where=where,
            remedy="run git lfs pull in that folder",
        )
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


def _check_index(file: Path, where: str) -> None:
    if not file.is_file():
        return
    shards = _read_json(file, where).get("weight_map")
    if not isinstance(shards, Mapping):
        raise UserError(f"{file} has no weight_map", where=where, remedy="copy the folder again")
    for name in sorted({str(shard) for shard in shards.values()}):
        if not (file.parent / name).is_file():
            raise UserError(
                f"the folder {file.parent} lacks {name}, which its index names",
                where=where,
                remedy="copy the folder again",
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
