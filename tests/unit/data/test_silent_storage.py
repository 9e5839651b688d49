"""Storage that says nothing is given up soon, and named; storage that is only slow is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from finray.checkpoint.objects import Objects, open_filesystem
from finray.checkpoint.rundir import check_output
from finray.config.load import build_config
from finray.data import storage
from finray.errors import DataError, DataUnavailable, StorageError
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


def test_prepared_data_behind_a_mute_server_are_not_opened(mute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", mute)
    with pytest.raises(DataUnavailable, match=r"the server gave no answer within 0\.3 s") as caught:
        storage.Folder("s3://bucket/prepared")
    assert caught.value.where == mute


def test_the_address_is_also_asked_where_no_variable_names_it(mute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the user's AWS files, or the library's own. Another test may have had an S3 server of its own."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote, "_answered", set())
    asked = list[str]()
    monkeypatch.setattr(remote, "unanswered", lambda url: asked.append(url) or "no answer")
    with pytest.raises(DataError):
        storage.filesystem("s3://bucket/rows.jsonl")
    google = SimpleNamespace(base="https://google/storage/v1/")
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: (google, "bucket/rows.jsonl"))
    with pytest.raises(DataError):
        storage.filesystem("gs://bucket/rows.jsonl")
    with pytest.raises(StorageError):
        open_filesystem("gs://bucket/runs")
    assert asked[0].startswith("https://s3.")
    assert asked[1:] == [google.base] * 2


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
    """The limit is for one silence: the whole takes longer."""
    monkeypatch.setattr(remote, "WEB_READ_S", 3.0)
    with server(b"text", pauses=[0.9] * 4) as endpoint, storage.opened(f"{endpoint}/rows.jsonl") as stream:
        assert stream.read() == b"text"


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), RuntimeError("reset")], ids=["refused", "reset"])
def test_only_storage_that_refuses_is_not_asked_again(error: Exception) -> None:
    with (
        pytest.raises(DataError, match="the storage cannot be reached") as caught,
        storage.storage_errors("s3://b/rows"),
    ):
        raise error
    assert isinstance(caught.value, DataUnavailable) == isinstance(error, RuntimeError)
