"""A page opened in headless Chromium, over its DevTools pipe: no driver, no port, no Python package.

As a script, a screenshot: `python -m tests.support.browser page.html shot.png [width] [height] [light|dark]`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

INSTALL = "`make browser`, or `apt-get install --no-install-recommends chromium`"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """The program, from the environment variable CHROMIUM or the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page in one headless browser.

    The browser reads commands from its file descriptor 3 and answers on 4, JSON closed by a zero byte.
    """

    def __init__(self, program: str, *, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The shell renames the pipes' ends to 3 and 4 (with high numbers in between, should they overlap).
        renamed = 'exec 13<&"$1" 14>&"$2"; exec 3<&13 4>&14 13<&- 14>&-; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", renamed, "browser", str(to_browser), str(from_browser), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_browser, from_browser),
        )
        os.close(to_browser)
        os.close(from_browser)
        self.requests: list[str] = []
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        pages = [item for item in self._ask("Target.getTargets")["targetInfos"] if item["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._ask("Page.enable")
        self._ask("Network.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        try:
            # The end of the pipe ends the browser.
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def open(self, file: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a file, and wait until it is loaded. What it asks for is in ``requests``."""
        self.requests.clear()
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._ask("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + self._timeout
        while self.evaluate("document.readyState + ' ' + location.protocol") != "complete file:":
            assert time.monotonic() < deadline, f"{file} was not loaded"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write what is seen (or the whole page) as PNG."""
        picture = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(picture["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._receive()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], self._timeout)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, f"the browser ended with exit code {self._process.wait(timeout=10)}"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


def main(arguments: list[str]) -> None:
    program = find_chromium()
    if program is None:
        sys.exit(f"no Chromium: {INSTALL}")
    width, height = int(arguments[2]) if len(arguments) > 2 else 1280, int(arguments[3]) if len(arguments) > 3 else 900
    with Browser(program) as browser:
        browser.open(
            Path(arguments[0]), width=width, height=height, scheme=arguments[4] if len(arguments) > 4 else "light"
        )
        browser.screenshot(Path(arguments[1]), whole=len(arguments) > 5)


if __name__ == "__main__":
    main(sys.argv[1:])
