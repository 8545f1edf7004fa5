"""Silencing of other libraries' loggers for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Silence a logger below ``level`` within the ``with`` block, and give it its own level back afterwards."""
    log = logging.getLogger(name)
    own_level = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(own_level)
