"""What clients are told: refusals in OpenAI's form, streams, labels. The web application alone, without Ray."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from finray.errors import ConfigError, DataError
from finray.evaluation.engines import Sampling
from finray.evaluation.generate import generate_text
from finray.evaluation.prompts import Prompt
from finray.runtime.serve import serve
from finray.serving.answering import Exchange
from finray.serving.errors import ApiError
from finray.serving.models import ServeSettings
from finray.serving.protocol import CompletionRequest
from finray.serving.server import ApiServer
from tests.support import runs, served, tiny

KEY = "a key of this test's"
HERE = "http://127.0.0.1:8000"
ASK = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return served.save_adapters(tmp_path_factory.mktemp("served"), tokenizer, ("one",))


def serving(settings: ServeSettings) -> Iterator[TestClient]:
    with TestClient(ApiServer(settings, lambda line: None).app(), base_url=HERE) as client:
        yield client


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    yield from serving(
        ServeSettings(str(folder / "one"), dtype="fp32", slots=2, adapters_from=(str(folder), "s3://mine"))
    )


def told(answer: Any) -> str:
    """The message of a refusal, which has OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    return str(error["message"])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {**ASK, "model": "none"}, 404, "`none` does not exist; there are: one, base"),
        ("completions", {"model": "none", "prompt": "a"}, 404, "there are: one, base"),
        ("completions", {"model": "one", "prompt": [1, 9999]}, 400, "token ids must be from 0"),
        ("completions", {"model": "one", "prompt": "cat " * 3000}, 400, "together may have 512"),
        ("chat/completions", {**ASK, "model": "one", "messages": [{"role": "wizard", "content": "a"}]}, 400, "wizard"),
        ("chat/completions", {**ASK, "model": "one", "messages": [{"role": "user"}]}, 400, "no text"),
        ("chat/completions", {**ASK, "model": "one", "top_logprobs": 2}, 400, "logprobs"),
        ("classify", {"model": "one", "input": "a"}, 404, "no classifier"),
        ("adapters", {"name": "x", "path": "/no/such/place"}, 403, "--adapters-from DIR"),
        # It has the form of a Hub id, but adapters are directories.
        ("adapters", {"name": "x", "path": "no/such"}, 403, "not in a directory from which adapters may be added"),
        ("adapters", {"name": "base", "path": "no/such"}, 409, "`base` is the name of the model under an adapter"),
        ("adapters", {"name": "one", "path": "no/such"}, 409, "`one` is the model that the server was started with"),
        ("nowhere", {}, 404, "there is no POST /v1/nowhere"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_in_openais_form(
    client: TestClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    content = json.dumps(body)
    answer = client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert message in told(answer)
    assert client.get("/health").json()["waiting"] == 0


def test_a_token_that_the_model_has_no_row_for_is_refused_and_others_are_answered(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Gemma 3's text models, whose tokenizer has a token for images."""
    more = copy.deepcopy(tokenizer)
    rows = tiny.build_model("llama").config.vocab_size
    more.add_tokens([f"<extra_{at}>" for at in range(len(more), rows)], special_tokens=True)
    more.add_tokens(["<image>"], special_tokens=True)
    tiny.save_model("llama", tmp_path / "m", more)
    ask = {**ASK, "model": "m", "messages": [{"role": "user", "content": "<image>"}]}
    for client in serving(ServeSettings(str(tmp_path / "m"), dtype="fp32")):
        for path, body in (("chat/completions", ask), ("completions", {"model": "m", "prompt": [5, rows]})):
            refused = client.post(f"/v1/{path}", json=body)
            assert refused.status_code == 400
            assert f"token ids must be from 0 to {rows - 1}" in told(refused)
        body = {"model": "m", "prompt": [5, rows - 1], "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
    monkeypatch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    with pytest.raises(DataError, match=f"the model has no embedding for the token {rows}"):
        generate_text(tmp_path / "m", [Prompt("<image>")], sampling=Sampling(2), batch_size=1, engine="transformers")


@pytest.mark.parametrize(("n", "status"), [(1, 429), (4, 400)])
def test_answers_without_room_are_refused_before_anything_is_made_of_their_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, n: int, status: int
) -> None:
    """A short body may ask for very many."""

    def made(*_: Any) -> Any:
        raise AssertionError("it is tokenized")

    models = ApiServer(
        ServeSettings(str(folder / "base"), dtype="fp32", slots=2, max_queue=1), lambda line: None
    )._answers()
    with monkeypatch.context() as patch:
        # Nothing leaves the queue.
        patch.setattr(models.batcher, "work", lambda: None)
        options: Any = {"loop": asyncio.new_event_loop(), "max_new_tokens": 2}
        ask = CompletionRequest(model="base", prompt=["a", "b", "c"])
        Exchange(models, ask, **options).submit()
        patch.setattr(Exchange, "_prompt_ids", made)
        with pytest.raises(ApiError, match="at most 3" if status == 400 else "too many requests") as caught:
            Exchange(models, CompletionRequest(model="base", prompt="a", n=n), **options)
    assert (caught.value.status, caught.value.param) == (status, "n" if status == 400 else None)
    models.batcher.close()


def test_a_body_that_is_too_large_and_another_method_are_refused(client: TestClient) -> None:
    for path in ("chat/completions", "completions", "adapters"):
        headers = {"content-type": "application/json"}
        answer = client.post(f"/v1/{path}", content=b"x" * (2**20 + 1), headers=headers)
        assert answer.status_code == 413
        told(answer)
    assert client.get("/v1/completions").status_code == 405


@pytest.mark.parametrize("around", ["{}", "{}\n", " {}\r\n"])
def test_only_who_has_the_key_is_answered(folder: Path, monkeypatch: pytest.MonkeyPatch, around: str) -> None:
    """A mounted secret often ends in a newline, which no header can hold."""
    monkeypatch.setenv("FINRAY_TEST_KEY", around.format(KEY))
    for client in serving(ServeSettings(str(folder / "base"), dtype="fp32", key_env="FINRAY_TEST_KEY", name="mine")):
        for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}, {"authorization": "Bearer"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert "API key" in told(answer)
            assert KEY not in answer.text
        assert client.get("/ready").status_code == client.get("/health").status_code == 200
        answer = client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert [one["id"] for one in answer.json()["data"]] == ["mine"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "the environment has no variable FINRAY_TEST_KEY"),
        ("", "the variable FINRAY_TEST_KEY holds no key"),
        (" \n", "the variable FINRAY_TEST_KEY holds no key"),
        ("schl\u00fcssel-0123", "not only ASCII letters, digits and signs"),
        ("first-half\nsecond-half", "not only ASCII letters, digits and signs"),
    ],
)
def test_a_key_that_no_client_can_send_is_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, message: str
) -> None:
    monkeypatch.delenv("FINRAY_TEST_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("FINRAY_TEST_KEY", key)
    settings = ServeSettings(str(folder / "base"), dtype="fp32", key_env="FINRAY_TEST_KEY")
    nobody: Any = {"notify": lambda line: None, "ready": lambda names: None}
    # By the server, and by the command before it starts a Ray.
    for start in (
        lambda: ApiServer(settings, lambda line: None),
        lambda: serve(settings, host="127.0.0.1", port=0, grace=1, **nobody),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            start()
        assert caught.value.where == "--api-key-env"
        assert not key or key.strip() not in str(caught.value) or not key.strip()


def test_a_server_that_stops_is_not_ready_and_refuses_what_is_new(folder: Path) -> None:
    server = ApiServer(ServeSettings(str(folder / "base"), dtype="fp32"), lambda line: None)
    ask = {"model": "base", "prompt": "the cat", "max_tokens": 2}
    with TestClient(server.app(), base_url=HERE) as client:
        assert client.get("/ready").status_code == client.post("/v1/completions", json=ask).status_code == 200
        assert client.portal is not None
        assert client.portal.call(server.drain, 60)
        assert (client.get("/ready").status_code, client.get("/ready").json()) == (503, {"status": "stopping"})
        refused = client.post("/v1/completions", json=ask)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "shutting down" in told(refused)


@pytest.mark.parametrize(
    ("template", "rows", "why"),
    [(False, None, "has none"), (True, "completion", "was trained without it"), (True, "chat", None)],
)
def test_a_model_that_takes_no_conversations_is_named_at_the_start_in_one_line(
    folder: Path, tmp_path: Path, template: bool, rows: str | None, why: str | None
) -> None:
    shutil.copytree(folder / "base", tmp_path / "mine")
    if not template:
        (tmp_path / "mine" / "chat_template.jinja").unlink()
    if rows is not None:
        (tmp_path / "mine" / "finray.json").write_text(json.dumps({"rows": rows}))
    lines: list[str] = []
    server = ApiServer(ServeSettings(str(tmp_path / "mine"), dtype="fp32"), lines.append)
    with TestClient(server.app(), base_url=HERE) as client:
        chat = client.post("/v1/chat/completions", json={**ASK, "model": "mine"})
        plain = client.post("/v1/completions", json={"model": "mine", "prompt": "the cat"})
    assert (plain.status_code, plain.json()["choices"][0]["index"]) == (200, 0)
    if why is None:
        assert chat.status_code == 200
        assert lines == []
    else:
        assert lines == [f"conversations need a chat template, so they are refused: `mine` {why}"]
        assert chat.status_code == 400
        assert f"`mine` {why}; use /v1/completions" in told(chat)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(client: TestClient, n: int) -> None:
    ask = {**ASK, "model": "one", "n": n, "seed": 5, "temperature": 1, "logprobs": True, "max_tokens": 12}
    whole = client.post("/v1/chat/completions", json=ask).json()
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    found = events(client.post("/v1/chat/completions", json={**ask, **stream}).text)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    texts, ends, tokens = [""] * n, [""] * n, [0] * n
    for choice in (choice for one in found for choice in one["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
        ends[choice["index"]] += choice["finish_reason"] or ""
        tokens[choice["index"]] += len((choice.get("logprobs") or {}).get("content", ()))
    assert texts == [one["message"]["content"] for one in whole["choices"]]
    assert ends == [one["finish_reason"] for one in whole["choices"]]
    assert tokens == [len(one["logprobs"]["content"]) for one in whole["choices"]]
    assert len(set(texts)) == n, "each answer has random numbers of its own"
    assert whole["usage"]["completion_tokens"] == sum(tokens)


def test_base_is_no_name_of_an_adapter_where_the_model_has_another(folder: Path) -> None:
    settings = ServeSettings(str(folder / "base"), dtype="fp32", name="mine", adapters_from=(str(folder),))
    for client in serving(settings):
        refused = client.post("/v1/adapters", json={"name": "base", "path": str(folder / "one")})
        assert refused.status_code == 409
        assert "`base` is the name of the model under an adapter; choose another name" in told(refused)
        assert client.delete("/v1/adapters/base").status_code == 404


def test_adapters_come_and_go_by_either_name_of_the_paths(client: TestClient, folder: Path) -> None:
    path = str(folder / "one")
    assert client.post("/v1/adapters", json={"name": "two", "path": path}).json()["id"] == "two"
    assert client.post("/v1/load_lora_adapter", json={"lora_name": "three", "lora_path": path}).json()["id"] == "three"
    said = {
        name: client.post("/v1/completions", json={"model": name, "prompt": "the cat", "temperature": 0}).json()
        for name in ("one", "two", "three", "base")
    }
    texts = {name: one["choices"][0]["text"] for name, one in said.items()}
    assert texts["one"] == texts["two"] == texts["three"] != texts["base"]
    assert [one["id"] for one in client.get("/v1/adapters").json()["data"]] == ["one", "two", "three"]
    again = client.post("/v1/adapters", json={"name": "two", "path": path})
    assert (again.status_code, "remove it first" in told(again)) == (409, True)
    assert client.delete("/v1/adapters/two").json()["deleted"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "three"}).json()["deleted"]
    assert client.delete("/v1/adapters/two").status_code == 404
    assert client.delete("/v1/adapters/one").status_code == 403
    assert client.get("/v1/models/two").status_code == 404


def test_a_classifier_with_a_full_queue_says_so_and_goes_on(
    classifier_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """However few threads there are for what waits."""
    runs.run_alone(classifier_run({"train.max_steps": 1}), tmp_path / "run")
    settings = ServeSettings(str(tmp_path / "run" / "checkpoint-000001"), dtype="fp32", name="kinds", max_queue=2)
    server, asked = ApiServer(settings, lambda line: None), {"model": "kinds", "input": "a tree"}
    assert server._classifier is not None
    with TestClient(server.app(), base_url=HERE) as client, ThreadPoolExecutor(3) as clients:
        assert client.portal is not None
        client.portal.call(lambda: asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1)))

        def ask() -> Any:
            return client.post("/v1/classify", json=asked)

        with server._classifier._lock:
            answers = [clients.submit(ask) for _ in range(3)]
            until = time.monotonic() + 300
            while (health := client.get("/health").json())["waiting"] < 2 and time.monotonic() < until:
                time.sleep(0.01)
            assert (health["running"], health["waiting"]) == (1, 2)
            refused = ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert [one.result().json()["data"] for one in answers] == [ask().json()["data"]] * 3
        assert (client.get("/health").json()["running"], client.get("/health").json()["waiting"]) == (0, 0)
