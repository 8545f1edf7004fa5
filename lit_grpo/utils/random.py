"""Random numbers of a run: seeds derived from their purpose, and the state of the global generators.

A seed that depends on its purpose alone gives the same numbers whatever else was drawn before, so a run can be cut into
ranks, micro-batches and resumed parts without changing what it samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from typing import Any

import torch


def run_seed() -> int:
    """Return the seed that was given to ``seed_everything``; 0 if none was."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2**63) from all parts: equal parts give equal seeds, on every machine and in every run."""
    # Not hash(): Python salts the hashes of strings in each process.
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def get_state() -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's generators, in types that load with ``weights_only=True``."""
    import numpy as np

    # As plain values and tensors: a checkpoint is read with weights_only=True, which refuses numpy's arrays.
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: dict[str, Any]) -> None:
    """Set the global generators back to a state of :func:`get_state`."""
    import numpy as np

    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


@contextlib.contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Draw inside from a seed, the same numbers for every device, and none of the run's.

    Lightning makes models on the device of a strategy, whose generator draws other numbers than a CPU's: under FSDP2 a
    new weight would be another than under ``auto`` on the same card. What is made on the meta device stays there.
    """
    on_cpu = contextlib.nullcontext() if torch.empty(0).is_meta else torch.device("cpu")
    with torch.random.fork_rng(devices=[]), on_cpu:
        # Not torch.manual_seed, which would leave the generators of all cards with this seed.
        torch.default_generator.manual_seed(seed)
        yield
