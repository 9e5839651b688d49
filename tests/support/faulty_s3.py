"""A stand-in before an S3 server that does what storage does on a bad day: throttles, cuts, changes, and lists late."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

THROTTLED = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True)
class Request:
    """What is asked: a method, a path with its bucket, and whether it is a listing."""

    method: str
    path: str
    lists: bool


# What becomes of a request: "" (nothing odd), "throttle", "cut" (half of it, and the connection is closed), "flip" (a
# bit of what is sent or answered is another), "late" (the first answer that this listing ever had).
Fault = Callable[[Request], str]


@dataclass
class Faulty:
    """A server of which each test says what it does.

    Attributes:
        endpoint: its URL.
        fault: asked for every request.
        met: what became of those that something odd was done to, in order.
    """

    endpoint: str
    fault: Fault = lambda request: ""
    met: list[tuple[str, Request]] = field(default_factory=list)
    listings: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)

    def times(self, kind: str, count: int, method: str, ending: str = "") -> None:
        """Do something to the first so many requests of a method whose path ends so."""
        left = [count]
        lock = threading.Lock()

        def fault(request: Request) -> str:
            with lock:
                if left[0] and request.method == method and request.path.endswith(ending) and not request.lists:
                    left[0] -= 1
                    return kind
                return ""

        self.fault = fault


@contextmanager
def before(endpoint: str) -> Iterator[Faulty]:
    """A stand-in on a free port of this machine."""
    upstream = urlsplit(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            asked = parse_qs(parts.query, keep_blank_values=True)
            request = Request(self.command, parts.path, self.command == "GET" and "list-type" in asked)
            kind = faulty.fault(request)
            if kind:
                faulty.met.append((kind, request))
            if kind == "throttle":
                return self.answer(503, {"Content-Type": "application/xml"}, THROTTLED)
            if kind == "flip" and body:
                body = body[:-1] + bytes([body[-1] ^ 1])
            if kind == "cut" and request.method == "PUT":
                self.close_connection = True
                self.connection.close()
                return None
            answer = self.forward(body)
            if request.lists:
                first = faulty.listings.setdefault(self.path.split("&continuation", 1)[0], answer)
                answer = first if kind == "late" else answer
            status, headers, content = answer
            if kind == "flip" and request.method == "GET" and content:
                content = content[:-1] + bytes([content[-1] ^ 1])
            self.answer(status, headers, content, cut=kind == "cut")
            return None

        def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port or 80, timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                connection.request(self.command, self.path, body=body, headers=headers)
                response = connection.getresponse()
                content = response.read()
                kept = {
                    name: value
                    for name, value in response.getheaders()
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server")
                }
                return response.status, kept, content
            finally:
                connection.close()

        def answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    faulty = Faulty(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield faulty
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
