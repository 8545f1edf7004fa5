"""Headless Chromium by chromedriver's own HTTP protocol, so that no further package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_grpo.utils.ports import free_port
from tests.waiting import PATIENCE, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = (
    ""
    if CHROMIUM and DRIVER
    else os.environ.get("LIT_GRPO_NO_BROWSER")
    or "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"
)
"""Why there is no browser, as ``.ci/run`` or we know it; empty if there is one."""

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """One session; ``width`` by ``height`` points, as a phone of two dots a point if ``phone``."""

    def __init__(self, port: int, profile: Path, width: int, height: int, phone: bool) -> None:
        self.base = f"http://127.0.0.1:{port}"
        options: dict[str, Any] = {
            "binary": CHROMIUM,
            "args": [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
        }
        if phone:
            metrics = {"width": width, "height": height, "pixelRatio": 2, "mobile": True}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        capabilities = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        started = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self.base += f"/session/{started['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        self.call("POST", "/url", {"url": path.absolute().as_uri()})

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def cdp(self, command: str, **params: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Send ``mouseMoved``, ``mousePressed`` or ``mouseReleased`` at a point of the window."""
        button = "left" if clicks or kind != "mouseMoved" else "none"
        self.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)

    def media(self, media: str = "screen", scheme: str = "light") -> None:
        """Show pages as on this medium, for people who like this colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", media=media, features=features)

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self.call("POST", "/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses that the page asked for; the browser's own and pictures inside the page left out."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("chrome", "data:", "about:"))]

    def screenshot(self, path: Path, whole: bool = False) -> None:
        if whole:
            clip = {**self.cdp("Page.getLayoutMetrics")["cssContentSize"], "scale": 1}
            png = self.cdp("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        else:
            png = self.call("GET", "/screenshot")
        path.write_bytes(base64.b64decode(png))


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900, phone: bool = False) -> Iterator[Browser]:
    """A fresh browser that is gone at the end."""
    assert DRIVER is not None
    port = free_port()
    process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    session = None
    try:
        wait_until(lambda: _listens(port), "the browser's driver listens")
        session = Browser(port, profile, width, height, phone)
        yield session
    finally:
        if session is not None:
            session.call("DELETE", "")
        process.terminate()
        process.wait(PATIENCE)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
