"""`finray serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai

from tests.support import runs

KEY = "a-key-of-this-test"
# Generous: how long it takes says more of the machine than of the code.
WAIT_S = 500.0


@dataclass
class Running:
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)

    def both(self, function: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
        """Call a function with a client for many requests at once."""

        async def call() -> Any:
            options: Any = {"api_key": KEY, "max_retries": 0, "timeout": WAIT_S}
            async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options) as client:
                return await function(client)

        # In a thread of its own: the browser of an earlier test keeps an event loop running in this one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, call()).result()

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=WAIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def until(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the server to be in a state."""
        end = time.monotonic() + WAIT_S
        while not fits(found := self.health()):
            assert time.monotonic() < end, found
            time.sleep(0.05)
        return found

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def is_idle(health: dict[str, Any]) -> bool:
    return health["running"] == health["waiting"] == 0


@contextlib.contextmanager
def serving(*words: Any, **env: str | None) -> Iterator[Running]:
    """A server that answers; it is gone afterwards."""
    running = _start([str(word) for word in words], env)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            # What belongs to its Ray ends with it.
            running.process.send_signal(signal.SIGINT)
            running.process.send_signal(signal.SIGINT)
            try:
                running.process.communicate(timeout=WAIT_S)
            finally:
                running.process.kill()


def _start(words: list[str], env: dict[str, str | None]) -> Running:
    # A port that is free now may be another's a moment later: then once more.
    for _ in range(5):
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        process = runs.start_cli(
            *("serve", *words, "--port", str(port), "--api-key-env", "FINRAY_TEST_KEY"),
            env={"FINRAY_TEST_KEY": KEY, "RAY_ADDRESS": None, "RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None, **env},
        )
        end = time.monotonic() + WAIT_S
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10):
                return Running(process, port)
            time.sleep(0.2)
        process.kill()
        out, err = process.communicate()
        if "the address is already in use" not in err:
            raise AssertionError(f"{out}\n{err}")
    raise AssertionError("no port is free")
