"""A Hub that does not answer is asked once, for a short time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from finray.config.schema import ModelConfig
from finray.errors import DataError, ModelError
from finray.pretrained import hub, remote
from finray.pretrained.tokenizers import load_tokenizer
from tests.support import ports


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has it; the suite itself is offline."""
    import datasets.config

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
        # So that what is set meanwhile is taken away.
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_refusals", [])
    monkeypatch.setattr(hub, "_silent", {})
    monkeypatch.setattr(remote, "FIRST_S", 0.5)
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.5)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield endpoint


def test_a_hub_that_says_nothing_is_given_up_once_and_for_all(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.refusal() == f"the Hub was tried at {silent}: no answer within 0.5 s"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert huggingface_hub.constants.is_offline_mode()
    monkeypatch.setattr(hub, "unreachable", lambda url, within_s: pytest.fail("it was asked again"))
    assert hub.refusal() is not None


def test_a_timeout_of_the_socket_says_the_same(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two limits is met first."""
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: join(self))
    assert hub.refusal() == f"the Hub was tried at {silent}: no answer within 0.5 s"


def test_a_model_that_is_on_a_hub_that_does_not_answer_is_one_error(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nobody/nothings").mkdir(parents=True)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelConfig(name="nobody/nothing"))
    assert "did you mean `nobody/nothings`" in str(caught.value.repair)
    assert caught.value.message == "the tokenizer is not in the local cache, and the Hub cannot be reached"
    assert f"tried at {silent}" in str(caught.value.repair)
    assert "--offline" in str(caught.value.repair)


def test_so_is_a_data_set(silent: str) -> None:
    from finray.data.sources.hub import load
    from finray.data.sources.resolve import Source

    with pytest.raises(DataError, match=r"(?s)the Hub cannot be reached.*tried at"):
        load(Source("nobody/nothing", split="train"))


def test_the_reason_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.reserved() as port:
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert hub.refusal() == f"the Hub was tried at {endpoint}: connection refused"


@pytest.mark.parametrize("status", [200, 404, 503])
def test_whatever_answers_is_there(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(hub, "TIMEOUT_S", 30.0)
        assert hub.refusal() is None
    assert not huggingface_hub.constants.is_offline_mode()


def test_nobody_is_asked_where_the_user_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "unreachable", lambda url, within_s: pytest.fail("it was asked"))
    assert hub.refusal() is None


def test_a_model_without_a_tokenizer_is_told_what_is_missing(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    with pytest.raises(
        ModelError, match=r"cannot be loaded: there is no file of a tokenizer, such as `tokenizer.json`"
    ):
        load_tokenizer(ModelConfig(name=str(tmp_path)))


def test_a_silent_server_is_asked_once_in_a_while(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited, join = [1000.0], list[float | None](), threading.Thread.join
    monkeypatch.setattr(hub.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: (waited.append(timeout), join(self))[1])
    assert hub.unreachable(silent, 0.3) == "no answer within 0.3 s"
    assert hub.unreachable(silent, 0.5) == "no answer within 0.3 s"
    now[0] += 10
    assert hub.unreachable(silent, 0.5) == "no answer within 0.5 s"
    assert waited == [0.3, 0.5]


def test_the_hub_is_asked_for_a_shorter_time_after_a_silent_storage(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float]()
    monkeypatch.setattr(hub, "unreachable", lambda url, within_s: asked.append(within_s))
    monkeypatch.setattr(hub, "TIMEOUT_S", 6.0)
    now = time.monotonic()
    for silences, limit in (
        ({}, 6.0),
        ({"a": (now, 7.0)}, 1.0),
        ({"a": (now, 5.0)}, 3.0),
        ({"a": (now - 10, 7.0)}, 6.0),
    ):
        monkeypatch.setattr(hub, "_silent", silences)
        monkeypatch.setattr(hub, "_refusals", [])
        assert hub.refusal() is None
        assert asked.pop() == limit


def test_a_server_that_speaks_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        assert hub.unreachable(f"http://127.0.0.1:{server.getsockname()[1]}", 30.0) is None
        thread.join()
