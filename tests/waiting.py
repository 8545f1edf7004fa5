"""Waiting for what another thread or process does, with a limit that only a hang reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 180.0
"""Seconds; many times what a loaded machine needs for anything that a test waits for. Whoever waits so long, hangs."""


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Call ``condition`` until it gives something true, and return that.

    Raises:
        AssertionError: it was still false after ``seconds``; the message says ``what`` was awaited.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"after {seconds:.0f} seconds still waiting for this: {what}"
        time.sleep(0.02)
    return found
