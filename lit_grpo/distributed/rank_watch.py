"""A watch over the ranks of a run, beside its collectives, which would wait for a rank that is gone for many minutes.

Rank 0 listens; every other rank holds one connection to it, over which both send a byte every two seconds from a thread
of their own, so that neither a long step nor a long collective is taken for silence. A connection that ends without a
goodbye is a process that died; one that is silent is a process that was stopped, or a machine that hangs. Rank 0 tells
the others which rank it was; they notice by themselves if it is rank 0.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

INTERVAL = 2.0
"""Seconds between two signs of life."""
_CONNECT_SECONDS = 20.0
_HELLO_BYTES = 4096

LossKind = Literal["died", "silent", "broke off"]

_ALIVE, _GOODBYE, _TOLD = b".", b"x", b"!"


@dataclass(frozen=True)
class Process:
    """One rank's process, by which another of the same host can be sure that it is still the one it was."""

    rank: int
    pid: int
    host: str
    began: str
    """Start of the process in ticks since the boot of its machine; "" where that cannot be told."""

    @classmethod
    def own(cls, rank: int) -> Process:
        """Describe this process."""
        return cls(rank, os.getpid(), socket.gethostname(), _began(os.getpid()))

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def kill(self) -> None:
        """End the process with SIGKILL if it is one of this host: one that was stopped can do nothing itself."""
        if self.host == socket.gethostname() and self.began and _began(self.pid) == self.began:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Loss:
    """A rank that is gone.

    Attributes:
        process: the rank's process.
        what: what became of it, as the end of a sentence that begins with the rank.
        kind: ``died``; ``silent``, and then its process may still be there; ``broke off`` with an error of its own.
        told: whether rank 0 has told it, and so said it already.
    """

    process: Process
    what: str
    kind: LossKind
    told: bool = False

    def __str__(self) -> str:
        return f"{self.process} {self.what}"


@dataclass
class _Peer:
    connection: socket.socket
    process: Process | None = None
    heard: float = field(default_factory=time.monotonic)
    received: bytes = b""
    gone: bool = False
    """It said goodbye, or was lost."""


