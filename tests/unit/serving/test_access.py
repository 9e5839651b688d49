"""Whose requests are answered: by key, or without one by the names in Host and Origin. The web application alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from finray.errors import ConfigError
from finray.serving.access import Access
from finray.serving.models import ServeSettings
from finray.serving.server import ApiServer, App

KEY = "a key of this test's"
REFUSALS = ("invalid_api_key", "host_not_allowed", "origin_not_allowed")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[dict[str, ApiServer]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINRAY_TEST_KEY", KEY)
        named: dict[str, Any] = {"dtype": "fp32", "name": "mine"}
        yield {
            "open": ApiServer(ServeSettings(str(tiny_model_dir), **named), lambda line: None),
            "key": ApiServer(ServeSettings(str(tiny_model_dir), key_env="FINRAY_TEST_KEY", **named), lambda line: None),
        }


def answered(app: App, headers: dict[str, str]) -> set[str]:
    """The paths of the application that answer a request with these headers, however they do."""
    found, client = set(), TestClient(app, base_url="http://127.0.0.1:8000")
    asked = [(route.path, method) for route in app.routes for method in route.methods or ()]
    asked += [("/", "GET"), ("/docs", "GET"), ("/v1", "OPTIONS"), ("/v1/chat/completions", "OPTIONS")]
    for path, method in asked:
        answer = client.request(method, path.replace("{name:path}", "mine"), headers=headers)
        assert not answer.is_redirect
        # An answer to HEAD has no body.
        is_told = method == "HEAD" or any(code in answer.text for code in REFUSALS)
        if not (answer.status_code in (401, 403) and is_told):
            found.add(path)
    return found


def test_every_path_of_the_application_goes_through_the_check(servers: dict[str, ApiServer]) -> None:
    opened, keyed = servers["open"].app(), servers["key"].app()
    assert len(opened.routes) > 10
    assert answered(opened, {"host": "evil.example"}) == set()
    assert answered(opened, {"origin": "http://evil.example"}) == set()
    assert answered(opened, {"sec-fetch-site": "cross-site"}) == set()
    # Without the key, those who watch over the process are told no more than how it is.
    assert answered(keyed, {}) == {"/health", "/ready"}
    everything = {route.path for route in opened.routes} | {"/", "/docs", "/v1", "/v1/chat/completions"}
    # The negative controls: whoever may ask is answered everywhere, and an application without the check is seen.
    assert answered(opened, {}) == everything
    assert answered(keyed, {"authorization": f"Bearer {KEY}", "host": "any.example"}) == everything
    opened._refusal = lambda request: None  # type: ignore[method-assign]
    assert answered(opened, {"host": "evil.example"}) == everything
    with pytest.raises(WebSocketDisconnect), TestClient(opened).websocket_connect("/v1/models"):
        pass


def is_answered(host: str | None, *, listens: str = "127.0.0.1", names: tuple[str, ...] = (), **more: str) -> bool:
    sent = [(b"host", host.encode("latin-1"))] if host is not None else []
    sent += [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    return Access(None, host=listens, names=names).refusal(Headers(raw=sent), needs_key=True) is None


OURS: list[str | None] = ["localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:9"]
OURS += ["[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]:80", "127.0.0.2"]
FOREIGN: list[str | None] = [None, "", ":8000", "evil.example", "evil.example:8000", "localhost.evil.example", ".."]
FOREIGN += ["evil.example.localhost", "notlocalhost", "localhost@evil.example", "localhost/x", "127.0.0.1.nip.io"]
FOREIGN += ["192.168.1.4", "8.8.8.8:80", "[2001:db8::1]", "0.0.0.0", "[::]", "127.1", "0x7f000001", "2130706433"]
FOREIGN += ["localhost:80:80", "localhost:x", "[::1", "::1", "[127.0.0.1]", "localhost, evil.example"]
FOREIGN += ["localhost evil", "l\xf6calhost"]


@pytest.mark.parametrize(("host", "is_ours"), [*((one, True) for one in OURS), *((one, False) for one in FOREIGN)])
def test_without_a_key_the_host_must_be_a_name_of_this_machine(host: str | None, is_ours: bool) -> None:
    assert is_answered(host) is is_ours


@pytest.mark.parametrize(
    ("listens", "names", "host", "is_ours"),
    [
        ("192.168.1.4", (), "192.168.1.4:8000", True),
        ("192.168.1.4", (), "localhost", True),
        ("192.168.1.4", (), "192.168.1.5", False),
        ("gpu.example", (), "GPU.example.:8000", True),
        ("gpu.example", (), "cpu.example", False),
        # A bare address cannot be pointed elsewhere, and which ones this machine has is not known.
        ("0.0.0.0", (), "172.17.0.2:80", True),
        ("::", (), "[fe80::1%25eth0]:80", True),
        ("::1", (), "[::1]:80", True),
        ("0.0.0.0", (), "evil.example", False),
        ("0.0.0.0", ("models.example",), "models.example", True),
        ("127.0.0.1", ("Models.example.",), "models.EXAMPLE:443", True),
        ("127.0.0.1", ("models.example",), "evil.models.example", False),
    ],
)
def test_further_names_are_those_of_the_address_and_those_that_were_given(
    listens: str, names: tuple[str, ...], host: str, is_ours: bool
) -> None:
    assert is_answered(host, listens=listens, names=names) is is_ours


@pytest.mark.parametrize(
    ("more", "is_ours"),
    [
        ({"origin": "http://localhost:3000"}, True),
        ({"origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"}, True),
        ({"origin": "https://models.example"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"origin": "http://evil.example:8000"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": "file://"}, False),
        ({"origin": "chrome-extension://localhost"}, False),
        # Pages of a bare address are foreign too, wherever the server listens.
        ({"origin": "http://6.6.6.6", "listens": "0.0.0.0"}, False),
        ({"origin": "http://localhost:3000", "sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "Cross-Site"}, False),
    ],
)
def test_pages_of_other_sites_are_refused(more: dict[str, Any], is_ours: bool) -> None:
    assert is_answered("localhost:8000", names=("models.example",), **more) is is_ours


def test_a_probe_that_names_no_host_is_told_how_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(None, host="10.0.0.5")
    assert access.refusal(Headers(), needs_key=False) is None
    for sent in ({"origin": "http://evil.example"}, {"host": "evil.example"}, {"host": ""}):
        assert access.refusal(Headers(sent), needs_key=False) is not None
    assert access.refusal(Headers(), needs_key=True) is not None
    monkeypatch.setattr("socket.getfqdn", lambda: "GPU7.lab.example")
    assert is_answered("gpu7.lab.example:8000", listens="0.0.0.0")


def test_two_hosts_are_none() -> None:
    sent = [(b"host", b"localhost"), (b"host", b"evil.example")]
    refused = Access(None, host="127.0.0.1").refusal(Headers(raw=sent), needs_key=True)
    assert refused is not None
    assert (refused.status, refused.code) == (403, "host_not_allowed")
    assert "--allow-host NAME" in refused.message


@pytest.mark.parametrize("name", ["http://models.example", "a b", "models.example/x", "*", ""])
def test_what_is_no_name_of_a_host_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a host"):
        Access(None, host="127.0.0.1", names=(name,))


def test_a_host_that_is_no_host_does_not_make_the_server_fail(servers: dict[str, ApiServer]) -> None:
    client = TestClient(servers["key"].app(), base_url="http://127.0.0.1")
    for path in ("/v1/nowhere", "/v1/models/", "/health/"):
        answer = client.get(path, headers={"authorization": f"Bearer {KEY}", "host": "["}, follow_redirects=False)
        assert answer.status_code == 404, answer.text
