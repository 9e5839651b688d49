"""SIGINT (Ctrl-C) and SIGTERM: the first ends a command in order, and a training at the next step, with a checkpoint.

Ray sets handlers of its own, in Python and in C++, which end the process with exit code 1 or by SIGABRT and say
nothing. So :mod:`finray.runtime.cluster` takes the signals back whenever it has connected.
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
# Who does not end at the second signal hangs somewhere; Ray's processes end with this one.
_PATIENCE = 3


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by a signal; its notes (PEP 678) say what is saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(_NAMES[signal.Signals(signum)])
        self.exit_code = 128 + signum


@dataclass
class Pending:
    """The signal that waits until what is at work has come to an end that can be continued; None where none does."""

    signum: int | None = None


@dataclass
class _State:
    depth: int = 0
    received: int = 0
    pending: Pending | None = None


_state = _State()


@contextmanager
def owned() -> Iterator[None]:
    """Let the signals raise :class:`Interrupted`, as long as the block runs; may be nested.

    Only the main thread can; in another, this does nothing.
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
            # None: it was not set from Python.
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


def take_back() -> None:
    """Set the handlers again that a library has replaced, where a block of :func:`owned` runs in this thread."""
    if _state.depth and threading.current_thread() is threading.main_thread():
        for one in _NAMES:
            signal.signal(one, _handle)


@contextmanager
def held() -> Iterator[None]:
    """Let signals wait until the block has ended and the handlers are set again, as :func:`take_back` does.

    For what replaces them and starts no process: one that was started meanwhile would never hear them. A signal that
    comes to another thread, such as one of NumPy's, is answered by what has replaced them, and then by ours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NAMES)
    try:
        yield
    finally:
        take_back()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferred() -> Iterator[Pending]:
    """Let the first signal be noted instead; the second is raised as usual."""
    pending = Pending()
    _state.pending = pending
    try:
        yield pending
    finally:
        _state.pending = None


def is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether an interrupt is Ctrl-C, which a command that goes on has then dealt with: the next one is a first one."""
    if getattr(error, "exit_code", None) == 128 + signal.SIGTERM:
        return False
    _state.received = 0
    return True


def _handle(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    _state.received += 1
    # Ray's core, if it was the first to hear of it, would end this process three seconds later, by an alarm.
    signal.alarm(0)
    if _state.pending is not None and _state.received == 1:
        _state.pending.signum = signum
        return
    if _state.received >= _PATIENCE:
        os._exit(128 + signum)
    raise Interrupted(signum)
