"""Tell a person what was found in a run: a webhook and a command, from threads that never hold the run up."""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from lit_grpo.callbacks.diagnosis.diagnosis import Diagnosis
from lit_grpo.callbacks.diagnosis.findings import SEVERITIES, Severity
from lit_grpo.errors import UserError

log = logging.getLogger(__name__)

FIELDS = ("event", "run", "folder", "diagnosis", "severity", "step", "onset", "explanation", "remedies", "action",
          "instead", "evidence", "text")  # fmt: skip
"""Keys of every message. In an ``end`` message ``diagnosis`` is the last one, and what does not apply is null."""
TEXT_LIMIT = 1900
"""Most characters of ``text``; Discord refuses more than 2000."""
WAITING = 50
"""Most messages that wait for a receiver that hangs; later ones are dropped."""


@dataclass(frozen=True)
class Notify:
    """Where to send what was found in a run, and which of it.

    Args:
        webhook: address that gets each message as a JSON body by POST. ``$NAME`` takes it from the environment variable
            NAME, so that no configuration that is saved holds a secret.
        command: command that gets each message as JSON on its standard input, and the main fields as environment
            variables (``LIT_GRPO_DIAGNOSIS`` ...); a list of arguments, or text that is split as a shell does it.
        severity: least severity that is told.
        on_end: whether the end of the run is told too: finished, stopped, or broken off by an exception.
        body: the webhook's JSON body in the place of all fields: texts with fields in braces, such as
            ``{content: "{text}"}`` for Discord.
        timeout: seconds that one message may take, and that the end of a run waits for the last ones.

    Raises:
        UserError: neither webhook nor command, an address that is none, or a field that there is not.
    """

    webhook: str | None = None
    command: str | list[str] | None = None
    severity: Severity = "critical"
    on_end: bool = False
    body: dict[str, str] | None = None
    timeout: float = 10.0

    def __post_init__(self) -> None:
        where = "HealthMonitor.notify"
        if not self.webhook and not self.arguments():
            raise UserError("neither a webhook nor a command is given", where=where, remedy="give one, or leave it out")
        if self.webhook and not self.webhook.startswith("$"):
            _checked_address(self.webhook, f"{where}.webhook")
        if self.severity not in SEVERITIES:
            raise UserError(
                f"{self.severity!r} is no severity",
                where=f"{where}.severity",
                remedy=f"choose one of {', '.join(SEVERITIES)}",
            )
        if not self.timeout > 0:
            raise UserError(f"timeout is {self.timeout}, must be above 0", where=f"{where}.timeout")
        for text in (self.body or {}).values():
            try:
                unknown = next((name for _, name, *_ in Formatter().parse(text) if name not in (None, *FIELDS)), None)
            except ValueError as error:
                raise UserError(f"{text!r}: {error}", where=f"{where}.body") from None
            if unknown is not None:
                raise UserError(
                    f"{{{unknown}}} is no field of a message",
                    where=f"{where}.body",
                    remedy=f"choose from {', '.join(FIELDS)}",
                )

    def arguments(self) -> list[str]:
        """Return the command as a list of arguments; empty without one.

        Raises:
            UserError: the text is no command.
        """
        if not isinstance(self.command, str):
            return list(self.command or [])
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise UserError(f"the command cannot be split: {error}", where="HealthMonitor.notify.command") from None

    def tells(self, severity: Severity) -> bool:
        """Tell whether a diagnosis of this severity is to be sent."""
        return SEVERITIES.index(severity) >= SEVERITIES.index(self.severity)

    def address(self) -> str | None:
        """Return the webhook's address, from the environment if it is kept there.

        Raises:
            UserError: the environment variable is not set, or holds no address.
        """
        if self.webhook is None or not self.webhook.startswith("$"):
            return self.webhook
        name, where = self.webhook[1:].strip("{}"), "HealthMonitor.notify.webhook"
        address = os.environ.get(name)
        if not address:
            raise UserError(
                f"the environment variable {name} is not set", where=where, remedy=f"export {name}=https://…"
            )
        _checked_address(address, f"{where} (${name})")
        return address


def _checked_address(address: str, where: str) -> None:
    try:
        parts = urllib.parse.urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        good = False
    if not good:
        # The address itself is not shown: the path of a webhook is its password.
        raise UserError(
            "the webhook is no http or https address", where=where, remedy="give https://host/path, or $NAME"
        )


