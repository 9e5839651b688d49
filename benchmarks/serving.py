"""`finray serve` compared with Transformers' `transformers serve`: concurrent streaming clients, one model, on a CPU.

Each client sends one question after the other over HTTP with OpenAI's client, with greedy decoding, and receives the
answer as a stream. Both servers have the same number of threads and weights in fp32, and answer one request before
timing starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from statistics import median, quantiles
from typing import Any

import openai

import case
from case import Bench, BenchmarkError, Result, Run
from processes import environment, run

# With --continuous-batching, Transformers 5.23 aborts its first stream on a CPU.
OURS, THEIRS = "finray serve", "transformers serve"
CLIENTS = (1, 16)
FEWEST, NEW = 8, 32
# Greedy answers diverge where two tokens are equally likely up to the order of a sum.
MOST_APART = 0.1


def runner(name: str, clients: int) -> Run:
    def measure(bench: Bench, pair: int) -> Result:
        bench.empty_folder()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        model = str(bench.model.resolve())
        if name == OURS:
            command = [sys.executable, "-m", "finray.cli.main", "serve", model, "--name", "model"]
            command += ["--port", str(port), "--dtype", "fp32", "--engine", "transformers"]
        else:
            command = [sys.executable, "-m", "transformers.cli.transformers", "serve", model, "--port", str(port)]
            command += ["--dtype", "float32"]
        found: Result = {}

        def is_done() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                asked = "model" if name == OURS else model
                try:
                    found.update(asyncio.run(load(bench, asked, port, clients)))
                except openai.OpenAIError as error:
                    raise BenchmarkError(f"{name} failed with {clients} clients: {error}") from None
                return True
            time.sleep(0.5)
            return False

        run(command, env=environment(threads=bench.threads), until=is_done)
        return found

    return measure


async def load(bench: Bench, model: str, port: int, clients: int) -> Result:
    """Send all questions, and measure how long it takes."""
    rows = [row["messages"][:-1] for row in bench.pool][: clients if bench.quick else max(FEWEST, 2 * clients)]
    waiting, first, tokens, answers = list(enumerate(rows)), list[float](), list[int](), dict[int, str]()
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=1800
    ) as client:

        async def ask(number: int, messages: Any) -> None:
            began, count, pieces = time.perf_counter(), 0, list[str]()
            stream = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=8 if bench.quick else NEW, temperature=0, stream=True
            )
            async for event in stream:
                if said := "".join(choice.delta.content or "" for choice in event.choices):
                    if not count:
                        first.append(time.perf_counter() - began)
                    count += 1
                    pieces.append(said)
            if not count:
                raise BenchmarkError("an answer is empty")
            tokens.append(count)
            answers[number] = "".join(pieces)

        async def work() -> None:
            while waiting:
                await ask(*waiting.pop())

        await ask(0, rows[0])
        first.clear()
        tokens.clear()
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        seconds = time.perf_counter() - began
    return {
        "requests_per_second": len(rows) / seconds,
        "first_token": median(first),
        "slow_first_token": quantiles(first, n=20)[-1] if len(first) > 1 else first[0],
        "pieces_per_second": sum(tokens) / seconds,
        "answers": [answers[number] for number in range(len(rows))],
    }


def check(block: str, runs: case.Runs) -> None:
    """Raise an error if the servers' answers differ."""
    ours, theirs = runs[OURS][-1]["answers"], runs[THEIRS][-1]["answers"]
    apart = sum(one.strip() != other.strip() for one, other in zip(ours, theirs, strict=True))
    if apart > MOST_APART * len(ours):
        raise BenchmarkError(f"{block}: {apart} of {len(ours)} answers are not those of {THEIRS}")


def blocks(bench: Bench) -> Mapping[str, Mapping[str, Run]]:
    return {
        f"{clients} client{'s' if clients > 1 else ''}": {name: runner(name, clients) for name in (OURS, THEIRS)}
        for clients in CLIENTS
    }


CASES = [
    case.Case(
        group="serving",
        name="serving",
        title="Streaming clients at once",
        what=f"Two questions of each client, {FEWEST} of a single one. Answers have at most {NEW} tokens, greedy, in "
        "fp32, and are the same from both servers up to ties. Seconds to the first piece of an answer.",
        blocks=blocks,
        measures=[
            case.Measure("requests/s", "requests_per_second", 2),
            case.Measure("first token, median s", "first_token", 2),
            case.Measure("first token, 95 % s", "slow_first_token", 2),
            case.Measure("pieces/s", "pieces_per_second"),
        ],
        ratios=case.over_others,
        check=check,
        aims=[
            case.Aim(
                "16 streaming clients: requests/s, finray ÷ `transformers serve`",
                case.quotient(OURS, THEIRS, "requests_per_second"),
            )
        ],
        most_pairs=3,
    )
]
