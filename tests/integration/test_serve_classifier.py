"""A classifier behind `finray serve`: its application alone, and at night the command with OpenAI's own client."""

from __future__ import annotations

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
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from finray.serving.models import ServeSettings
from finray.serving.server import ApiServer
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


def test_labels_and_probabilities_are_those_of_transformers_a_text_at_a_time(adapter: Path) -> None:
    application = ApiServer(ServeSettings(str(adapter), dtype="fp32", name="kinds"), lambda line: None).app()
    with TestClient(application, base_url="http://127.0.0.1:8000") as http:
        client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any", http_client=http, max_retries=0)
        check_labels(client, adapter)
        for texts in ([], 3, ["a", 3], [["a", "b", "c"]], f"{FULL} cat"):
            with pytest.raises(openai.BadRequestError):
                classified(client, texts)
        with pytest.raises(openai.NotFoundError, match="use /v1/classify"):
            client.chat.completions.create(model="kinds", messages=[])


def check_labels(client: openai.OpenAI, adapter: Path) -> None:
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
    shares = {name: pytest.approx(found["data"][0][name], abs=1e-5) for name in ("probabilities", "probs")}
    assert classified(client, TEXTS[0])["data"] == [{**found["data"][0], **shares}]


@pytest.mark.nightly
def test_a_full_queue_is_a_429_and_sigterm_lets_what_was_taken_be_answered(server: Running, adapter: Path) -> None:
    """The server is gone after it."""
    client, many = server.client(), [FULL] * 512
    check_labels(client, adapter)
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
