"""Saves what an evaluation computes as it goes: a killed one continues without computing anything twice."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from finray.errors import FinrayError
from finray.files import FileKind, appending, lines_of, seal_of

_FILES = FileKind(FinrayError, repair="delete it to compute the answers again", limit=2**40)


def _line(content: Mapping[str, Any]) -> bytes:
    """A line with the checksum of its content."""
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return text[:-1] + b', "crc32": %d}\n' % zlib.crc32(text)


class ResultCache:
    """Lines of an append-only file, one per row; named by a digest of what they depend on.

    A line that is damaged, or has no checksum because an earlier version wrote it, is computed again.

    Args:
        folder: of the evaluation.
        kind: ``answers``, ``losses``, ``choices``, ``labels`` or ``harness``.
        key: everything that a line depends on, as JSON types: model, data, sampling, engine.
    """

    def __init__(self, folder: Path, kind: str, key: Mapping[str, Any]) -> None:
        self._path = folder / f"{kind}-{seal_of(key)[:16]}.jsonl"
        self._key = key
        # By row.
        self.values: dict[int, Any] = {}
        # The engines that computed them.
        self.made_by: list[dict[str, str]] = []
        self._whole = 0
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        with _FILES.opened(self._path) as stream:
            for number, line in enumerate(lines_of(stream)):
                # A kill may leave a line without its end, and nothing after it.
                if not line.endswith(b"\n"):
                    break
                self._whole += len(line)
                try:
                    content = json.loads(line)
                    del content["crc32"]
                except (ValueError, RecursionError, TypeError, KeyError):
                    content = {}
                if _line(content) != line:
                    # A change that nobody meant: the row is computed again.
                    content = {}
                if not number and content.get("belongs_to") != json.loads(json.dumps(self._key)):
                    # Not what the name says.
                    self._whole = 0
                    break
                if "made_by" in content:
                    self.made_by.append(content["made_by"])
                elif "row" in content:
                    self.values[content["row"]] = content["value"]

    @contextmanager
    def writer(self, *, made_by: Mapping[str, str]) -> Iterator[Callable[[int, Any], None]]:
        """Yields a function that saves the result of a row; once it returns, the result survives the process.
        ``made_by`` is the engine that computes them, with its version. Raises FinrayError: they cannot be written."""
        with self._writing():
            stream = appending(self._path)
            stream.truncate(self._whole)

        def write(content: Mapping[str, Any]) -> None:
            with self._writing():
                stream.write(_line(content))
                stream.flush()

        def add(row: int, value: Any) -> None:
            write({"row": row, "value": value})
            self.values[row] = value

        try:
            if not self._whole:
                write({"belongs_to": self._key})
            if dict(made_by) not in self.made_by[-1:]:
                write({"made_by": made_by})
                self.made_by.append(dict(made_by))
            yield add
        finally:
            # Retries a line that did not fit on the disk.
            with suppress(OSError):
                stream.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FinrayError(
                f"answers cannot be written: {error.strerror or error}",
                where=str(self._path),
                repair="free some disk space or fix the permissions; the same command reuses the saved answers",
            ) from None
