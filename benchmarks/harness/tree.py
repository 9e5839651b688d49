"""A process with all that it started: how much memory they hold together, and how they are ended.

Memory is read from `/proc` every `INTERVAL_S`; peaks between two readings are missed. Two sums are kept:

* resident: `VmRSS` of every process of the tree. A page that several processes map counts once for each of them: what
  forked processes still share with their parent, mapped files, and Ray's object store.
* proportional: `Pss` of `smaps_rollup`, in which a page shared by n processes counts 1/n for each, so once in all. It
  costs more to read and is read at every fifth reading.

A tree is what descends from its root. A member stays one when its parent ends before it; a process that is started and
loses its parent between two readings is not seen.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.2
_PROPORTIONAL_EVERY = 5


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes that a tree held at one time."""

    resident: int
    proportional: int


class ProcessTree:
    """The processes that descend from one."""

    def __init__(self, root: int) -> None:
        self._root = root
        # Process id to start time: the kernel gives ids out again.
        self._members = {root: _start_time(root)}

    def refresh(self) -> list[int]:
        """Ids of the members that are alive."""
        alive = _processes()
        members = {pid: start for pid, start in self._members.items() if pid in alive and alive[pid][1] == start}
        while new := {pid for pid, (parent, _) in alive.items() if parent in members and pid not in members}:
            members.update({pid: alive[pid][1] for pid in new})
        self._members = members
        return list(members)

    def end(self, *, patience_s: float) -> None:
        """Ask the root to end, and after a while kill what is left of the tree."""
        if self._root in self.refresh():
            _send(self._root, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in self._running():
            _send(pid, signal.SIGKILL)

    def _running(self) -> list[int]:
        return [pid for pid in self.refresh() if _state(pid) not in ("Z", "X", "")]


class MemoryWatch:
    """Keeps the peaks of a tree, from a thread, until `stop`."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._stopped = threading.Event()
        self._resident = self._proportional = 0
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._thread.start()

    def stop(self) -> Peaks:
        """The peaks since the watch was made."""
        self._stopped.set()
        self._thread.join()
        return Peaks(self._resident, self._proportional)

    def _watch(self) -> None:
        reading = 0
        while not self._stopped.wait(INTERVAL_S):
            members = self._tree.refresh()
            self._resident = max(self._resident, sum(_resident(pid) for pid in members))
            if reading % _PROPORTIONAL_EVERY == 0:
                self._proportional = max(self._proportional, sum(_proportional(pid) for pid in members))
            reading += 1


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _read(path: str) -> str:
    """A file of `/proc`; empty when its process has ended or belongs to somebody else."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(pid: int | str) -> list[str]:
    """What follows the name in `stat`: state, parent, ...; the name may hold spaces and parentheses."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _processes() -> dict[int, tuple[int, str]]:
    """Process id to its parent's id and its start time."""
    found = {}
    for name in (entry.name for entry in Path("/proc").iterdir()):
        if name.isdigit() and (fields := _fields(name)):
            found[int(name)] = (int(fields[1]), fields[19])
    return found


def _start_time(pid: int) -> str:
    fields = _fields(pid)
    return fields[19] if fields else ""


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else ""


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _proportional(pid: int) -> int:
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
