"""HTTP to a vLLM server: single calls, and many generations at once whose answers come as they finish."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

# Not httpx, though it comes with openai. Measured on a CPU core with 4096 short generations, 288 at once: aiohttp takes
# 0.2 ms of this process's time a request; httpx 0.28 takes 11 ms, since it looks through its whole pool whenever a
# request begins or ends, and 0.6 ms with a pool for every connection. The learner's thread would wait for that.
import aiohttp
from prometheus_client.parser import text_string_to_metric_families

GENERATE = "/inference/v1/generate"
Key = tuple[int, int]
"""Position of a request in a call of ``generate``, and the number of the sample within the request."""
T = TypeVar("T")

# The server closes an idle connection after 5 s. Below that, no request is sent into one that is closing.
_KEEP_ALIVE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_CONTROL_CONNECTIONS = 4


class ServerTrouble(Exception):  # noqa: N818 - it may pass
    """The server was not reached, broke off, or said that it failed: worth another attempt."""


class ServerRefusal(Exception):  # noqa: N818
    """The server understood and said no (status 4xx): another attempt gives the same answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Client:
    """An HTTP client whose event loop runs in a thread, so that generations go on while the caller does other work.

    Args:
        url: address of the server.
        connections: generations in flight at once; further ones wait here.
    """

    def __init__(self, url: str, connections: int) -> None:
        self.url = url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-server-client", daemon=True)
        self._thread.start()
        # Two sessions, so that a control call never waits for a generation's connection.
        self._control = self._wait(self._open(_CONTROL_CONNECTIONS))
        self._generations = self._wait(self._open(connections))

    async def _open(self, connections: int) -> aiohttp.ClientSession:
        key = os.environ.get("VLLM_API_KEY")
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )

    def get(self, path: str, seconds: float = 10.0) -> Any:
        """Return the server's answer, parsed if it is JSON, else as text; raises what :meth:`post` does."""
        return self._wait(self._call(self._control, "GET", path, None, seconds))

    def post(self, path: str, body: Any = None, seconds: float = 60.0) -> Any:
        """Send ``body`` as JSON and return the server's answer, parsed if it is JSON, else as text.

        Raises:
            ServerTrouble: no answer within ``seconds``, a broken connection, or a status of 500 and above.
            ServerRefusal: another status that is not 2xx.
        """
        return self._wait(self._call(self._control, "POST", path, body, seconds))

    def generate(self, bodies: Mapping[Key, Any]) -> Answers:
        """Ask for all of ``bodies``; the answers come as they finish."""
        return Answers(self, bodies)

    async def generate_one(self, body: Any) -> Any:
        """Return the answer to one generation. Runs in the client's own loop and raises what :meth:`post` does."""
        # Without a limit: a generation takes as long as it takes, and the caller watches the server's progress.
        return await self._call(self._generations, "POST", GENERATE, body, None)

    async def _call(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Any, seconds: float | None
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with session.request(method, self.url + path, json=body, timeout=timeout) as answer:
                is_json = answer.content_type == "application/json"
                content = await answer.json() if is_json else await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerTrouble(f"{method} {path}: {type(error).__name__}: {error}") from error
        if answer.status >= 300:
            message = f"{method} {path} gave status {answer.status}: {_message(content)}"
            raise ServerTrouble(message) if answer.status >= 500 else ServerRefusal(answer.status, message)
        return content

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the client's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result()

    def close(self) -> None:
        """Break off everything. Safe to call twice."""
        if self._loop.is_closed():
            return
        for session in (self._control, self._generations):
            self._wait(session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Answers:
    """Generations in flight: :meth:`next` gives answers, :meth:`cancel` breaks off the others on both sides."""

    def __init__(self, client: Client, bodies: Mapping[Key, Any]) -> None:
        self._inbox: queue.SimpleQueue[tuple[Key, Any] | Exception] = queue.SimpleQueue()
        self._running = client.submit(self._run(client, dict(bodies)))

    async def _run(self, client: Client, bodies: dict[Key, Any]) -> None:
        async def one(key: Key, body: Any) -> None:
            try:
                answer = await client.generate_one(body)
            except Exception as error:
                self._inbox.put(error)
            else:
                self._inbox.put((key, answer))

        await asyncio.gather(*(one(key, body) for key, body in bodies.items()))

    def next(self, seconds: float) -> tuple[Key, Any] | None:
        """Return the next answer and the key of its request, or None if none came within ``seconds``.

        Raises:
            ServerTrouble: a request failed in a way that may pass.
            ServerRefusal: the server refused a request.
        """
        try:
            item = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """Break off what is still running. Safe to call twice, and after the end."""
        self._running.cancel()


def field(answer: Any, name: str) -> Any:
    """Return a field of an answer.

    Raises:
        ServerTrouble: the answer is no object, or lacks the field.
    """
    if not isinstance(answer, dict) or name not in answer:
        raise ServerTrouble(f"the server's answer has no {name!r}: {str(answer)[:200]}")
    return answer[name]


def metric(text: str, name: str) -> float:
    """Return the sum of a Prometheus metric over its labels; NaN if ``text`` lacks it or is no list of metrics."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return float("nan")
    values = [sample.value for sample in samples if sample.name == name]
    return sum(values) if values else float("nan")


def _message(content: Any) -> str:
    """Return the error text of an answer: it lies in ``error`` or ``detail``, or the answer is the text itself."""
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", content))
        content = error.get("message", error) if isinstance(error, dict) else error
    return str(content).strip()[:500]
