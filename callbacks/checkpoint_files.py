"""Checkpoints on disk: written whole and sealed or not at all, by all ranks together; how large they are."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_grpo.utils.files import move_into_place, remove
from lit_grpo.utils.integrity import file_hashes, files_of, seal, seal_folder

log = logging.getLogger(__name__)

META = "meta.pt"
"""File of a folder of shards with everything that is no tensor, as Lightning names it."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or a quota, that has no room left."""


def checkpoint_name(rollout: int) -> str:
    """Return the name of the checkpoint after so many rollouts."""
    return f"rollout-{rollout:06d}.ckpt"


def rollout_of(name: str) -> int:
    """Return the rollouts trained on in the checkpoint of this name."""
    return int(name.removeprefix("rollout-").removesuffix(".ckpt"))


@dataclass(frozen=True)
class Ranks:
    """The processes that write a checkpoint together, and how they exchange plain values."""

    rank: int = 0
    world_size: int = 1
    group: Any = None
    """Process group; None: the default one."""

    @classmethod
    def of(cls, trainer: Trainer, group: Any = None) -> Ranks:
        """Return the ranks of a run."""
        return cls(trainer.global_rank, trainer.world_size, group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; all of them must call it."""
        values: list[Any] = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            torch.distributed.all_gather_object(values, value, group=self.group)
        return values


def is_full(error: OSError) -> bool:
    """Tell whether an error says that a disk, or a quota, has no room left."""
    return error.errno in FULL


def write_content(
    content: dict[str, Any], path: Path, write: Callable[[dict[str, Any], Path], None], ranks: Ranks
) -> None:
    """Write a checkpoint under ``path``, sealed and synced to disk; all ranks must call it.

    Args:
        content: the checkpoint, or this rank's part of it.
        path: the name that it gets when it is whole.
        write: writes the content under another name, on all ranks.
        ranks: the ranks.

    Raises:
        OSError: on all ranks alike, the disk of one refuses. Nothing is left of what was written, and what stood
            under ``path`` before stands there still.
    """
    temporary = path.with_name(f".{path.name}.tmp")

    def prepare() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)

    def finish() -> None:
        if temporary.is_file():
            seal(temporary)
        move_into_place(temporary, path)

    try:
        on_rank_zero(ranks, prepare)
        # Not Trainer.save_checkpoint: there, ranks wait for one whose disk is full, which never comes.
        _on_all_ranks(ranks, lambda: write(content, temporary))
        if temporary.is_dir():
            _seal_folder(ranks, temporary)
        on_rank_zero(ranks, finish)
    except BaseException:
        if ranks.rank == 0:
            # What could be removed is: a disk that refuses to write may refuse this too, and the first error counts.
            try:
                remove(temporary)
            except OSError as error:
                log.warning("%s is left over (%s).", temporary, error)
        raise


def write_shards(content: dict[str, Any], path: Path, *, rank: int, group: Any) -> None:
    """Write a checkpoint as Lightning's ModelParallelStrategy does, by a process group of one's own.

    Args:
        content: this rank's part of it; weights and optimizers are taken out.
        path: the folder, which all ranks see.
        rank: rank of this process.
        group: group of all ranks that exchanges plain values on the CPU; None: there is one rank, which asks nobody.
    """
    from torch.distributed import checkpoint

    state = {"state_dict": content.pop("state_dict")}
    state |= {f"optimizer_{number}": one for number, one in enumerate(content.pop("optimizer_states", []))}
    path.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # Torch warns of writing without a process group, which is what is meant where there is one rank.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.save(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    if rank == 0:
        torch.save(content, path / META)


def _seal_folder(ranks: Ranks, folder: Path) -> None:
    # Each rank hashes its share of the files, which are as many as ranks, and large.
    names, own = files_of(folder), dict[str, list[Any]]()
    _on_all_ranks(ranks, lambda: own.update(file_hashes(folder, names[ranks.rank :: ranks.world_size])))
    hashes = {name: entry for share in ranks.gather(own) for name, entry in share.items()}
    on_rank_zero(ranks, lambda: seal_folder(folder, hashes))


def on_rank_zero(ranks: Ranks, function: Callable[[], None]) -> None:
    """Call a function on rank 0; an OSError there is raised on all ranks, all of which must call this."""
    _on_all_ranks(ranks, lambda: function() if ranks.rank == 0 else None)


def _on_all_ranks(ranks: Ranks, function: Callable[[], Any]) -> None:
    failure: OSError | None = None
    try:
        function()
    except OSError as error:
        failure = error
    except RuntimeError as error:
        failure = _from_writer(error)
        if failure is None:
            raise
    # torch's error of a collective save is no Exception.
    except BaseException as error:
        if type(error).__name__ != "CheckpointException":
            raise
        failure = OSError(_number_in(error), f"not all shards could be written: {error}")
    if ranks.world_size > 1:
        own = None if failure is None else (failure.errno, f"rank {ranks.rank}: {failure.strerror or failure}")
        first = next((one for one in ranks.gather(own) if one is not None), None)
        failure = None if first is None else OSError(*first)
    if failure is not None:
        raise failure


def _from_writer(error: RuntimeError) -> OSError | None:
    # The writer of torch reports a full disk in words of its own, and not as an OSError.
    text = str(error)
    if isinstance(error.__cause__ or error.__context__, OSError):
        cause: Any = error.__cause__ or error.__context__
        return OSError(cause.errno, cause.strerror)
    if any(word in text for word in ("PytorchStreamWriter", "inline_container", "unexpected pos")):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _number_in(error: BaseException) -> int:
    text = str(error)
    return errno.ENOSPC if "No space left" in text or "inline_container" in text else errno.EIO


def remove_half_written(folder: Path) -> list[str]:
    """Remove what a killed process left of checkpoints under their hidden names, and return the names.

    A folder that stood aside while another took its place goes back if that other never came.
    """
    removed: list[str] = []
    if not folder.is_dir():
        return removed
    for path in sorted(folder.glob(".*.ckpt.old")):
        target = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if not target.exists():
            path.rename(target)
    for path in sorted([*folder.glob(".*.ckpt.tmp"), *folder.glob(".*.ckpt.old")]):
        remove(path)
        removed.append(path.name)
    return removed


def size_of(path: Path) -> int:
    """Return the bytes of a checkpoint, a file or a folder."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def expected_bytes(trainer: Trainer) -> int:
    """Estimate the bytes of a checkpoint of this run, from its weights and optimizers; state and text are small."""
    module = trainer.lightning_module
    total = sum(v.numel() * v.element_size() for v in module.state_dict().values() if isinstance(v, torch.Tensor))
    for optimizer in trainer.optimizers:
        states = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        if states:
            total += sum(value.numel() * value.element_size() for value in states)
            continue
        # Not stepped yet: two moments where it is of Adam's kind, one with momentum.
        moments = 2 if "betas" in optimizer.defaults else int(bool(optimizer.defaults.get("momentum")))
        small = "8bit" in type(optimizer).__name__
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        total += moments * sum(p.numel() * (1 if small else p.element_size()) for p in weights)
    return total


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
