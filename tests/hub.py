"""A hub on loopback for huggingface-hub: metadata, ranges, errors of single files; it can break off, damage and refuse."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_test"


@dataclass
class Hub:
    """files: by owner/repository/name. gated: repositories that want TOKEN. break_at: bytes after which the next GET ends.
    damaged: send other bytes than the checksum's. requests: (method, file, first byte)."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    break_at: int | None = None
    damaged: bool = False
    requests: list[tuple[str, str, int]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def list_files(self, repo: str) -> None:
        names = [key.removeprefix(f"{repo}/") for key in self.hub.files if key.startswith(f"{repo}/")]
        if not names:
            return self.refuse(401, "RepoNotFound")
        data = json.dumps([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]).encode()
        self.hub.requests.append((self.command, repo, 0))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None

    def answer(self, body: bool) -> None:
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/main", self.path.partition("?")[0])
        if listed is not None:
            return self.list_files(listed[1])
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path.partition("?")[0])
        if found is None:
            return self.refuse(404, "RepoNotFound")
        repo, name = found[1], found[2]
        if not any(key.startswith(repo + "/") for key in self.hub.files):
            return self.refuse(401, "RepoNotFound")
        if repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(403, "GatedRepo")
        data = self.hub.files.get(f"{repo}/{name}")
        if data is None:
            return self.refuse(404, "EntryNotFound")
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        self.hub.requests.append((self.command, f"{repo}/{name}", first))
        self.send_response(206 if wanted and body else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        if wanted and body:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first if body else len(data)))
        self.end_headers()
        if not body:
            return None
        sent = bytes(b ^ 1 for b in data[first:]) if self.hub.damaged else data[first:]
        if self.hub.break_at is not None:
            sent, self.hub.break_at, self.close_connection = sent[: self.hub.break_at], None, True
        self.wfile.write(sent)
        return None


@contextlib.contextmanager
def start_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with these files, by owner/repository/name."""
    hub = Hub(files=files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
