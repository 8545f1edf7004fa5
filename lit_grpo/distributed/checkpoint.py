"""A folder of shards, written by any number of ranks, read in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

META = "meta.pt"
"""What is not a tensor of the model or of an optimizer, as Lightning writes it."""


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is such a folder."""
    return (path / META).is_file() and (path / ".metadata").is_file()


def read_sharded(path: Path, *, optimizers: bool) -> dict[str, Any]:
    """The checkpoint as if it had been written as one file, all tensors whole and in main memory.

    Args:
        path: the folder.
        optimizers: read their states too, which are twice as large as the weights.
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
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    content: dict[str, Any] = torch.load(path / META, weights_only=True, map_location="cpu")
    places = metadata.planner_data
    nested: dict[str, Any] = {}
    for key, value in wanted.items():
        _put(nested, places[key], value)
    content["state_dict"] = nested.pop("state_dict", {})
    if optimizers:
        names = sorted((name for name in nested if name.startswith("optimizer_")), key=lambda n: int(n.split("_")[1]))
        content["optimizer_states"] = [_numbered(_lists(nested[name])) for name in names]
    return content


class AnyCheckpointIO(TorchCheckpointIO):
    """Lightning's file reader and writer, which also reads folders of shards: a sharded run goes on without sharding.

    ``Trainer(plugins=[AnyCheckpointIO()])``; on the command line it is always there.
    """

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if is_sharded(Path(path)):
            return read_sharded(Path(path), optimizers=True)
        found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return found


def _put(target: dict[Any, Any], place: tuple[Any, ...], value: Any) -> None:
    for step in place[:-1]:
        target = target.setdefault(step, {})
    target[place[-1]] = value


def _lists(value: Any) -> Any:
    """Dictionaries with the keys 0, 1, 2, ... become lists again."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_lists(value[key]) for key in sorted(value)]
    return {key: _lists(item) for key, item in value.items()}


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by number of the parameter, as a plain optimizer has it, from one by name."""
    groups, number = [], dict[str, int]()
    for group in state["param_groups"]:
        for name in group["params"]:
            number[name] = len(number)
        groups.append(group | {"params": [number[name] for name in group["params"]]})
    return {"state": {number[name]: values for name, values in state["state"].items()}, "param_groups": groups}
