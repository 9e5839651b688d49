"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal): the first ends a command cleanly, and a training at the next
step, with a checkpoint.

Ray sets handlers of its own, in Python and in C++, which end the process silently with exit code 1 or by SIGABRT. So
:mod:`finray.runtime.cluster` restores ours whenever it has connected.
"""

from __future__ import annotations

import os
import signal
import stat
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

_NAMES = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP, because its terminal was closed",
}
# A process that does not end at the second signal hangs; Ray's processes end with this one.
_PATIENCE = 3


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by a signal; its notes (PEP 678) say what has been saved."""

    def __init__(self, signum: int, *, late: int | None = None) -> None:
        super().__init__(_NAMES[signal.Signals(signum)])
        self.exit_code = 128 + signum
        # The last finished step, if no time was left to save a checkpoint.
        self.late = late


@dataclass
class Pending:
    """The signal that waits until the current work can stop in a resumable state; None if there is none."""

    signum: int | None = None


@dataclass
class _State:
    depth: int = 0
    received: int = 0
    pending: Pending | None = None
    # By `nohup`, mostly.
    ignores_hangup: bool = False


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
        _state.ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {signum: signal.getsignal(signum) for signum in _NAMES}
    _state.depth += 1
    try:
        take_back()
        yield
    finally:
        _state.depth -= 1
        for signum, handler in before.items():
            # None: the handler was not set from Python.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def take_back() -> None:
    """Restore our handlers if a library has replaced them and a block of :func:`owned` runs in this thread."""
    if _state.depth and threading.current_thread() is threading.main_thread():
        for signum in _NAMES:
            if signum != signal.SIGHUP or not _state.ignores_hangup:
                signal.signal(signum, _handle)


@contextmanager
def without_hangup() -> Iterator[None]:
    """Let processes that are started inside ignore SIGHUP: a terminal sends it to all of them at once, and those of Ray
    are needed until a checkpoint is saved. One that comes meanwhile is not seen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if before is None else before)


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
    if getattr(error, "exit_code", None) in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
        return False
    _state.received = 0
    return True


def _handle(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    _state.received += 1
    if signum == signal.SIGHUP:
        _leave_terminal()
    # If Ray's core saw the signal first, its alarm would end this process three seconds later.
    signal.alarm(0)
    if _state.pending is not None and _state.received == 1:
        _state.pending.signum = signum
        return
    if _state.received >= _PATIENCE:
        os._exit(128 + signum)
    raise Interrupted(signum)


def _leave_terminal() -> None:
    """Write to nowhere instead of a terminal that is gone: each line would be an error."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                try:
                    termios.tcgetattr(descriptor)
                except (termios.error, OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, descriptor)
                    os.close(nowhere)
