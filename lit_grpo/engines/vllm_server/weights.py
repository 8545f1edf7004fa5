"""Weights handed to a server as safetensors files, in a folder that both sides see.

The files stay until the next version comes, so that a server that was started again gets the same weights without the
learner.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lit_grpo.engines.base import NamedWeights

_FILE_BYTES = 2**30
"""Size of a file: so much is kept in the learner's memory before it is written."""


def write_weights(folder: Path, weights: NamedWeights, dtype: torch.dtype | None) -> None:
    """Replace the files of ``folder`` by those of ``weights``.

    Args:
        folder: made if it is not there.
        weights: (name, full tensor) on any device, read one at a time.
        dtype: number format of the server. Floating-point tensors are written in it, as loading would round them;
            None: as they are.
    """
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    count, size, pending = 0, 0, dict[str, Tensor]()

    def write() -> None:
        nonlocal count, size, pending
        save_file(pending, folder / f"{count:05}.safetensors")
        count, size, pending = count + 1, 0, {}

    for name, tensor in weights:
        # Always a copy: tied weights share memory, which safetensors refuses.
        written_dtype = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        pending[name] = tensor.detach().to("cpu", written_dtype, copy=True).contiguous()
        size += pending[name].nbytes
        if size >= _FILE_BYTES:
            write()
    if pending:
        write()


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the files in ``folder``, one at a time.

    Raises:
        FileNotFoundError: no file is there, or ``folder`` is not seen from this machine.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no weights in {folder}: does the server see the same folder as the learner?")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
