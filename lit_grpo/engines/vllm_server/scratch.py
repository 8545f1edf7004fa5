"""A folder through which weights go to processes of vLLM."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def make_scratch_folder(chosen: str | None, weight_bytes: int) -> Path:
    """Make a new folder below ``chosen``; None: in shared memory if the weights fit twice, else for temporary files."""
    where = chosen
    if where is None and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * weight_bytes:
        where = str(SHARED_MEMORY)
    if chosen is not None:
        Path(chosen).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="lit-grpo-", dir=where))
