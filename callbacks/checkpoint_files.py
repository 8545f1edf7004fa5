"""Checkpoints on disk: written whole and sealed or not at all, by all ranks together; how large they are."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_grpo.utils.files import move_into_place, remove
from lit_grpo.utils.integrity import file_hashes, files_of, seal, seal_folder

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or a quota, that has no room left."""


def checkpoint_name(rollout: int) -> str:
    """Return the name of the checkpoint after so many rollouts."""
    return f"rollout-{rollout:06d}.ckpt"


def rollout_of(name: str) -> int:
    """Return the rollouts trained on in the checkpoint of this name."""
    return int(name.removeprefix("rollout-").removesuffix(".ckpt"))


def write_checkpoint(trainer: Trainer, path: Path) -> None:
    """Save the run under ``path``, sealed and synced to disk; all ranks must call it.

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
        on_rank_zero(trainer, prepare)
        # Not Trainer.save_checkpoint: there, ranks wait for one whose disk is full, which never comes.
        content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        _on_all_ranks(trainer, lambda: trainer.strategy.save_checkpoint(content, temporary))
        if temporary.is_dir():
            _seal_folder(trainer, temporary)
        on_rank_zero(trainer, finish)
    except BaseException:
        if trainer.is_global_zero:
            # What could be removed is: a disk that refuses to write may refuse this too, and the first error counts.
            try:
                remove(temporary)
            except OSError as error:
                log.warning("%s is left over (%s).", temporary, error)
        raise


def _seal_folder(trainer: Trainer, folder: Path) -> None:
    # Each rank hashes its share of the files, which are as many as ranks, and large.
    names = files_of(folder)
    shares: list[Any] = [None] * trainer.world_size

    def hash_share() -> None:
        share = file_hashes(folder, names[trainer.global_rank :: trainer.world_size])
        shares[trainer.global_rank] = share

    _on_all_ranks(trainer, hash_share)
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(shares, shares[trainer.global_rank])
    hashes = {name: entry for share in shares for name, entry in share.items()}
    on_rank_zero(trainer, lambda: seal_folder(folder, hashes))


def on_rank_zero(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call a function on rank 0; an OSError there is raised on all ranks, all of which must call this."""
    _on_all_ranks(trainer, lambda: function() if trainer.is_global_zero else None)


def _on_all_ranks(trainer: Trainer, function: Callable[[], Any]) -> None:
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
    if trainer.world_size > 1:
        failures: list[Any] = [None] * trainer.world_size
        own = None if failure is None else (failure.errno, f"rank {trainer.global_rank}: {failure.strerror or failure}")
        torch.distributed.all_gather_object(failures, own)
        first = next((one for one in failures if one is not None), None)
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


def in_words(count: float) -> str:
    """Return a number of bytes as a person would say it, in powers of ten."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"
