"""HTTP to a vLLM server: single calls, and many generations at once whose answers come as they finish."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

GENERATE = "/inference/v1/generate"
Key = tuple[int, int]
"""(position of the request in the call, sample)."""
T = TypeVar("T")

_KEEP_ALIVE_SECONDS = 2.0  # below the server's 5 s: a connection that it closed is never used again
_CONNECT_SECONDS = 10.0


class ServerTrouble(Exception):  # noqa: N818 - it may pass
    """The server was not reached, broke off, or said that it failed: worth another attempt."""


class ServerRefusal(Exception):  # noqa: N818
    """The server understood and said no (status 4xx): another attempt gives the same answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Client:
    """Runs an event loop in a thread of its own, so that generations go on while the caller does something else.

    Args:
        url: of the server.
        connections: requests in flight at once; further ones wait here.
    """

    def __init__(self, url: str, connections: int) -> None:
        self.url = url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-server-client", daemon=True)
        self._thread.start()
        # Two, so that a control call never waits for a generation's connection.
        self._sessions = {"control": self._wait(self._open(4)), "generate": self._wait(self._open(connections))}

    async def _open(self, connections: int) -> aiohttp.ClientSession:
        key = os.environ.get("VLLM_API_KEY")
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )

    def get(self, path: str, seconds: float = 10.0) -> Any:
        """Parsed JSON, or text."""
        return self._wait(self.call("control", "GET", path, None, seconds))

    def post(self, path: str, body: Any = None, seconds: float = 60.0, **query: str) -> Any:
        return self._wait(self.call("control", "POST", path, body, seconds, query))

    async def call(
        self,
        session: str,
        method: str,
        path: str,
        body: Any = None,
        seconds: float | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """One request, in the client's own loop.

        Raises:
            ServerTrouble: no answer in time, a broken connection, or a status of 500 and above.
            ServerRefusal: another status that is not 2xx.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        open_session = self._sessions[session]
        try:
            async with open_session.request(
                method, self.url + path, json=body, params=query, timeout=timeout
            ) as answer:
                is_json = answer.content_type == "application/json"
                content = await answer.json() if is_json else await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerTrouble(f"{method} {path}: {type(error).__name__}: {error}") from error
        if answer.status >= 300:
            message = f"{method} {path} gave status {answer.status}: {_message(content)}"
            raise ServerTrouble(message) if answer.status >= 500 else ServerRefusal(answer.status, message)
        return content

    def generate(self, bodies: Mapping[Key, Any]) -> Answers:
        """Ask for all of ``bodies``; the answers come as they finish."""
        return Answers(self, bodies)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Break off everything. Safe to call twice."""
        if self._loop.is_closed():
            return
        for session in self._sessions.values():
            self._wait(session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Answers:
    """Generations in flight: :meth:`next` gives answers, :meth:`cancel` breaks off the rest, which the server sees."""

    def __init__(self, client: Client, bodies: Mapping[Key, Any]) -> None:
        self._inbox: queue.SimpleQueue[tuple[Key, Any] | Exception] = queue.SimpleQueue()
        self._running = client.submit(self._run(client, dict(bodies)))

    async def _run(self, client: Client, bodies: dict[Key, Any]) -> None:
        async def one(key: Key, body: Any) -> None:
            try:
                # It takes as long as it takes: the caller watches the server's progress.
                answer = await client.call("generate", "POST", GENERATE, body)
            except Exception as error:
                self._inbox.put(error)
            else:
                self._inbox.put((key, answer))

        await asyncio.gather(*(one(key, body) for key, body in bodies.items()))

    def next(self, seconds: float) -> tuple[Key, Any] | None:
        """The next answer, or None if none came in time.

        Raises:
            ServerTrouble, ServerRefusal: what a request ended with.
        """
        try:
            item = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """Safe to call twice, and after the end."""
        self._running.cancel()


def metric(text: str, name: str) -> float:
    """Sum of a Prometheus metric over its labels; NaN if it is not in ``text``."""
    values = [float(value) for value in _samples(text, name)]
    return sum(values) if values else float("nan")


def _samples(text: str, name: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")):
            yield line.rpartition(" ")[2]


def _message(content: Any) -> str:
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", content))
        content = error.get("message", error) if isinstance(error, dict) else error
    return str(content).strip()[:500]
