"""What an evaluation has computed, kept as it comes: a killed one goes on, and computes nothing twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from finray.errors import FinrayError
from finray.files import FileKind, seal_of

_FILES = FileKind(FinrayError, repair="delete it, to compute its answers anew", limit=2**40)


class Kept:
    """Lines of an append-only file, one for each row; named by a digest of what they belong to.

    Args:
        folder: of the evaluation.
        kind: ``answers``, ``losses`` or ``choices``.
        belongs: all that a line follows from, as JSON types: model, data, sampling, engine.
    """

    def __init__(self, folder: Path, kind: str, belongs: Mapping[str, Any]) -> None:
        self._path = folder / f"{kind}-{seal_of(belongs)[:16]}.jsonl"
        self._belongs = belongs
        # By row.
        self.found: dict[int, Any] = {}
        # What computed them.
        self.made_by: list[dict[str, str]] = []
        self._whole = 0
        if self._path.is_file():
            self._read()

    def _read(self) -> None:
        with _FILES.reading(self._path), self._path.open("rb") as stream:
            for number, line in enumerate(stream):
                # What a kill cut off has no end; what comes after it is not there.
                if not line.endswith(b"\n"):
                    break
                content = json.loads(line)
                if "made_by" in content:
                    self.made_by.append(content["made_by"])
                elif number:
                    self.found[int(content["row"])] = content["value"]
                self._whole += len(line)

    @contextmanager
    def adding(self, *, made_by: Mapping[str, str]) -> Iterator[_Adding]:
        """Lines may be added inside the block.

        Args:
            made_by: what computes them, with its version.

        Raises:
            FinrayError: they cannot be written.
        """
        try:
            with self._path.open("ab") as stream:
                stream.truncate(self._whole)
                if not self._whole:
                    stream.write(_line({"belongs_to": self._belongs}))
                if dict(made_by) not in self.made_by[-1:]:
                    stream.write(_line({"made_by": made_by}))
                    self.made_by.append(dict(made_by))
                yield _Adding(stream, self.found)
        except OSError as error:
            raise FinrayError(
                f"answers cannot be written: {error.strerror or error}", where=str(self._path), repair="make room there"
            ) from None


class _Adding:
    def __init__(self, stream: BinaryIO, found: dict[int, Any]) -> None:
        self._stream, self._found = stream, found

    def add(self, row: int, value: Any) -> None:
        """Keep what a row came to; it survives the process from here on."""
        self._stream.write(_line({"row": row, "value": value}))
        self._stream.flush()
        self._found[row] = value


def _line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
