"""`finray serve` on vLLM: base and adapters in one batch say what vLLM says offline, by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import Continuation, Sampling, make_engine
from tests.support.server import KEY, Running, is_idle, serving

pytest.importorskip("vllm", reason="an environment of its own has vLLM: make test-engines")

TEXTS = ("The capital of France is", "One two three four", "Hello", "A dog and a cat went")
NEW = 16


@pytest.fixture(scope="module")
def offline(adapter: Path) -> dict[str, list[Any]]:
    """Answers of vLLM in this process, of the base and of the adapter; it is gone when the server comes."""
    engine = make_engine("vllm", artifact_of(adapter), dtype=torch.float32, batch_size=4)
    ids = [engine.tokenizer(text)["input_ids"] for text in TEXTS]
    found = {
        name: sorted(engine.generate(ids, Sampling(NEW), adapter=name == "tuned"), key=lambda answer: answer.row)
        for name in ("base", "tuned")
    }
    engine.close()
    assert found["base"] != found["tuned"]
    return found


@pytest.fixture(scope="module")
def server(adapter: Path, offline: dict[str, list[Any]]) -> Iterator[Running]:
    options = ("--engine", "vllm", "--dtype", "fp32", "--slots", 4, "--max-length", 512, "--grace", 1)
    options += ("--adapters-from", adapter.parent)
    with serving(adapter, "--name", "tuned", "--adapter", f"again={adapter}", *options) as running:
        yield running


def test_all_models_at_once_say_what_vllm_says_offline(server: Running, offline: dict[str, list[Any]]) -> None:
    right = {**offline, "again": offline["tuned"]}
    assert [one.id for one in server.client().models.list()] == ["tuned", "base", "again"]
    asked = [(name, number) for number in range(len(TEXTS)) for name in right]

    async def ask(client: openai.AsyncOpenAI) -> Any:
        calls = (
            client.completions.create(model=name, prompt=TEXTS[number], max_tokens=NEW, temperature=0)
            for name, number in asked
        )
        return await asyncio.gather(*calls)

    for (name, number), found in zip(asked, server.both(ask), strict=True):
        answer = right[name][number]
        assert found.choices[0].text == answer.text, (name, number)
        assert found.choices[0].finish_reason == answer.finish
        assert found.usage.completion_tokens == len(answer.tokens)
    server.until(is_idle)


def test_a_stream_and_its_log_probabilities_are_those_of_transformers(server: Running, adapter: Path) -> None:
    ours = make_engine("transformers", artifact_of(adapter), dtype=torch.float32)
    asked: Any = {"model": "tuned", "prompt": TEXTS[0], "max_tokens": 8, "temperature": 0, "logprobs": 3}
    whole = server.client().completions.create(**asked).choices[0]
    pieces = [one.choices[0] for one in server.client().completions.create(**asked, stream=True)]
    assert "".join(one.text for one in pieces) == whole.text
    told = [one for piece in pieces if piece.logprobs for one in piece.logprobs.token_logprobs]
    assert told == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
    ids = ours.tokenizer(TEXTS[0])["input_ids"]
    (answer,) = ours.generate([ids], Sampling(8))
    (right,) = ours.log_likelihood([Continuation(ids, answer.tokens)])
    assert told == pytest.approx(right.logprobs, abs=2e-3)
    assert all(len(one) == 3 for one in whole.logprobs.top_logprobs)
    chat: Any = {"model": "tuned", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "seed": 3}
    said = {server.client().chat.completions.create(**chat).choices[0].message.content for _ in range(2)}
    assert len(said) == 1, "a seed makes an answer again"


def test_stop_strings_and_clients_that_go_away_end_rows(server: Running, offline: dict[str, list[Any]]) -> None:
    client, text = server.client(), offline["base"][1].text
    word = text[len(text) // 2 :][:3]
    asked: Any = {"model": "base", "prompt": TEXTS[1], "max_tokens": NEW, "temperature": 0}
    found = client.completions.create(**asked, stop=[word]).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.find(word)], "stop")
    before = server.until(is_idle)["tokens"]
    many: Any = {"model": "again", "prompt": "the cat", "n": 64, "max_tokens": 400, "temperature": 1, "seed": 1}
    stream = client.completions.create(**many, stream=True)
    next(iter(stream))
    stream.close()
    assert server.until(is_idle)["tokens"] - before < 64 * 400 // 2, "most of it was never computed"
    assert client.completions.create(**asked).choices[0].text == text


def test_adapters_come_and_go_and_an_unknown_one_is_a_404(
    server: Running, adapter: Path, offline: dict[str, list[Any]]
) -> None:
    authorised, client = {"Authorization": f"Bearer {KEY}"}, server.client()
    body = json.dumps({"name": "late", "path": str(adapter)}).encode()
    assert server.post("/v1/adapters", body, **authorised)[0] == 200
    asked: Any = {"prompt": TEXTS[0], "max_tokens": NEW, "temperature": 0}
    assert client.completions.create(model="late", **asked).choices[0].text == offline["tuned"][0].text
    removed = client.delete("/adapters/late", cast_to=object)
    assert removed == {"id": "late", "object": "model", "deleted": True}
    with pytest.raises(openai.NotFoundError, match="there are: tuned, base, again"):
        client.completions.create(model="late", **asked)
