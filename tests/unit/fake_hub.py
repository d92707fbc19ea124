"""A model hub in this process: the few routes that a download uses, and files that may arrive damaged."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "5f" * 20


class FakeHub:
    """The few routes of a hub that a download uses. `files` is what it lists, `sent` what it really sends."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.sent = dict(files)
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = handler.path.partition("?")[0]
        self.asked.append(path)
        if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "blobId": git_id(data),
                    **self.lfs(name, data, "sha256"),
                }
                for name, data in self.files.items()
            ]
            self.send_json(handler, {"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": git_id(data),
                    **self.lfs(name, data, "oid"),
                }
                for name, data in self.files.items()
            ]
            self.send_json(handler, entries)
        elif path.startswith("/org/tiny/resolve/") and (name := path.split("/", 5)[5]) in self.files:
            data = self.files[name]
            etag = hashlib.sha256(data).hexdigest() if self.lfs(name, data, "oid") else git_id(data)
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data))}
            self.send(handler, 200, self.sent[name], headers, body)
        else:
            self.send(handler, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def lfs(self, name: str, data: bytes, key: str) -> dict[str, Any]:
        if not name.endswith((".gguf", ".safetensors")):
            return {}
        return {"lfs": {key: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}

    def send_json(self, handler: BaseHTTPRequestHandler, value: Any) -> None:
        self.send(handler, 200, json.dumps(value).encode(), {"Content-Type": "application/json"}, True)

    def send(
        self, handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], body: bool
    ) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    def fetched(self) -> set[str]:
        return {path.split("/", 5)[5] for path in self.asked if "/resolve/" in path}


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
