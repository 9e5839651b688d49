"""Adapters that requests add: from which places, and within which time."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from finray.config.paths import is_url
from finray.errors import ModelError
from finray.serving.errors import ApiError, caused_by_request

Result = TypeVar("Result")
# Threads that hang in a disk or a socket; with so many of them, no more adapters are loaded.
_HANGING = 4
# Of a path, as Linux has it, and of the parts of a URL that lead elsewhere or are not part of its path.
_LONGEST = 4096
_NO_URL = re.compile(r"[?#@\\%]|/\.{0,2}(?=/|$)")


class Attempt:
    """The loading of an adapter, which ends once: either it is added, or it is given up."""

    def __init__(self) -> None:
        self._lock, self.is_over = threading.Lock(), False

    def end(self) -> bool:
        """End it; returns whether it had not ended before."""
        with self._lock:
            before, self.is_over = self.is_over, True
            return not before

    def require(self) -> None:
        """Stop where nobody waits any more. Raises ApiError: it was given up."""
        if self.is_over:
            raise ApiError(400, "the adapter was given up")


class Loader(Generic[Result]):
    """Loads one adapter at a time, apart from the threads that answer requests.

    A thread that waits for a disk or a socket cannot be ended, so each has its own: one that takes too long is left
    behind, and what it still loads is dropped.

    Args:
        seconds: that loading may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._is_busy = seconds, False
        self._hanging = list[threading.Thread]()

    async def run(self, load: Callable[[Attempt], Result]) -> Result:
        """The result of a call. Raises ApiError: another one is running, it takes too long, or it has failed."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if self._is_busy:
            raise ApiError(429, "another adapter is being added; try again", code="adapter_busy", retry_after=5)
        if len(self._hanging) >= _HANGING:
            message = f"{_HANGING} adapters that were given up still hang in their disk or network; try again later"
            raise ApiError(429, message, code="adapter_busy", retry_after=60)
        attempt, loop = Attempt(), asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def finish(loaded: Result | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(loaded)  # type: ignore[arg-type]

        def work() -> None:
            loaded, error = None, None
            try:
                with caused_by_request("path"):
                    loaded = load(attempt)
            except BaseException as caught:
                error = caught
            # The loop may have been closed meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, loaded, error)

        thread = threading.Thread(target=work, name="finray-adapter", daemon=True)
        self._is_busy = True
        thread.start()
        try:
            await asyncio.wait([result], timeout=self._seconds)
            # One that ended just now is added.
            if not result.done() and attempt.end():
                message = f"the adapter was not loaded within {self._seconds:g} s, and is given up"
                raise ApiError(400, message, param="path", code="adapter_timeout")
            return await result
        finally:
            # If the client has gone away, too.
            attempt.end()
            result.cancel()
            self._is_busy = False
            if thread.is_alive():
                self._hanging.append(thread)


def named_place(path: str, places: Sequence[str]) -> str:
    """An adapter's path or URL in the form in which it is opened: it must be in one of the named places.

    Args:
        path: as in the request.
        places: directories and URLs from which adapters may be added.

    Raises:
        ApiError: it is in none of them.
    """
    if is_url(path):
        url = path.rstrip("/")
        inside = any(is_url(place) and url.startswith(f"{place.rstrip('/')}/") for place in places)
        if inside and len(url) <= _LONGEST and url.isprintable() and not _NO_URL.search(url.partition("://")[2]):
            return url
        raise _elsewhere()
    if not path or len(path) > _LONGEST or not path.isprintable():
        message = f"a path is a text of 1 to {_LONGEST} characters, without control characters"
        raise ApiError(400, message, param="path")
    # Unlike Path.expanduser, without an error where there is no such user.
    given = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
    for place in places:
        root = Path(place).expanduser().absolute()
        if is_url(place) or not (Path(given).is_relative_to(root) or Path(given).is_relative_to(root.resolve())):
            continue
        # A link may lead anywhere.
        if (real := Path(given).resolve()).is_relative_to(root.resolve()):
            return str(real)
    raise _elsewhere()


def _elsewhere() -> ApiError:
    message = (
        "it is not in a directory from which adapters may be added; `finray serve --adapters-from DIR` names such a one"
    )
    return ApiError(403, message, param="path", code="place_not_allowed")


def require_inside(folder: Path, places: Sequence[str]) -> None:
    """Check that all files of a directory are regular ones, in the named places.
    Raises ModelError: one is not, such as a pipe or a link that leads elsewhere."""
    roots = [Path(place).expanduser().resolve() for place in places if not is_url(place)]
    for here, folders, files in os.walk(folder):
        for path in (Path(here, name) for name in (*folders, *files)):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                status = path.stat() if any(path.resolve().is_relative_to(root) for root in roots) else status
                is_plain = stat.S_ISREG(status.st_mode)
            else:
                is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
            if not is_plain:
                raise ModelError(
                    f"{path.relative_to(folder)} is no file of this directory",
                    where=str(folder),
                    repair="copy the adapter without links and special files",
                )