class RankWatch:
    """The watch of one rank; it begins with :meth:`start` and calls ``on_loss`` at most once, in its own thread.

    Args:
        rank: rank of this process.
        silence: seconds without a sign of life after which a rank counts as lost.
        on_loss: told which rank was lost.
    """

    def __init__(self, rank: int, silence: float, on_loss: Callable[[Loss], None]) -> None:
        self._own = Process.own(rank)
        self._silence, self._on_loss = silence, on_loss
        self._peers: list[_Peer] = []
        self._server: socket.socket | None = None
        self._token = ""
        self._stopping = threading.Event()
        self._last_word = b""
        self._thread: threading.Thread | None = None

    def start(self, broadcast: Callable[[Any], Any], host: str) -> None:
        """Begin to watch. All ranks must call it.

        Args:
            broadcast: gives every rank the value of rank 0.
            host: address of rank 0's machine, as the other ranks see it.

        Raises:
            OSError: this rank cannot reach rank 0; it is then not watched.
        """
        offer: Any = None
        if self._own.rank == 0:
            self._token = secrets.token_hex(16)
            try:
                self._server = _listen(host)
            except OSError:
                # Rank 0 must not keep the others waiting for its word.
                offer = None
            else:
                offer = [host, self._server.getsockname()[1], self._token, vars(self._own)]
        offer = broadcast(offer)
        if offer is None:
            raise OSError("rank 0 cannot listen")
        if self._own.rank:
            address, port, self._token, process = offer
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            connection.sendall(json.dumps({"token": self._token, **vars(self._own)}).encode() + b"\n")
            self._peers.append(_Peer(connection, Process(**process)))
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """Say goodbye and end the watch. Safe to call twice.

        Args:
            failure: what this rank broke off with, for which the others are not to wait; None: it ends as they do.
        """
        if self._stopping.is_set() or self._thread is None:
            return
        self._last_word = _GOODBYE if failure is None else _word(Loss(self._own, f"broke off: {failure}", "broke off"))
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * INTERVAL)

    # The thread.

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in (self._server, *(peer.connection for peer in self._peers)):
                if connection is not None:
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
            loss = self._watch(selector)
        if loss is not None:
            if not self._stopping.is_set():
                self._tell(_word(loss))
                self._on_loss(loss)
        else:
            self._tell(self._last_word)
        for peer in self._peers:
            peer.connection.close()
        if self._server is not None:
            self._server.close()

    def _watch(self, selector: selectors.BaseSelector) -> Loss | None:
        """Exchange signs of life until a rank is lost, or the watch is over (None)."""
        spoke = 0.0
        while not self._stopping.is_set():
            before = time.monotonic()
            if before - spoke >= INTERVAL:
                self._tell(_ALIVE)
                spoke = before
            for key, _ in selector.select(0.2):
                if key.fileobj is self._server:
                    self._accept(selector)
                    continue
                peer = next(peer for peer in self._peers if peer.connection is key.fileobj)
                loss = self._listen_to(peer)
                if loss is not None:
                    return loss
                if peer.gone:
                    selector.unregister(peer.connection)
            now = time.monotonic()
            if now - before > INTERVAL:
                # This process itself stood still: what the others said meanwhile is still to be read.
                for peer in self._peers:
                    peer.heard = now
            for peer in self._peers:
                if not peer.gone and peer.process is not None and now - peer.heard > self._silence:
                    return Loss(
                        peer.process,
                        f"has given no sign of life for {self._silence:.0f} seconds: it was stopped, or its machine "
                        "hangs",
                        "silent",
                    )
            # Rank 0 has said goodbye: there is nobody left to watch.
            if self._own.rank and all(peer.gone for peer in self._peers):
                return None
        return None

    def _accept(self, selector: selectors.BaseSelector) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._peers.append(_Peer(connection))
            selector.register(connection, selectors.EVENT_READ)

    def _listen_to(self, peer: _Peer) -> Loss | None:
        """Take what a peer has sent, and return whom it is the end of."""
        try:
            data = peer.connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            peer.gone = True
            return None if peer.process is None else Loss(peer.process, "has died", "died")
        peer.heard = time.monotonic()
        peer.received += data
        if peer.process is None and not self._greet(peer):
            return None
        peer.received = peer.received.lstrip(_ALIVE)
        if peer.received.startswith(_GOODBYE):
            peer.gone = True
        elif peer.received.startswith(_TOLD) and peer.received.endswith(b"\n"):
            peer.gone = True
            word = json.loads(peer.received.strip(_TOLD + b"\n" + _ALIVE))
            process = Process(**word["process"])
            assert word["kind"] in get_args(LossKind)
            return Loss(process, str(word["what"]), cast(LossKind, word["kind"]), told=self._own.rank > 0)
        return None

    def _greet(self, peer: _Peer) -> bool:
        """Read the first line of a connection; one that does not know the run's secret is closed."""
        line, end, rest = peer.received.partition(b"\n")
        if not end and len(line) < _HELLO_BYTES:
            return False
        try:
            hello = json.loads(line)
            known = hmac.compare_digest(str(hello.pop("token")), self._token)
            process = Process(**hello)
        except (ValueError, TypeError, KeyError, AttributeError):
            known = False
        if not known:
            peer.gone = True
            return False
        peer.process, peer.received = process, rest
        return True

    def _tell(self, word: bytes) -> None:
        for peer in self._peers:
            # Rank 0 owes a word only to those that it knows.
            if not peer.gone and peer.process is not None:
                with contextlib.suppress(OSError):
                    peer.connection.send(word)


def _word(loss: Loss) -> bytes:
    """Write a loss as it is told to the others."""
    content = {"what": loss.what, "kind": loss.kind, "process": vars(loss.process)}
    return _TOLD + json.dumps(content).encode() + b"\n"


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError:
        if host == "127.0.0.1":
            raise
        # The address belongs to something in front of this machine. Who connects must know the run's secret.
        return socket.create_server(("", 0))


def _began(pid: int) -> str:
    try:
        # Behind the name in parentheses, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
