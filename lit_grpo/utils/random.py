"""Random numbers of a run: seeds derived from what they are for, and the state of the global generators."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import torch


def run_seed() -> int:
    """The seed given to ``seed_everything``; 0 if none was."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part: equal parts, equal seed, on every machine and run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def get_state() -> dict[str, Any]:
    """State of torch's, Python's and numpy's global generators, in types that load with ``weights_only=True``."""
    import numpy as np

    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: dict[str, Any]) -> None:
    """Undo everything drawn since ``get_state``."""
    import numpy as np

    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
