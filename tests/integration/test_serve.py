"""`finray serve` as a user starts it, and OpenAI's own client against it: one server for all tests of this file.

What it refuses, and adapters that come and go: tests/unit/serving.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.support import runs, served
from tests.support.server import KEY, WAIT_S, Running, is_idle, serving
from tests.support.tiny import WORDS

SLOTS, QUEUE, CLIENTS = 8, 64, 64
NAMES = ("one", "two", "three", "four")
PROMPTS = [" ".join(WORDS[at : at + 3 + at % 5]) for at in range(0, 24, 6)]
# A request that keeps the server busy: some 17,000 tokens. Of one that is given up, fewer than so many are written.
MANY: Any = {"model": "two", "prompt": "the cat", "n": 64, "max_tokens": 480, "temperature": 1, "seed": 1}
MOST = 7_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return served.save_adapters(tmp_path_factory.mktemp("served"), tokenizer, NAMES)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    adapters = [word for name in NAMES[1:] for word in ("--adapter", f"{name}={folder / name}")]
    options = ["--slots", SLOTS, "--max-queue", QUEUE, "--dtype", "fp32", "--grace", int(WAIT_S)]
    with serving(folder / "one", *adapters, *options) as running:
        yield running


def generated(folder: Path, name: str, patch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What `finray generate` says to the prompts, in fp32 as the server."""
    patch.setattr("finray.evaluation.artifacts.cpu_has_bf16", lambda: False)
    output = tmp_path / f"{name}.jsonl"
    words = ("--engine", "transformers", "--max-new-tokens", 8, "--output", output)
    code, out, err = runs.finray("generate", folder / name, *PROMPTS, *words)
    assert code == 0, out + err
    return [json.loads(line)["answer"] for line in output.read_text(encoding="utf-8").splitlines()]


def test_base_and_adapters_answer_as_finray_generate_does_all_at_once(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [one.id for one in server.client().models.list()] == ["one", "base", *NAMES[1:]]
    asked = [(name, prompt) for prompt in PROMPTS for name in ("base", *NAMES)]

    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=8
                )
                for name, prompt in asked
            )
        )

    found = {one: answer.choices[0].message.content for one, answer in zip(asked, server.both(ask), strict=True)}
    for name in ("base", *NAMES):
        right = generated(folder, name, monkeypatch, tmp_path)
        assert [found[name, prompt] for prompt in PROMPTS] == right, name
    assert len(set(found.values())) > len(found) // 2, "models and prompts matter"


