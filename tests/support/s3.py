"""An S3 server of our own: moto behind a socket, in a process of its own, with a log of what it was asked.

The socket is opened first and served later, so that processes that live longer than a test (the shared Ray) can be told
the address before there is a server.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Made up, and looked for in every file that a run writes.
KEY = "AKIAFINRAYTESTS00001"
SECRET = "tests-secret-2f8b1c0e9d7a4b6f"
REGION = "us-east-1"

# Ends with whoever started it, however that ended.
_SERVE = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
app = DomainDispatcherApplication(create_backend_app)
servers = [make_server("127.0.0.1", 0, app, threaded=True, fd=int(fd)) for fd in sys.argv[1:]]
for server in servers[1:]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
servers[0].serve_forever()
"""


def reserve() -> socket.socket:
    """A socket that listens on a free port; whoever connects waits until it is served."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def environment(listening: socket.socket) -> dict[str, str]:
    """What a user sets to reach the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*listening.getsockname()),
        # Without credentials, do not ask a metadata service that is not there.
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass
class Server:
    """A running server.

    Attributes:
        endpoint: URL of the server.
        log: what it was asked, a line a request.
    """

    endpoint: str
    log: Path
    _made: int = 0

    def bucket(self) -> Bucket:
        """A new bucket."""
        self._made += 1
        return Bucket(f"finray-tests-{self._made}", self)


class Bucket:
    """One bucket, as its owner sees it: by a client that finray does not use."""

    def __init__(self, name: str, server: Server) -> None:
        import boto3

        self.name = name
        self._server = server
        self._client: Any = boto3.client(
            "s3", endpoint_url=server.endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION
        )
        self._client.create_bucket(Bucket=name)

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, content: bytes) -> str:
        self._client.put_object(Bucket=self.name, Key=key, Body=content)
        return self.url(key)

    def upload(self, path: Path, key: str) -> str:
        """A file, or all files of a directory under their relative names."""
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                self.put(key if path.is_file() else f"{key}/{file.relative_to(path).as_posix()}", file.read_bytes())
        return self.url(key)

    def get(self, key: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def content(self, prefix: str = "") -> dict[str, bytes]:
        """Key, from the prefix on, to content."""
        return {key[len(prefix) :]: self.get(key) for key in self.keys(prefix)}

    def mark(self) -> int:
        """A position in the server's log, for :meth:`asked`."""
        return self._server.log.stat().st_size

    def asked(self, method: str, since: int = 0) -> list[str]:
        """Keys of this bucket that a method was used on, in order."""
        start = f'"{method} /{self.name}/'
        lines = self._server.log.read_bytes()[since:].decode(errors="replace").splitlines()
        keys = [line.split(start, 1)[1].split(" ", 1)[0] for line in lines if start in line]
        return [key.split("?", 1)[0] for key in keys]


@contextmanager
def serve(listening: socket.socket, log: Path, *others: socket.socket) -> Iterator[Server]:
    """Serve the socket, and others beside it, which may be in another network."""
    port = listening.getsockname()[1]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *(str(one.fileno()) for one in (listening, *others))],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            pass_fds=[one.fileno() for one in (listening, *others)],
            env={name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_"))},
        )
        try:
            _wait(port, process, log)
            yield Server(f"http://127.0.0.1:{port}", log)
        finally:
            process.kill()
            process.communicate()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    from urllib.request import urlopen

    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        try:
            with urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the S3 server does not answer")
