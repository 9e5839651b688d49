"""A classifier behind `finray serve`, with OpenAI's own client against it: one server for all tests of this file."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.labelled import LABELS, bert_tokenizer, load_classifier, save_classifier
from tests.support.server import KEY, WAIT_S, Running, serving
from tests.support.tiny import WORDS

QUEUE, LONGEST = 2, 80
# With the tokens that begin and end it, as long as the model reads.
FULL = " ".join((WORDS * 2)[: LONGEST - 2])
TEXTS: list[Any] = ["the cat sleeps", "a tree by the river", "nine ten", FULL, ["the cat", "a small stone house"]]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier("bert", tmp_path_factory.mktemp("kinds"), bert_tokenizer())


@pytest.fixture(scope="module")
def server(adapter: Path) -> Iterator[Running]:
    options = ["--name", "kinds", "--dtype", "fp32", "--max-queue", QUEUE, "--grace", int(WAIT_S)]
    with serving(adapter, *options) as running:
        yield running


def classified(client: openai.OpenAI, texts: Any) -> Any:
    return client.post("/classify", cast_to=object, body={"model": "kinds", "input": texts})


def test_labels_and_probabilities_are_those_of_transformers_a_text_at_a_time(server: Running, adapter: Path) -> None:
    client = server.client()
    assert [one.id for one in client.models.list()] == ["kinds"]
    found, tuned, reader = classified(client, TEXTS), load_classifier(adapter), AutoTokenizer.from_pretrained(adapter)
    lengths, labels = [], set()
    for number, (text, one) in enumerate(zip(TEXTS, found["data"], strict=True)):
        encoded = reader(*([text] if isinstance(text, str) else text), return_tensors="pt")
        with torch.no_grad():
            right = tuned(**encoded).logits[0].softmax(-1).tolist()
        assert list(one["probabilities"]) == list(LABELS.values())
        assert list(one["probabilities"].values()) == pytest.approx(right, abs=1e-5)
        assert (one["index"], one["label"]) == (number, LABELS[right.index(max(right))])
        # The negative control: the base alone says something else.
        with torch.no_grad(), tuned.disable_adapter():
            base = tuned(**encoded).logits[0].softmax(-1).tolist()
        assert list(one["probabilities"].values()) != pytest.approx(base, abs=1e-3)
        lengths.append(encoded["input_ids"].shape[1])
        labels.add(one["label"])
    assert max(lengths) == LONGEST
    assert len(labels) > 1
    assert found["usage"] == {"prompt_tokens": sum(lengths), "completion_tokens": 0, "total_tokens": sum(lengths)}
    assert classified(client, TEXTS[0])["data"] == [
        {**found["data"][0], "probabilities": pytest.approx(found["data"][0]["probabilities"], abs=1e-5)}
    ]


def test_without_the_key_there_are_no_labels(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        classified(server.client("another-key"), TEXTS)
    status, body = server.post("/v1/classify", json.dumps({"model": "kinds", "input": "a"}).encode())
    assert (status, body["error"]["code"], "data" in body) == (401, "invalid_api_key", False)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "said"),
    [
        ("classify", {"model": "kinds", "input": f"{FULL} cat"}, 400, "invalid_request_error", "81 tokens"),
        ("classify", {"model": "kinds", "input": 3}, 400, "invalid_request_error", "input"),
        ("classify", {"model": "kinds", "input": ["a", 3]}, 400, "invalid_request_error", "input"),
        ("classify", {"model": "kinds", "input": []}, 400, "invalid_request_error", "1 to 1024 texts"),
        ("classify", {"model": "kinds", "input": [["a", "b", "c"]]}, 400, "invalid_request_error", "pair of texts"),
        ("classify", {"model": "kinds", "input": "a", "top": 3}, 400, "invalid_request_error", "`top` is not"),
        ("classify", {"model": "other", "input": "a"}, 404, "not_found_error", "there are: kinds"),
        ("classify", b'{"model": "kinds", "inp', 400, "invalid_request_error", "not valid JSON"),
        ("classify", b'{"model": "kinds", "input": "' + b"cat " * 2**18, 413, "invalid_request_error", "shorten it"),
        ("chat/completions", {"model": "kinds", "messages": []}, 404, "not_found_error", "use /v1/classify"),
        ("adapters", {"name": "x", "path": "y"}, 404, "not_found_error", "use /v1/classify"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_in_openais_form_and_the_server_goes_on(
    server: Running, path: str, body: Any, status: int, kind: str, said: str
) -> None:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    found, refusal = server.post(f"/v1/{path}", sent, Authorization=f"Bearer {KEY}")
    assert found == status
    assert set(refusal["error"]) == {"message", "type", "param", "code"}
    assert refusal["error"]["type"] == kind
    assert said in refusal["error"]["message"]
    assert server.health() == {"status": "ok", "running": 0, "waiting": 0}


def test_a_full_queue_is_a_429_and_sigterm_lets_what_was_taken_be_answered(server: Running) -> None:
    """The last test of this file: the server is gone after it."""
    client, many = server.client(), [FULL] * 512
    answers, refusals, others = list[Any](), list[openai.APIStatusError](), list[Exception]()
    # It may answer some time before it says so.
    assert server.process.stdout is not None
    assert server.process.stdout.readline().startswith("serving kinds at http://127.0.0.1")

    def ask() -> None:
        try:
            answers.append(classified(client, many))
        except openai.APIStatusError as error:
            refusals.append(error)
        except Exception as error:
            others.append(error)

    asking = []
    # Each takes far longer than the next one takes to come.
    while not refusals and not others:
        asking.append(threading.Thread(target=ask))
        asking[-1].start()
        time.sleep(0.02)
    before = len(answers)
    os.kill(server.process.pid, signal.SIGTERM)
    out, err = server.process.communicate(timeout=WAIT_S)
    for one in asking:
        one.join(WAIT_S)
    assert others == [], err
    assert refusals[0].status_code == 429
    assert refusals[0].response.headers["retry-after"] == "1"
    # Some may have come when it was stopping already.
    assert {one.status_code for one in refusals} <= {429, 503}
    assert len(answers) + len(refusals) == len(asking)
    assert len(answers) > before, "those that waited when the signal came"
    assert {len(one["data"]) for one in answers} == {len(many)}
    assert len({one["data"][0]["label"] for one in answers}) == 1
    assert server.process.returncode == 0, err
    assert err.splitlines()[-1] == "stopped"
    assert "stopping" in err
    assert "Traceback" not in err
    assert KEY not in out + err
