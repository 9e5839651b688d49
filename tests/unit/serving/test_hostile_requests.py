"""Whatever a request holds, it is its own 4xx: never a 5xx, and never the failure of another. Without Ray."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from finray.serving import answering, server
from finray.serving.models import ServeSettings
from finray.serving.server import ApiServer
from tests.support import served
from tests.support.examples import examples

HERE = "http://127.0.0.1:8000"
JSON = {"content-type": "application/json"}
ASK: dict[str, Any] = {"model": "one", "prompt": "the cat", "max_tokens": 2, "temperature": 0}
CHAT: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": "the cat"}]}
del CHAT["prompt"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[TestClient]:
    folder = served.save_adapters(tmp_path_factory.mktemp("served"), tokenizer, ("one",))
    settings = ServeSettings(str(folder / "one"), dtype="fp32", slots=4, max_queue=4, adapters_from=(str(folder),))
    app = ApiServer(settings, lambda line: None).app()
    with TestClient(app, base_url=HERE, raise_server_exceptions=False) as client:
        yield client


def refused(client: TestClient, path: str, body: Any, status: tuple[int, ...] = (400,)) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(f"/v1/{path}", content=content, headers=JSON)
    assert answer.status_code in status, answer.text
    assert client.get("/health").json()["waiting"] == 0
    return str(answer.json()["error"]["message"])


# What a field must be, and values that it is not.
FIELDS_OF_BOTH: dict[str, tuple[str, list[Any]]] = {
    "n": ("a whole number from 1 to 64", [0, 65, True, 1.5]),
    "temperature": ("0, or a number from 0.001 to 2", [-1, 0.0001, "hot", [0]]),
    "top_p": ("a number above 0, and at most 1", [0]),
    "top_k": ("a whole number from 0", [-1, 2**31]),
    "max_tokens": ("a whole number from 1 to 2147483647", [0, -5, 10**30]),
    "seed": ("a whole number", ["x"]),
    "stop": ("a text, or a list of up to 16 texts", [[""], ["x" * 257], ["x"] * 100_000, {"a": 1}, [1]]),
    "presence_penalty": ("0, as penalties are not supported", [1]),
    "frequency_penalty": ("0, as penalties are not supported", [-1]),
    "logit_bias": ("left out, as biases are not supported", [{"5": 1.0}]),
    "stream_options": ("an object such as", [{"include_usage": 1}]),
    "user": ("a text", [5]),
    "model": ("the name of a model, as text", [5]),
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_a_field_must_be_is_said_in_words_of_a_user(client: TestClient, path: str) -> None:
    body = CHAT if path.startswith("chat") else ASK
    cases = [(name, one, f"`{name}` must be {what}") for name, (what, odd) in FIELDS_OF_BOTH.items() for one in odd]
    cases += [("stream_options", {"more": 1}, "`stream_options.more` is not supported")]
    cases += [(name, {}, "is not supported") for name in ("guided_json", "a\u0007b" * 50)]
    for name, value, said in cases:
        message = refused(client, path, {**body, name: value})
        assert said in message, (name, value)
        assert "\u0007" not in message
        assert not any(word in message for word in ("Input should", "validation", "pydantic", "max_new_tokens"))


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", {**ASK, "prompt": {"a": 1}}, "`prompt` must be a text, a list of texts, a list of token ids"),
        ("completions", {**ASK, "prompt": ["a", 1]}, "`prompt` must be a text"),
        ("completions", {**ASK, "prompt": [1.5]}, "`prompt` must be a text"),
        ("completions", {**ASK, "prompt": [-1]}, "token ids must be from 0"),
        ("completions", {**ASK, "prompt": [10**400]}, "token ids must be from 0"),
        ("completions", {**ASK, "prompt": [[]]}, "the prompt is empty"),
        ("completions", {**ASK, "prompt": None}, "`prompt` must be a text"),
        ("completions", {"model": "one"}, "`prompt` is missing; it must be a text"),
        ("completions", {**ASK, "echo": True}, "`echo` must be false"),
        ("completions", {**ASK, "best_of": 2}, "`best_of` must be 1"),
        ("completions", {**ASK, "suffix": "x"}, "`suffix` must be left out"),
        ("completions", {**ASK, "logprobs": 6}, "`logprobs` must be a whole number from 0 to 5"),
        ("chat/completions", {**CHAT, "messages": "hi"}, "`messages` must be a list of objects with `role`"),
        ("chat/completions", {**CHAT, "messages": [[]]}, "`messages` must be a list of objects with `role`"),
        ("chat/completions", {**CHAT, "messages": [{}]}, ""),
        ("chat/completions", {**CHAT, "messages": [{"role": 5, "content": "a"}]}, ""),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": {"a": [1]}}]}, ""),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ""),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "a", "tool_calls": 3}]}, ""),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "`tool_choice` must be auto or none"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "`response_format` must be"),
        ("chat/completions", {**CHAT, "logprobs": 5}, "`logprobs` must be true or false"),
        ("adapters", {"name": "x"}, "`path` is missing; it must be the directory"),
        ("adapters", {"name": 5, "path": "x"}, "`name` must be the name that clients will use"),
        ("adapters", {"name": "\u0007" * 500, "path": "x"}, "cannot be the name of a model"),
        ("unload_lora_adapter", {}, "`lora_name` is missing; it must be the name of a model"),
    ],
)
def test_each_path_says_what_its_own_fields_must_be(client: TestClient, path: str, body: Any, said: str) -> None:
    message = refused(client, path, body)
    assert said in message
    assert not any(word in message for word in ("Input should", "valid dictionary", "Error("))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"nul", "not valid JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"5", "the body must be a JSON object"),
        (b"\xff\xfe", "not text in UTF-8"),
        (json.dumps(ASK).encode("utf-16"), "not text in UTF-8"),
        (b"\xef\xbb\xbf" + json.dumps(ASK).encode(), "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"model": "one", "prompt": "a", "temperature": NaN}', "NaN, which is not a finite number"),
        (b'{"model": "one", "prompt": "a", "metadata": {"x": -Infinity}}', "-Infinity, which is not a finite number"),
        (b'{"model": "one", "prompt": "a", "temperature": 1e400}', "1e400, which is not a finite number"),
        (b'{"model": "one", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a whole number of too many digits"),
        (b'{"model": "one", "prompt": "a", "prompt": "b"}', "`prompt` occurs twice"),
        (b'{"model": "one", "prompt": "a", "metadata": {"x": 1, "x": 1}}', "`x` occurs twice"),
        (b'{"model": "one", "prompt": "\\ud800"}', "not valid JSON"),
        (b'{"model": "one", "prompt": "a\x00"}', "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(client: TestClient, body: bytes, said: str) -> None:
    assert said in refused(client, "completions", body)


def test_odd_and_long_names_of_models_are_not_shown_as_they_are(client: TestClient) -> None:
    for name in ("\x1b[2J" * 100, "x" * 500_000, "../../etc", "\u202e", ""):
        message = refused(client, "completions", {**ASK, "model": name}, (404,))
        assert len(message) < 200
        assert message.isprintable()
        assert client.delete(f"/v1/adapters/{quote(name[:100]) or '%00'}").status_code in (403, 404)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_only_json_is_read(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert client.post("/v1/completions", content=json.dumps(ASK), headers=headers).status_code == 415


def test_what_a_library_does_not_expect_is_an_error_of_the_request(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: Any) -> Any:
        raise KeyError("/secret/place")

    monkeypatch.setattr(answering, "messages_of", odd)
    message = refused(client, "chat/completions", CHAT)
    assert message == "this cannot be processed (KeyError); the server's log says where it failed"


SOME = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "wizard", ""])
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "train"]),
    ROLES | SOME,
    max_size=4,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["one", "base", "none"]) | SOME,
    "messages": st.lists(MESSAGE, max_size=3) | SOME,
    "prompt": SOME | st.lists(st.integers(-1, 600), max_size=4),
    "stop": SOME | st.text(max_size=2),
    "tools": st.lists(st.dictionaries(st.sampled_from(["type", "function"]), SOME), max_size=2) | SOME,
    "temperature": st.sampled_from([0, 0.001, 1, 2]) | SOME,
    "logprobs": st.booleans() | st.integers(0, 6) | SOME,
    **{
        name: st.integers(0, 3) | st.booleans() | SOME
        for name in (
            *("n", "seed", "top_k", "top_p", "top_logprobs", "stream", "stream_options", "tool_choice", "echo"),
            *("response_format", "logit_bias", "presence_penalty", "metadata", "user", "suffix", "odd"),
        )
    },
}


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), path=st.sampled_from(["completions", "chat/completions", "adapters", "unload_lora_adapter"]))
def test_no_body_makes_the_server_fail(client: TestClient, data: st.DataObject, path: str) -> None:
    """Any JSON in any field, beside a request that is right, which is answered as always."""
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=4))
    base = {} if data.draw(st.booleans()) and path != "adapters" else (CHAT if path.startswith("chat") else ASK)
    body = {**base, **{name: data.draw(FIELDS[name], label=name) for name in names}}
    if path == "adapters":
        body = {"name": data.draw(st.text(max_size=5) | SOME), "path": data.draw(st.text(max_size=9) | SOME)}
    answer = client.post(f"/v1/{path}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    assert "NaN" not in answer.text
    right = client.post("/v1/completions", json=ASK)
    assert right.status_code == 200
    assert client.get("/health").json()["status"] == "ok"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=40) | SOME.map(lambda one: json.dumps(one).encode()))
def test_no_bytes_make_the_server_fail(client: TestClient, body: bytes) -> None:
    for path in ("completions", "chat/completions", "classify", "adapters", "load_lora_adapter"):
        assert 400 <= client.post(f"/v1/{path}", content=body, headers=JSON).status_code < 500


def test_an_adapter_that_gives_nothing_finite_fails_in_every_form_of_answer_and_alone(
    client: TestClient, tmp_path: Path
) -> None:
    models = client.app._refusal.__self__._models  # type: ignore[attr-defined]
    parts = models.get("one").adapter.parts
    part = next(part for layer, part in parts.items() if layer.endswith("v_proj"))
    before = part.up.clone()
    try:
        part.up.fill_(math.nan)
        for body in ({}, {"temperature": 1}, {"logprobs": 2}, {"n": 2}):
            answer = client.post("/v1/completions", json={**ASK, **body})
            assert answer.status_code == 422
            assert "the model's logits are not finite" in answer.json()["error"]["message"]
            lines = client.post("/v1/completions", json={**ASK, **body, "stream": True}).text.split("\n\n")
            assert "the model's logits are not finite" in lines[0]
            assert lines[1:] == ["data: [DONE]", ""]
            assert client.post("/v1/completions", json={**ASK, "model": "base"}).status_code == 200
    finally:
        part.up.copy_(before)


async def sent(app: Any, body: list[dict[str, Any]], path: str = "/v1/completions") -> tuple[int, bytes]:
    """What an application answers to messages of ASGI, after which the client says nothing more."""
    status, content = 0, bytearray()

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        content.extend(message.get("body", b""))

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return status, bytes(content)


def test_a_body_that_does_not_arrive_is_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_BODY_S", 0.01)
    assert client.portal is not None
    part = {"type": "http.request", "body": b'{"model": ', "more_body": True}
    status, content = client.portal.call(sent, client.app, [part])
    assert (status, b"did not arrive within 0.01 s" in content) == (408, True)
    gone = {"type": "http.disconnect"}
    assert client.portal.call(sent, client.app, [part, gone])[0] == 499


def test_a_client_that_never_reads_its_stream_does_not_hold_the_batch(client: TestClient) -> None:
    has_stopped = asyncio.Event()

    async def stream() -> None:
        body = [{"type": "http.request", "body": json.dumps({**ASK, "max_tokens": 300, "stream": True}).encode()}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                has_stopped.set()
                await asyncio.Event().wait()

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await client.app({**scope, "root_path": "", "asgi": {"spec_version": "2.3"}}, receive, send)

    async def both() -> None:
        task = asyncio.ensure_future(stream())
        await has_stopped.wait()
        assert (await sent(client.app, [{"type": "http.request", "body": json.dumps(ASK).encode()}]))[0] == 200
        batcher = client.app._refusal.__self__._models.batcher  # type: ignore[attr-defined]
        while batcher.counts() != (0, 0):
            await asyncio.sleep(0.01)
        task.cancel()

    assert client.portal is not None
    client.portal.call(both)
