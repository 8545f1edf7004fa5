"""A stand-in for the Hugging Face hub on this machine: what its client calls to make a repository and fill it.

Large files go by LFS (``HF_HUB_DISABLE_XET=1``): the other way, Xet, is a storage service with a protocol of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standinstandinstandin"
LARGE = (".safetensors", "tokenizer.json")
"""Files that go the way of large ones."""


class Hub:
    """What was sent to the stand-in.

    Attributes:
        url: its address.
        repositories: whether each repository that was made is private, by name.
        files: content of each file by ``repository/path``.
        messages: messages of the commits.
        refuse: status that commits are answered with; 0: they are taken.
    """

    def __init__(self) -> None:
        self.url, self.refuse = "", 0
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.objects: dict[str, bytes] = {}

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Answer one request: the status and what JSON is made of."""
        if path.startswith("/object/") and method == "PUT":
            assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            made = json.loads(body)
            owner = made.get("organization") or "me"
            if owner == "others":
                return 403, {"error": "You don't have the rights to create a model under the namespace others"}
            name = f"{owner}/{made['name']}"
            self.repositories.setdefault(name, made.get("visibility") == "private" or bool(made.get("private")))
            return 200, {"url": f"{self.url}/{name}", "id": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = {one["path"]: "lfs" if one["path"].endswith(LARGE) else "regular" for one in asked}
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if path.endswith(".git/info/lfs/objects/batch"):
            given = json.loads(body)["objects"]
            href = f"{self.url}/object/"
            return 200, {
                "transfer": "basic",
                "objects": [{**one, "actions": {"upload": {"href": href + one["oid"]}}} for one in given],
            }
        if "/commit/" in path:
            return self._commit(path, body)
        if method == "GET":
            return 404, {"error": "Repository not found"}
        return 501, {"error": f"the stand-in does not know {method} {path}"}

    def _commit(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.refuse:
            return self.refuse, {"error": "the disk of the hub is full"}
        name = path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.messages.append(value["summary"])
            elif entry["key"] == "file":
                self.files[f"{name}/{value['path']}"] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[f"{name}/{value['path']}"] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True}


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """Run the stand-in on a free port of the loopback address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self._chunks()
            token = self.headers.get("Authorization", "")
            status, value = hub.answer(self.command, self.path.partition("?")[0], token, body)
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if status >= 400:
                self.send_header("X-Error-Message", value["error"])
            self.end_headers()
            self.wfile.write(text)

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_HEAD = _any  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
