"""Limits on time and size for external input: templates, converters, configs, and values in messages."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sized
from pathlib import Path
from reprlib import Repr
from types import TracebackType
from typing import Any

from finray.errors import FinrayError, masked

# Seconds that one rendering of a chat template, and one row of a converter, may take. What a converter has to load
# belongs to its module's import, which is not limited.
TEMPLATE_S = 10.0
CONVERTER_S = 60.0
# Seconds of silence after which a pipe that is read is given up.
PIPE_S = 20.0
# Bytes by which the process may grow meanwhile.
MEMORY = 4 * 2**30
# Characters of a text that a template may make by repetition.
REPEATED = 10_000_000
# Ignored unless requested; other code uses SIGALRM.
_SIGNAL = signal.SIGURG
_POLL_S = 0.2
_AGAIN_S = 1.0


class _Masked(Repr):
    """Secrets are masked before a text is cut: of half a secret nobody knows the form."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(masked(x), level)


_REPR = _Masked()
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxtuple, _REPR.maxset = 3, 5, 5, 5, 5
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120


def shown(value: Any, width: int = 200) -> str:
    """A value as it stands in a message: its ``repr`` where that is short, else a part of it."""
    return cut(_REPR.repr(value), width)


def cut(text: str, width: int = 300) -> str:
    """A text as it stands in a message: without its end where it is long."""
    if len(text) <= width:
        return text
    # No message needs more, and masking takes time.
    text = masked(text[: 20 * width])
    return text if len(text) <= width else f"{text[: width - 3]}..."


def bounded_product(_: Any, operator: str, left: Any, right: Any) -> Any:
    """The result of ``*`` or ``**`` in a template, limited in size. Raises ValueError: it would be larger."""
    if operator == "**":
        if not all(isinstance(value, int | float) and abs(value) <= 1024 for value in (left, right)):
            raise ValueError("the power of such large numbers is refused")
        return left**right
    sizes = [len(value) if isinstance(value, Sized) else abs(value) for value in (left, right)]
    if any(isinstance(value, Sized) for value in (left, right)) and sizes[0] * sizes[1] > REPEATED:
        raise ValueError(f"a text of more than {REPEATED:,} characters is refused")
    return left * right


def read_named(path: Path, most: int) -> bytes:
    """The first bytes of a file that a user named, which may be a pipe: `/dev/stdin`, or a shell's `<(...)`.

    Args:
        path: the file.
        most: bytes to read.

    Raises:
        OSError: it cannot be read, is a directory, or is a pipe to which nobody writes.
    """
    content = bytearray()
    # Not blocking, because opening a pipe would wait for its writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as stream:
        while len(content) < most:
            ready = select.poll()
            ready.register(stream, select.POLLIN)
            if not ready.poll(PIPE_S * 1000):
                raise TimeoutError(f"nothing was written to it for {PIPE_S:g} seconds")
            if not (piece := stream.read(most - len(content))):
                break
            content += piece
    return bytes(content)


class _Overdue(BaseException):
    """Thrown into a thread whose call takes too long; no base of what a user's code catches."""


class within:
    """Ends the block where it takes too long, or too much memory; in any thread.

    A watching thread throws an exception into the one that is late. That reaches Python code, such as a template's
    loops. A call that waits in C (a sleep, a socket) is ended by a signal, which Python takes in the main thread alone:
    there the error is raised if need be, and the thread that hangs is left behind.

    Args:
        seconds: that the block may take.
        error: makes the error from what was too much (``60 seconds``, ``4 GiB of memory``).
        memory: bytes by which the process may grow meanwhile.
    """

    __slots__ = ("deadline", "error", "excess", "grown", "memory", "seconds", "signalled", "thread")

    def __init__(self, seconds: float, error: Callable[[str], FinrayError], *, memory: int = MEMORY) -> None:
        self.seconds, self.error, self.memory = seconds, error, memory
        self.excess, self.signalled = "", False
        self.grown: int | None = None

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.deadline = time.monotonic() + self.seconds
        _watch(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with _LOCK:
                _WATCHED.discard(self)
                if self.excess:
                    # One that was thrown and has not arrived would end something else.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), None)
        except _Overdue:
            _WATCHED.discard(self)
            kind = _Overdue
        if self.excess and (kind is _Overdue or kind is None):
            late = self.error(self.excess)
            late.overdue = True
            raise late from None


_LOCK = threading.Lock()
_WATCHED: set[within] = set()
_WATCHING: list[threading.Thread] = []
# Raised in the main thread by the signal's handler.
_STUCK: list[FinrayError | type[BaseException]] = []


def arm() -> None:
    """Let a signal raise in the main thread what hangs in another; called there, and does nothing elsewhere."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _raise_stuck)


def _raise_stuck(*_: object) -> None:
    if _STUCK:
        error = _STUCK.pop()
        _STUCK.clear()
        raise error


def _watch(call: within) -> None:
    if not _WATCHING or not _WATCHING[0].is_alive():
        with _LOCK:
            if not _WATCHING or not _WATCHING[0].is_alive():
                _WATCHING[:] = [threading.Thread(target=_watcher, name="finray-limits", daemon=True)]
                _WATCHING[0].start()
    arm()
    with _LOCK:
        _WATCHED.add(call)


def _watcher() -> None:
    while True:
        time.sleep(_POLL_S)
        if not _WATCHED:
            continue
        now, resident = time.monotonic(), _resident()
        with _LOCK:
            for call in _WATCHED:
                # A call is seen here for the first time only where it takes longer than most.
                call.grown = resident if call.grown is None else min(call.grown, resident)
                if now >= call.deadline:
                    _end(call, call.excess or f"{call.seconds:g} seconds", now)
                elif resident - call.grown > call.memory:
                    _end(call, f"{call.memory / 2**30:g} GiB of memory", now)


def _end(call: within, excess: str, now: float) -> None:
    in_main = call.thread == threading.main_thread().ident
    again, call.excess, call.deadline = bool(call.excess), excess, now + _AGAIN_S
    if not in_main:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(call.thread), ctypes.py_object(_Overdue))
    if (in_main or (again and not call.signalled)) and signal.getsignal(_SIGNAL) is _raise_stuck:
        call.signalled = True
        _STUCK.append(_Overdue if in_main else call.error(excess))
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, _SIGNAL)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
