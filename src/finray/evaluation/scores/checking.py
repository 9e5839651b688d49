"""The process in which a checker checks one answer, and the process above it, which ends all that it leaves.

Runs as a script by its path, isolated, with the standard library alone. Standard input is a JSON list: a secret word,
the checker, the answer and the row. Arguments are the descriptor to report to, seconds and bytes of memory. The exit
code says how it ended: one of those below, or 128 and a signal's number.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

READY = b"ready\n"
LATE, CROWD, LEFT = 101, 102, 103
# Processes of one check at a time. The bound on those of a user does not hold for root, and counts all others' too.
_MOST = 128
_POLL_S, _ENDING_S = 0.01, 10.0
# Of a report: what a pipe takes without a reader.
_LONGEST = 3000
# What Python and libraries call the code that they make themselves.
_NO_ANSWERS = ("<frozen", "<__array_function__", "<attrs")
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_NEWNS, _NEWUSER, _NEWPID, _PRIVATE = 0x20000, 0x10000000, 0x20000000, 0x44000


def _prctl(option: int, value: int) -> None:
    """Linux alone; elsewhere processes that leave the session are not found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _unshare() -> bool:
    """Let the next child be the first process of a namespace: no process in it sees another, and the kernel ends all
    with the first. False where that is not allowed, as in most containers."""
    if sys.platform != "linux":
        return False
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(_NEWPID) == 0:
        return True
    if libc.unshare(_NEWUSER | _NEWPID) != 0:
        return False
    with suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    return True


def _be_first() -> None:
    """As the first process of a namespace, fork the worker, and end when it does, with its signal as exit code."""
    libc = ctypes.CDLL(None)
    # Mounts are its own, and /proc shows its processes, where that is allowed.
    if libc.unshare(_NEWNS) == 0 and libc.mount(None, b"/", None, _PRIVATE, None) == 0:
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
    worker = os.fork()
    while worker:
        pid, status = os.wait()
        if pid == worker:
            os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _descendants() -> list[int]:
    """All processes below this one; orphans among them are its children."""
    pids, left = list[int](), [os.getpid()]
    while left:
        # A process may end meanwhile.
        with suppress(OSError):
            for task in Path(f"/proc/{left.pop()}/task").iterdir():
                left += (children := [int(pid) for pid in (task / "children").read_text(encoding="ascii").split()])
                pids += children
    return pids


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _end_all(worker: int) -> bool:
    """Kill all processes below this one, until none is left; False if some cannot be ended."""
    until = time.monotonic() + _ENDING_S
    while time.monotonic() < until:
        _kill(_descendants())
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.001)
    return False


def _supervise(worker: int, seconds: float, parent: int, *, is_first: bool) -> int:
    """Wait for the worker, or the first process of its namespace, within its limits; the exit code."""
    until, code = time.monotonic() + seconds, LATE
    # Nor does a killed command leave checks behind.
    while time.monotonic() < until and os.getppid() == parent:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status) * is_first
            code = 128 + number if number else 0
            break
        if len(_descendants()) > _MOST:
            code = CROWD
            break
        if not pid:
            time.sleep(_POLL_S)
    if code in (LATE, CROWD):
        _kill([worker])
    return code if _end_all(worker) else LEFT


def _judged(error: BaseException, module: Any, scratch: str) -> tuple[str, str]:
    """What an exception says: ``wrong`` about the answer, ``memory``, ``time``, or that the checker has ``failed``.

    Assertions and failed commands are about the answer. Otherwise the innermost frame decides that belongs to the
    checker's file, or to code that is in no file or one that was written during the check. Until the checker's module
    is there, no answer is to blame.
    """
    if module is not None and isinstance(error, MemoryError):
        return "memory", ""
    if module is not None and isinstance(error, subprocess.TimeoutExpired):
        return "time", ""
    if module is not None and isinstance(error, AssertionError | subprocess.CalledProcessError):
        return "wrong", ""

    def is_checked(file: str) -> bool:
        if file.startswith("<"):
            return not file.startswith(_NO_ANSWERS)
        return os.path.realpath(file).startswith(scratch + os.sep)

    if module is not None and isinstance(error, SyntaxError) and is_checked(error.filename or "<unknown>"):
        return "wrong", ""
    module_file = getattr(module, "__file__", None)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if is_checked(file):
            return "wrong", ""
        if file == module_file:
            break
    # Without the frames of this file.
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return "failed", "".join(traceback.format_exception(type(error), error, inner, limit=-8))


def _work(
    hidden: list[Any], report: Callable[[bytes], Any], checker: str, answer: str, row: Any, *, memory: int
) -> None:
    """Check the answer. Whoever looks at frames finds no way to write a verdict: it waits on this frame's stack."""
    module: Any = None
    scratch = os.path.realpath(Path.cwd())
    stop = os._exit
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        path, _, name = checker.partition(":")
        module = importlib.import_module(path)
        check = getattr(module, name)
        report(READY)
        gc.freeze()
        hidden.pop()(hidden.pop()[check(answer, row)])
    except BaseException as error:
        try:
            kind, text = _judged(error, module, scratch)
            report(json.dumps([kind, text[-_LONGEST:]]).encode())
        except BaseException:
            stop(1)
    stop(0)


class _Verdicts(dict[Any, bytes]):
    """What to write for what a checker returns; NumPy's True is Python's."""

    def __getitem__(self, returned: Any) -> bytes:
        try:
            verdict = self.get(returned)
        except TypeError:
            verdict = None
        if verdict is None:
            raise TypeError(f"the checker returned {type(returned).__name__}, which is neither True nor False")
        return verdict


def _main() -> None:
    descriptor, seconds, memory = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    sys.argv[1:] = []
    parent, given = os.getppid(), b""
    while piece := os.read(0, 2**16):
        given += piece
    word, *rest = json.loads(given)
    sys.path += json.loads(os.environ.pop("FINRAY_CHECKER_PATH"))
    _prctl(_SET_CHILD_SUBREAPER, 1)
    scratch, is_first = Path.cwd(), _unshare()
    worker = os.fork()
    if worker:
        os.close(descriptor)
        code = _supervise(worker, seconds, parent, is_first=is_first)
        if os.getppid() != parent:
            os.execvp("rm", ["rm", "-rf", "--", str(scratch)])
        os._exit(code)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if is_first:
        _be_first()
    # A session of its own: the answer may end all of it.
    os.setsid()
    cpu = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
    # Nothing but this list holds the word, and it is empty when the answer's code runs.
    hidden = [
        _Verdicts({verdict: f"{word} {verdict}".encode() for verdict in (True, False)}),
        functools.partial(os.write, descriptor),
    ]
    report = functools.partial(os.write, descriptor)
    del given, word, descriptor
    _work(hidden, report, *rest, memory=memory)


if __name__ == "__main__":
    _main()
