"""A hub on this machine that serves one model folder and misbehaves as asked: for tests of remote conversions.

It speaks the parts of the hub's protocol that are read: the listing of a revision, `resolve` with redirects to another
server (another port) that has the large files, byte ranges.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """A GET that the server saw."""

    server: str  # "hub" or "cdn"
    path: str
    range: tuple[int, int] | None  # begin, end
    headers: dict[str, str]
    number: int  # of the same GETs before, with the same range
    n_before: int  # of all GETs for this path before
    sent: int = 0  # bytes of the body


@dataclass
class Fault:
    """What is wrong with an answer; everything not said is right."""

    status: int | None = None  # instead of the content
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None  # close the connection after so many bytes of the body; -1: before the status line
    at_most: int | None = None  # a shorter range than asked for, and says so
    ignore_range: bool = False
    shift_range: int = 0  # added to the beginning, in the header and the bytes


Faults = Callable[[Request], "Fault | None"]


def no_faults(_: Request) -> Fault | None:
    return None


class Hub:
    """Serves `folder` as the model `model_id`; `url` is the endpoint. Use in a `with` block."""

    def __init__(self, folder: Path, model_id: str = "org/tiny", *, cdn: bool = True, token: str | None = None) -> None:
        self.folder, self.model_id, self.cdn, self.token = folder, model_id, cdn, token
        self.faults: Faults = no_faults
        self.requests: list[Request] = []
        self.n_connections = 0
        self.etag: Callable[[str], str] = lambda name: f'"{self.digest(name)[:32]}"'
        self.listing_extra: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._servers = {name: self._serve(name) for name in ("hub", "cdn")}

    @property
    def url(self) -> str:
        return self.address("hub")

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self._servers[name].server_address[1]}"

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def digest(self, name: str) -> str:
        """Stands for the digest of a file's content, which would take long for a large one."""
        status = (self.folder / name).stat()
        return hashlib.sha256(f"{name} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()

    def listing(self) -> dict[str, Any]:
        files = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        entries = []
        for name in files:
            size = (self.folder / name).stat().st_size
            entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": self.digest(name)[:40]}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": self.digest(name), "size": size, "pointerSize": 134}
            entries.append(entry)
        return {"id": self.model_id, "sha": COMMIT, "siblings": entries} | self.listing_extra

    def payload_requests(self) -> list[Request]:
        return [request for request in self.requests if request.range is not None and request.sent]

    def note(self, server: str, path: str, headers: dict[str, str]) -> Request:
        given = headers.get("range")
        wanted = None
        if given is not None:
            begin, _, last = given.removeprefix("bytes=").partition("-")
            wanted = (int(begin), int(last) + 1 if last else 1 << 62)
        with self._lock:
            before = [request.range for request in self.requests if (request.server, request.path) == (server, path)]
            request = Request(server, path, wanted, headers, before.count(wanted), len(before))
            self.requests.append(request)
        return request

    def _serve(self, name: str) -> ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            owner, server_name = hub, name

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    owner: Hub
    server_name: str

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.owner.n_connections += 1

    def handle(self) -> None:
        with suppress(ConnectionError):  # clients hang up too
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.owner
        path = unquote(urlsplit(self.path).path)
        request = hub.note(self.server_name, path, {key.lower(): value for key, value in self.headers.items()})
        fault = hub.faults(request) or Fault()
        if fault.drop_after == -1:
            self._hang_up()
        elif fault.status is not None:
            self._answer(request, fault.status, b"no", fault.headers, fault)
        elif (
            hub.token is not None and request.headers.get("authorization") != f"Bearer {hub.token}" and not self._cdn()
        ):
            self._answer(request, 401, b"who are you", {}, fault)
        elif path.startswith(f"/api/models/{hub.model_id}/revision/"):
            self._answer(request, 200, json.dumps(hub.listing()).encode(), fault.headers, fault)
        elif path.startswith(prefix := f"/{hub.model_id}/resolve/{COMMIT}/") or self._cdn():
            self._file(request, path.removeprefix(prefix).removeprefix("/"), fault)
        else:
            self._answer(request, 404, b"not here", {}, fault)

    def _may_read(self, request: Request) -> bool:
        token = self.owner.token
        return token is None or self._cdn() or request.headers.get("authorization") == f"Bearer {token}"

    def _cdn(self) -> bool:
        return self.server_name == "cdn"

    def _file(self, request: Request, name: str, fault: Fault) -> None:
        hub = self.owner
        if not (hub.folder / name).is_file():
            return self._answer(request, 404, b"not here", {}, fault)
        if hub.cdn and not self._cdn() and name.endswith(".safetensors"):
            headers = {"Location": f"{hub.address('cdn')}/{name}?signature=secret", "X-Linked-ETag": hub.etag(name)}
            return self._answer(request, 302, b"Found. Redirecting", headers, fault)
        size = (hub.folder / name).stat().st_size
        headers = {"ETag": hub.etag(name), **fault.headers}
        if request.range is None or fault.ignore_range:
            return self._answer(request, 200, self._content(name, 0, size), headers, fault)
        begin, end = request.range
        begin, end = begin + fault.shift_range, min(end, size)
        if begin >= size:
            return self._answer(request, 416, b"beyond", {}, fault)
        if fault.at_most is not None:
            end = min(end, begin + fault.at_most)
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"} | headers
        return self._answer(request, 206, self._content(name, begin, end), headers, fault)

    def _content(self, name: str, begin: int, end: int) -> bytes:
        with (self.owner.folder / name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def _answer(self, request: Request, status: int, body: bytes, headers: dict[str, str], fault: Fault) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        part = body if fault.drop_after is None else body[: fault.drop_after]
        with suppress(OSError):  # the client may have had enough
            self.wfile.write(part)
            request.sent += len(part)
        if fault.drop_after is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
