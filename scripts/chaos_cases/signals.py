"""Runs that hang, and the signals that are to end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.chaos_cases import hangs

ROOT = Path(__file__).resolve().parents[2]
ENDINGS: dict[str, tuple[int, ...]] = {
    "SIGTERM": (signal.SIGTERM,),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "Ctrl-C twice": (signal.SIGINT, signal.SIGINT),
    "Ctrl-C four times": (signal.SIGINT,) * 4,
}
PATIENCE = 240.0


class Ended(NamedTuple):
    """How a run that hung has ended."""

    hung: bool
    """True if it came to hang at all."""
    seconds: float
    """From the signal that ends it (SIGTERM, the second Ctrl-C) to the end of the process."""
    code: int | None
    saved: bool
    """True if there is a checkpoint of the two rollouts that it had trained on."""
    words: str
    """Last line on standard error."""


def silent_server() -> tuple[socket.socket, str]:
    """Return a server that takes connections and never answers, and the judge's URL."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    return server, f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def run_and_signal(config: dict[str, Any], signals: tuple[int, ...], folder: Path, patience: float = 60.0) -> Ended:
    """Start a run, wait until it hangs, send it signals 0.3 s apart, and wait for its end."""
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lit_grpo.cli.main", "fit", "--config", "run.yaml"]
    with (folder / "err").open("wb") as err, (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        hung = _hangs(process, folder)
        began = time.monotonic()
        for i, number in enumerate(signals):
            if i:
                time.sleep(0.3)
            if i == 1 and number == signal.SIGINT:
                began = time.monotonic()
            process.send_signal(number)
        code: int | None
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    words = [line for line in (folder / "err").read_text(errors="replace").splitlines() if line.strip()]
    saved = (folder / "checkpoints" / "rollout-000002.ckpt").exists()
    return Ended(hung, seconds, code, saved, words[-1] if words else "")


def _hangs(process: subprocess.Popen[bytes], folder: Path) -> bool:
    end = time.monotonic() + PATIENCE
    # The judge's server cannot say that it is asked; the run is up when two rollouts are told of.
    while process.poll() is None and time.monotonic() < end:
        if (folder / hangs.HANGING).exists():
            time.sleep(0.5)
            return process.poll() is None
        time.sleep(0.05)
    return False


def serve_silently(folder: Path, server: socket.socket) -> None:
    """Take connections, say so with the file of what hangs, and never answer."""
    kept = []

    def accept() -> None:
        while True:
            try:
                kept.append(server.accept()[0])
            except OSError:
                return
            (folder / hangs.HANGING).touch()

    threading.Thread(target=accept, daemon=True).start()


def attack(what: str, ending: str, patience: float = 60.0) -> Ended:
    """Let a run hang in one way, and end it in one way."""
    server, url = silent_server()
    with server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serve_silently(folder, server)
        return run_and_signal(hangs.runs(url)[what], ENDINGS[ending], folder, patience)
