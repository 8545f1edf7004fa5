"""Which card an engine process runs on, told without asking CUDA, which takes the import of torch."""

from __future__ import annotations

import os
from pathlib import Path

MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The share of a card's multiprocessors that a process may use under NVIDIA's MPS, in percent."""
_DEVICES = Path("/dev")
"""NVIDIA's driver has a file for each card there that this process may use: nvidia0, nvidia1 and so on."""


def cards_of_driver() -> int:
    """Return how many cards this process will see, as far as NVIDIA's driver tells; 0 where none is there."""
    present = sum(file.name.removeprefix("nvidia").isdecimal() for file in _DEVICES.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if _names(name)]))


def environment_on_card(own: str, named: str | None = None) -> dict[str, str | None]:
    """Return what the environment of processes on a card has besides this one's.

    Args:
        own: name of the learner's card.
        named: name of the card that they run on; None: the same.
    """
    # An engine runs on the first card that it sees. The learner's is seen for the weights that lie there.
    seen = own if named in (None, own) else f"{named},{own}"
    # What these processes do on a CPU is Python; threads of torch would only wait for each other. A share of the card
    # that the learner is held to under MPS is held free for them.
    return {"CUDA_VISIBLE_DEVICES": seen, "OMP_NUM_THREADS": "1", MPS_SHARE: None}


def _names(word: str) -> bool:
    # CUDA takes no card that is named after -1, and none by an empty name.
    return bool(word.strip()) and not word.strip().startswith("-")
