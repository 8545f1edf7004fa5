"""A port for later is free, and none of those that the system gives away."""

from __future__ import annotations

import socket

import pytest

from lit_grpo.utils import ports
from lit_grpo.utils.ports import free_port


def test_it_can_be_bound_and_lies_below_the_ports_of_outgoing_connections() -> None:
    found = {free_port() for _ in range(20)}
    assert len(found) > 1
    with socket.socket() as system:
        system.bind(("127.0.0.1", 0))
        assert max(found) < system.getsockname()[1]
    for port in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_one_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(ports, "_LOWEST", port)
    monkeypatch.setattr(ports, "_HIGHEST", port)
    assert free_port() == port
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        with pytest.raises(OSError, match="was free"):
            free_port()
