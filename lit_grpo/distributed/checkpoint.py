"""Checkpoints in shards: a folder written by any number of ranks, read in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_grpo.run.checkpoints import check_whole

META = "meta.pt"
"""File with everything that is no tensor of the model or of an optimizer, as Lightning writes it."""


def is_sharded(path: Path) -> bool:
    """Tell whether ``path`` is a folder of shards."""
    return (path / META).is_file() and (path / ".metadata").is_file()


def read_sharded(path: Path, *, optimizers: bool) -> dict[str, Any]:
    """Read a folder of shards as if it had been written as one file, all tensors whole and in main memory.

    Args:
        path: the folder.
        optimizers: whether to read the states of optimizers too, which are twice as large as the weights.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {}
    for key, item in metadata.state_dict_metadata.items():
        if optimizers or key.startswith("state_dict."):
            wanted[key] = None
            if isinstance(item, TensorStorageMetadata):
                wanted[key] = torch.empty(item.size, dtype=item.properties.dtype)
    with warnings.catch_warnings():
        # Torch warns of reading without a process group, which is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    content: dict[str, Any] = torch.load(path / META, weights_only=True, map_location="cpu")
    paths = metadata.planner_data
    nested: dict[str, Any] = {}
    for key, value in wanted.items():
        _put(nested, paths[key], value)
    content["state_dict"] = nested.pop("state_dict", {})
    if optimizers:
        # By number, the order in which the module makes its optimizers.
        names = sorted((name for name in nested if name.startswith("optimizer_")), key=lambda n: int(n.split("_")[1]))
        content["optimizer_states"] = [_numbered(_lists(nested[name])) for name in names]
    return content


class AnyCheckpointIO(TorchCheckpointIO):
    """Lightning's file reader and writer, which checks what it reads and also reads folders of shards.

    It writes straight into the file. Lightning's own makes the whole file in memory first and once more in the folder
    of temporary files, which is often small.

    ``Trainer(plugins=[AnyCheckpointIO()])``; on the command line it is always there.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        check_whole(Path(path))
        if is_sharded(Path(path)):
            return read_sharded(Path(path), optimizers=True)
        content: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return content


def _put(target: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
    target[path[-1]] = value


def _lists(value: Any) -> Any:
    """Turn dictionaries with the keys 0, 1, 2, ... back into lists."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_lists(value[key]) for key in sorted(value)]
    return {key: _lists(item) for key, item in value.items()}


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """Turn an optimizer's state by parameter name into one by number, as a plain optimizer has it."""
    groups, number = [], dict[str, int]()
    for group in state["param_groups"]:
        for name in group["params"]:
            number[name] = len(number)
        groups.append(group | {"params": [number[name] for name in group["params"]]})
    return {"state": {number[name]: values for name, values in state["state"].items()}, "param_groups": groups}