def diagnosis_message(run: str, folder: str, diagnosis: Diagnosis, action: str, instead: str) -> dict[str, Any]:
    """Return the message about a diagnosis, of plain types."""
    plain = diagnosis.to_dict()
    remedy = f" What to do: {diagnosis.remedies[0]}." if diagnosis.remedies else ""
    done = f"{action} ({instead})" if instead else action
    return {
        "event": "diagnosis",
        "run": run,
        "folder": folder,
        **{key: plain[key] for key in ("diagnosis", "severity", "step", "onset", "explanation", "remedies")},
        "action": action,
        "instead": instead or None,
        "evidence": [
            {"monitor": found["monitor"], "finding": found["kind"], "onset": found["onset"], **evidence}
            for found in plain["findings"]
            for evidence in found["evidence"]
        ],
        "text": f"{run}: {diagnosis.severity} at step {diagnosis.step}: {diagnosis.name}. {diagnosis.explanation}. "
        f"Action: {done}.{remedy}"[:TEXT_LIMIT],
    }


def end_message(run: str, folder: str, step: int, how: str, diagnosis: str | None) -> dict[str, Any]:
    """Return the message about the end of a run, ``how`` in words."""
    known = {"event": "end", "run": run, "folder": folder, "diagnosis": diagnosis, "step": step, "explanation": how}
    return {**dict.fromkeys(FIELDS), **known, "text": f"{run}: {how}, at step {step}."[:TEXT_LIMIT]}


class Notifier:
    """Sends messages as a :class:`Notify` says. What goes wrong is logged once for each receiver, and never raised.

    Raises:
        UserError: the webhook's address is to come from an environment variable that is not set.
    """

    def __init__(self, settings: Notify) -> None:
        self.settings = settings
        self._receivers: list[_Receiver] = []
        if (address := settings.address()) is not None:
            self._receivers.append(_Webhook(address, settings.body, settings.timeout))
        if arguments := settings.arguments():
            self._receivers.append(_Command(arguments, settings.timeout))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, without waiting for it."""
        for receiver in self._receivers:
            receiver.send(message)

    def close(self) -> None:
        """Wait for messages that are under way, at most ``timeout`` seconds in all."""
        deadline = time.monotonic() + self.settings.timeout
        for receiver in self._receivers:
            receiver.wait(deadline)


class _Receiver(ABC):
    """One receiver of messages with its own thread, so that one that hangs holds up nothing but itself."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self._messages: queue.Queue[Mapping[str, Any]] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._complained = False

    @abstractmethod
    def deliver(self, message: Mapping[str, Any]) -> None:
        """Send one message, within the time limit, or raise."""

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._complain("it hangs, and too many messages wait for it")
            return
        if self._thread is None:
            # A daemon: the program must be able to end while a server does not answer.
            self._thread = threading.Thread(target=self._work, name=f"notify {self.name}", daemon=True)
            self._thread.start()

    def wait(self, deadline: float) -> None:
        done = self._messages.all_tasks_done
        with done:
            if not done.wait_for(lambda: not self._messages.unfinished_tasks, max(0.0, deadline - time.monotonic())):
                self._complain("it did not take the last message in time")

    def _work(self) -> None:
        while True:
            message = self._messages.get()
            try:
                self.deliver(message)
            # A run must not be lost for want of a message, whatever a server or a command does.
            except Exception as error:
                self._complain(_described(error))
            finally:
                self._messages.task_done()

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("A notification could not be sent to %s: %s. Further failures are not logged.", self.name, why)


class _Webhook(_Receiver):
    def __init__(self, address: str, body: Mapping[str, str] | None, timeout: float) -> None:
        parts = urllib.parse.urlsplit(address)
        # Without path and query, which are a webhook's password, and without a user's name.
        port = f":{parts.port}" if parts.port else ""
        super().__init__(f"the webhook at {parts.scheme}://{parts.hostname}{port}", timeout)
        self._address, self._body = address, body

    def deliver(self, message: Mapping[str, Any]) -> None:
        body = message if self._body is None else {k: text.format_map(message) for k, text in self._body.items()}
        request = urllib.request.Request(
            self._address,
            json.dumps(body, allow_nan=False).encode(),
            {"Content-Type": "application/json", "User-Agent": "lit-grpo"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=self.timeout):
            pass


class _Command(_Receiver):
    def __init__(self, arguments: list[str], timeout: float) -> None:
        self._arguments = arguments
        # Arguments may be secrets.
        super().__init__(f"the command {Path(self._arguments[0]).name}", timeout)

    def deliver(self, message: Mapping[str, Any]) -> None:
        told = ("event", "run", "folder", "diagnosis", "severity", "step", "onset", "action", "text")
        variables = {f"LIT_GRPO_{key.upper()}": "" if message[key] is None else str(message[key]) for key in told}
        process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(message, allow_nan=False).encode(), timeout=self.timeout)
        except subprocess.TimeoutExpired:
            # With all that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            raise _FailedCommandError(f"exit code {process.returncode}")


class _FailedCommandError(Exception):
    """A command that ended with another exit code than 0."""


def _described(error: Exception) -> str:
    """Say what went wrong without anything that may hold an address, an argument or an answer."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _described(error.reason)
    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
        return "it took longer than the time limit"
    if isinstance(error, _FailedCommandError):
        return str(error)
    detail = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {detail}" if detail else type(error).__name__
