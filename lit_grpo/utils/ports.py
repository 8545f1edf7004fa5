"""A port for a server that another process opens later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_ATTEMPTS = 100
_LOWEST, _HIGHEST = 15000, 32767


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of ``host`` that nobody listens on, and that no connection takes by chance.

    Until the server opens it seconds may pass. A port that the system chooses itself (a bind to port 0) is one of those
    that it also gives to outgoing connections of any program, so it may be taken by then. This one lies below them.

    Raises:
        OSError: none of many ports was free.
    """
    # Not the seeded generator: two runs with the same seed start at the same time.
    draw = random.SystemRandom()
    highest = min(_HIGHEST, _first_of_the_system() - 1)
    for _ in range(_ATTEMPTS):
        port = draw.randint(min(_LOWEST, highest), highest)
        with socket.socket() as probe:
            # A server that ended just now does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_ATTEMPTS} ports from {_LOWEST} to {highest} of {host} was free")


def _first_of_the_system() -> int:
    """Return the first port that Linux gives to outgoing connections; its default where that cannot be read."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _HIGHEST + 1
