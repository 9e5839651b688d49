"""`finray serve` on vLLM: base and adapters in one batch say what vLLM says offline, by OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from finray.evaluation.artifacts import artifact_of
from finray.evaluation.engines import Sampling, make_engine
from tests.support.server import Running, is_idle, serving

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
