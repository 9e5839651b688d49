"""SIGINT (Ctrl-C) and SIGTERM: the first ends a command cleanly, and a training at the next step, with a checkpoint.

Ray sets handlers of its own, in Python and in C++, which end the process silently with exit code 1 or by SIGABRT. So
:mod:`finray.runtime.cluster` restores ours whenever it has connected.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
# A process that does not end at the second signal hangs; Ray's processes end with this one.
_PATIENCE = 3


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by a signal; its notes (PEP 678) say what has been saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(_NAMES[signal.Signals(signum)])
        self.exit_code = 128 + signum


@dataclass
class Pending:
    """The signal that waits until the current work can stop in a resumable state; None if there is none."""

    signum: int | None = None


@dataclass
class _State:
    depth: int = 0
    received: int = 0
    pending: Pending | None = None


_state = _State()


@contextmanager
def owned() -> Iterator[None]:
    """Let the signals raise :class:`Interrupted` while the block runs; may be nested.

    Only works in the main thread; in another, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _state.depth:
        _state.received = 0
    before = {one: signal.getsignal(one) for one in _NAMES}
    _state.depth += 1
    try:
        take_back()
        yield
    finally:
        _state.depth -= 1
        for one, handler in before.items():
            # None: the handler was not set from Python.
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def take_back() -> None:
    """Restore our handlers if a library has replaced them and a block of :func:`owned` runs in this thread."""
    if _state.depth and threading.current_thread() is threading.main_thread():
        for one in _NAMES:
            signal.signal(one, _handle)


@contextmanager
def held() -> Iterator[None]:
    """Block signals until the block has ended and our handlers are restored, as :func:`take_back` does.

    For code that replaces them and starts no process, which would inherit the mask. A signal delivered to another
    thread, such as one of NumPy's, reaches the replaced handler first, then ours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NAMES)
    try:
        yield
    finally:
        take_back()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferred() -> Iterator[Pending]:
    """Let the first signal only be recorded; the second raises as usual."""
    pending = Pending()
    _state.pending = pending
    try:
        yield pending
    finally:
        _state.pending = None


def is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether an interrupt is Ctrl-C. A command that continues has then handled it: the next one counts as the
    first."""
    if getattr(error, "exit_code", None) == 128 + signal.SIGTERM:
        return False
    _state.received = 0
    return True


def _handle(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    _state.received += 1
    # If Ray's core saw the signal first, its alarm would end this process three seconds later.
    signal.alarm(0)
    if _state.pending is not None and _state.received == 1:
        _state.pending.signum = signum
        return
    if _state.received >= _PATIENCE:
        os._exit(128 + signum)
    raise Interrupted(signum)
