"""Text logs in the run directory: of the command, and copies of those of the workers. Ray's own logs are on the
worker's machine, and may be lost with it."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from finray.config.redact import redact_text
from finray.files import appending, opened
from finray.records import EvalRecord, Note, PrepareProgress, Record, RunHeader, TrainRecord

_PAUSE_S = 2.0
_MOST_BYTES = 20 * 2**20
_TAIL_BYTES = 64 * 2**10
_SHOWN = 5


class RecordLog:
    """Appends the records of a run to a file as lines of text, each with its time; failures to write are ignored."""

    def __init__(self, target: Path, title: str) -> None:
        self._target, self._steps = target, 0
        with suppress(OSError):
            target.parent.mkdir(exist_ok=True)
        self.write(f"== {title}")

    def write(self, text: str) -> None:
        """Append text, which may have several lines."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        # In the run directory, whose `logs` may be a link if somebody else has made it.
        with suppress(OSError), appending(self._target, self._target.parent.parent) as stream:
            stream.writelines(f"{now} {line}\n".encode() for line in redact_text(text).splitlines())

    def log(self, record: Record) -> None:
        """Append a record."""
        # Workers import this module as well, and need no Rich.
        from finray.tracking.console import describe, header_lines

        if isinstance(record, RunHeader):
            self._steps = record.total_steps
            self.write("\n".join(header_lines(record)))
        elif isinstance(record, Note):
            self.write(f"{'warning: ' * (record.level == 'warning')}{record.message}")
        elif isinstance(record, TrainRecord | EvalRecord):
            self.write(f"step {record.step}/{self._steps}  {describe(record)}")
        elif isinstance(record, PrepareProgress) and record.done == record.total:
            self.write(f"prepared {record.rows:,} rows in {record.seconds:.0f} s")


class LogCopy:
    """Appends what is written to files to another file, in a thread, until closed.

    Args:
        target: grows to at most 20 MB.
        sources: files that others write to; their existing content is not copied.
        title: the first line.
        pause_s: seconds between polls.
    """

    def __init__(self, target: Path, sources: Sequence[Path], *, title: str, pause_s: float = _PAUSE_S) -> None:
        self._target, self._pause_s, self._left = target, pause_s, _MOST_BYTES
        self._read = {path: path.stat().st_size for path in sources}
        self._closed = threading.Event()
        self._one_at_a_time = threading.Lock()
        with suppress(OSError):
            target.parent.mkdir(exist_ok=True)
            with appending(target, target.parent.parent) as stream:
                stream.write(f"== {title}\n".encode())
        threading.Thread(target=self._work, name="finray-log", daemon=True).start()

    @classmethod
    def of_this_process(cls, target: Path) -> LogCopy:
        """Copies this process's standard output and standard error, if these are files."""
        sources: dict[Path, None] = {}
        for number in (1, 2):
            with suppress(OSError):
                if stat.S_ISREG(os.fstat(number).st_mode):
                    sources[Path(f"/proc/self/fd/{number}").readlink()] = None
        files = [path for path in sources if path.is_file()]
        return cls(target, files, title=f"{time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()}")

    def last(self) -> list[str]:
        """The last lines printed so far."""
        self._copy()
        return [line for line in tail(self._target, _SHOWN) if not line.startswith("== ")]

    def close(self) -> None:
        """Copy the rest and stop."""
        self._closed.set()
        self._copy()

    def _work(self) -> None:
        while not self._closed.wait(self._pause_s):
            self._copy()

    def _copy(self) -> None:
        # A full disk must not end the run.
        with self._one_at_a_time, suppress(OSError):
            for path, start in self._read.items():
                if self._left <= 0 or path.stat().st_size <= start:
                    continue
                with opened(path) as source, appending(self._target, self._target.parent.parent) as stream:
                    source.seek(start)
                    content = source.read(self._left)
                    if not self._closed.is_set():
                        # Secrets are masked in whole lines only.
                        content = content[: content.rfind(b"\n") + 1]
                    stream.write(redact_text(content.decode("utf-8", errors="replace")).encode())
                self._read[path], self._left = start + len(content), self._left - len(content)


def tail(path: Path, lines: int = 10) -> list[str]:
    """The last lines of a log; none if there is no log."""
    try:
        with opened(path) as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            printed = stream.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return printed[-lines:]
