"""Storage that says nothing is given up soon, and named; storage that is only slow is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from finray.checkpoint.objects import Objects
from finray.checkpoint.rundir import check_output
from finray.config.load import build_config
from finray.data import storage
from finray.errors import DataUnavailable, StorageError
from finray.pretrained import hub, remote


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, without which nothing would be asked."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setattr(hub, "_silent", {})


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that accepts and says nothing."""
    monkeypatch.setattr(remote, "FIRST_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def server(content: bytes, pauses: list[float] | None) -> Iterator[str]:
    """Answers what it has at once; the content byte by byte after these pauses, or never."""
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            for name, value in {
                "Content-Length": str(len(content)),
                "ETag": '"0123"',
                "Last-Modified": "Fri, 26 Jul 2024 00:00:00 GMT",
            }.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            if pauses is None:
                gone.wait(60)
                return
            self.do_HEAD()
            for byte, pause in zip(content, pauses, strict=True):
                gone.wait(pause)
                self.wfile.write(bytes([byte]))

        def log_message(self, *arguments: object) -> None:
            pass

    one = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{one.server_address[1]}"
    finally:
        gone.set()
        one.shutdown()
        one.server_close()
        thread.join()


def test_a_run_behind_a_mute_server_does_not_start(mute: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", mute)
    plain = {
        "run": {"output_dir": "s3://bucket/runs", "local_dir": str(tmp_path)},
        "model": {"name": "m"},
        "data": {"source": "d.jsonl"},
    }
    with pytest.raises(StorageError, match=rf"the storage gave no answer within 0\.3 s: {mute}") as caught:
        check_output(build_config(plain, source="test"))
    assert caught.value.where == "s3://bucket/runs"


def test_storage_that_answered_is_not_asked_again_and_a_run_that_goes_on_does_not_ask(
    mute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(remote, "_answered", set())
    monkeypatch.setattr(hub, "unreachable", lambda url, within_s: asked.append(url))
    monkeypatch.setenv("AWS_ENDPOINT_URL", mute)
    Objects("s3://bucket/runs", patient=True)
    assert asked == []
    for name in ("a", "b"):
        Objects("s3://bucket/runs")
        storage.filesystem("s3://bucket/rows.jsonl")
        # All files of a server have one answer.
        storage.find(f"{mute}/{name}.jsonl")
    assert asked == [f"{mute}/"]


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_server_that_says_what_it_has_and_then_nothing_is_given_up(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "READ_S", 0.3)
    monkeypatch.setattr(remote, "WEB_READ_S", 0.3)
    with server(b"text", pauses=None) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        name = f"{endpoint}/rows.jsonl" if scheme == "http" else "s3://bucket/rows.jsonl"
        with (
            pytest.raises(DataUnavailable, match="the storage cannot be reached") as caught,
            storage.opened(name) as stream,
        ):
            stream.read()
    assert caught.value.where == name
    if scheme == "s3":
        assert "no answer within 0.3 s, twice" in caught.value.message, "it was tried for longer"


def test_a_slow_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for one silence, and the whole has none."""
    monkeypatch.setattr(remote, "WEB_READ_S", 30.0)
    (arguments,) = remote.options("https").values()
    assert arguments["timeout"].total is None
    with server(b"text", pauses=[0.05] * 4) as endpoint, storage.opened(f"{endpoint}/rows.jsonl") as stream:
        assert stream.read() == b"text"