def test_usage_log_probabilities_stop_and_seed_are_those_of_peft(server: Running, folder: Path, tokenizer: Any) -> None:
    client, model, ids = server.client(), served.reference(folder, "two"), tokenizer(PROMPTS[0])["input_ids"]
    asked: Any = {"model": "two", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    right = served.greedy(model, ids, 24, (tokenizer.eos_token_id,))
    text = whole.choices[0].text
    assert text == tokenizer.decode(right, skip_special_tokens=True)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), len(right))
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *right]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    chosen = logits[torch.arange(len(right)), right].tolist()
    assert whole.choices[0].logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
    for one, line in zip(whole.choices[0].logprobs.top_logprobs, logits, strict=True):
        # By their texts; parts of a character have the text of their bytes, which tests/unit/serving looks at.
        best = dict(
            zip(map(tokenizer.decode, line.topk(2).indices[:, None]), line.topk(2).values.tolist(), strict=True)
        )
        texts = {text: value for text, value in best.items() if "\ufffd" not in text}
        assert {text: one[text] for text in texts} == pytest.approx(texts, abs=1e-4)
        assert all(text.startswith("bytes:") for text in one.keys() - texts.keys())
        assert sorted(one.values()) == pytest.approx(sorted(line.topk(2).values.tolist()), abs=1e-4)
    stop = next(text[at : at + 3] for at in range(4, len(text)) if "\ufffd" not in text[at : at + 3])
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    chat: Any = {"model": "two", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 12}
    said = [client.chat.completions.create(**chat, seed=seed) for seed in (3, 3, 4)]
    assert said[0].choices[0].message.content == said[1].choices[0].message.content
    assert said[0].choices[0].message.content != said[2].choices[0].message.content
    prompt = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert {one.usage.prompt_tokens for one in said} == {len(prompt)}


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=pytest.mark.nightly)])
def test_64_clients_stream_for_a_while_and_none_meets_an_error(server: Running, seconds: float) -> None:
    """More than there are slots; whoever asks the same hears the same each time."""
    names, end, answers = ("base", *NAMES), time.monotonic() + seconds, list[int]()
    heard = defaultdict[int, set[tuple[str, str | None, int]]](set)

    async def stream(client: openai.AsyncOpenAI, kind: int) -> tuple[str, str | None, int]:
        text, reason, tokens = "", None, 0
        events = await client.chat.completions.create(
            model=names[kind % 5],
            messages=[{"role": "user", "content": PROMPTS[kind % 4]}],
            max_tokens=24,
            temperature=0.9,
            seed=kind,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for event in events:
            for choice in event.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            tokens = event.usage.completion_tokens if event.usage else tokens
        return text, reason, tokens

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        count = 0
        # Each at least twice, however slow the machine is.
        while time.monotonic() < end or count < 2:
            kind = (number + count) % 20
            heard[kind].add(await stream(client, kind))
            count += 1
        answers.append(count)

    async def all_of_them(client: openai.AsyncOpenAI) -> None:
        await asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))

    server.both(all_of_them)
    # An error of any client would have ended the test.
    assert len(answers) == CLIENTS
    assert sum(answers) >= 2 * CLIENTS
    assert {len(one) for one in heard.values()} == {1}
    said = {kind: next(iter(one)) for kind, one in heard.items()}
    assert len({text for text, _, _ in said.values()}) == len(said) == 20
    assert all(reason in ("stop", "length") and tokens <= 24 for _, reason, tokens in said.values())
    server.until(is_idle)


def test_a_full_queue_is_a_429_and_a_client_that_goes_away_frees_what_it_held(server: Running) -> None:
    client = server.client()
    before = server.until(is_idle)["tokens"]
    stream = client.completions.create(**MANY, stream=True)
    next(iter(stream))
    server.until(lambda one: one["waiting"] >= 40)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**MANY)
    assert caught.value.response.headers["retry-after"] == "1"
    stream.close()
    after = server.until(is_idle)["tokens"]
    assert after - before < MOST, "most of it was never computed"
    assert client.completions.create(model="base", prompt="the cat", max_tokens=2).choices[0].finish_reason


def test_a_client_that_waits_for_a_whole_answer_may_go_away_too(server: Running) -> None:
    before = server.until(is_idle)["tokens"]
    body = json.dumps(MANY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        server.until(lambda one: one["waiting"] >= 40)
    assert server.until(is_idle)["tokens"] - before < MOST


def test_sigterm_lets_answers_come_to_their_end(server: Running) -> None:
    """The last test of this file: the server is gone after it."""
    reason, text = [None], [""]
    has_begun = threading.Event()

    def listen() -> None:
        events = server.client().completions.create(
            model="one", prompt="the cat", max_tokens=400, temperature=1, seed=3, stream=True
        )
        for event in events:
            text[0] += event.choices[0].text
            reason[0] = event.choices[0].finish_reason or reason[0]  # type: ignore[assignment]
            has_begun.set()

    listening = threading.Thread(target=listen)
    listening.start()
    assert has_begun.wait(WAIT_S)
    os.kill(server.process.pid, signal.SIGTERM)
    out, err = server.process.communicate(timeout=WAIT_S)
    listening.join(WAIT_S)
    assert server.process.returncode == 0, err
    assert err.splitlines()[-1] == "stopped"
    assert reason[0] in ("stop", "length")
    assert text[0]
    assert out.startswith("serving one, base, two, three, four at http://127.0.0.1")
    assert "stopping" in err
    assert "Traceback" not in err
    assert KEY not in out + err
