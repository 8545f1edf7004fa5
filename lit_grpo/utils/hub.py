"""Whether the Hugging Face hub can be asked; its own client would try again for more than a minute and a half."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

REACH_SECONDS = 3.0
"""Time after which a hub that does not accept a connection counts as unreachable."""


def reachable(host: str, port: int, seconds: float = REACH_SECONDS) -> bool:
    """Say whether a connection to ``host`` can be opened within ``seconds``, the look-up of its name included."""
    opened = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError:
            return
        opened.set()

    # In a thread, because looking up a name has no time limit; a daemon, so that it keeps no process alive.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return opened.is_set()


def why_unreachable(endpoint: str, offline: bool) -> str | None:
    """Say why the hub cannot be asked; None if it can be.

    Args:
        endpoint: address of the hub.
        offline: whether its client is told to ask nobody.
    """
    if offline:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    # Behind a proxy the hub itself need not be reachable from here.
    if urllib.request.getproxies() or reachable(address.hostname or "", port):
        return None
    return f"{address.hostname} cannot be reached"


@contextmanager
def from_cache_alone() -> Iterator[None]:
    """Let the hub's client take what is in the cache and ask nobody."""
    import huggingface_hub.constants

    # The package has read the environment variable when it was imported, so setting it now would do nothing.
    previous = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = previous
