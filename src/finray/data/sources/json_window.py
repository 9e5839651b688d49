"""JSON values one after the other from a stream that is too large to be held."""

from __future__ import annotations

import codecs
import json
import re
from typing import IO, Any

from finray.errors import DataError

CHUNK = 2**20
_DECODER = json.JSONDecoder()
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def why_no_json(error: Exception) -> str:
    """The reason why a text could not be parsed, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


class GrowingText:
    """A window of text over a stream. Bytes that are not UTF-8 come through as lone surrogates."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        self._text = ""
        self._at = 0

    def _grow(self) -> bool:
        chunk = self._stream.read(CHUNK)
        self._text = self._text[self._at :] + self._decode(chunk, final=not chunk)
        self._at = 0
        return bool(chunk)

    def head(self) -> str:
        """The next character; empty at the end."""
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str) -> bool:
        """Pass over characters; False at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in characters:
                self._at += 1
            if self._at < len(self._text):
                return True
            if not self._grow():
                return False

    def drop(self) -> None:
        """Pass over one character."""
        self._at += 1

    def take(self, number: int, file: str, limit: int) -> tuple[Any, str] | None:
        """The next value and its text; None, and past it, where it is too large to be held."""
        most = max(limit, CHUNK)
        while True:
            try:
                value, stop = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at <= most and self._grow():
                    continue
                if self._skip_value() > most:
                    return None
                raise DataError(
                    f"the row is not JSON: {why_no_json(error)}",
                    where=f"{file}:{number}",
                    repair="mend the file; the rows after this one cannot be found",
                ) from None
            raw = self._text[self._at : stop]
            self._at = stop
            return value, raw

    def _skip_value(self) -> int:
        """Pass over an object or list without parsing it; its length, or 0 where it does not end."""
        depth, quoted, passed = 0, False, 0
        while True:
            start = self._at
            for match in _STRUCTURE.finditer(self._text, self._at):
                mark = match[0]
                if mark == '"':
                    quoted = not quoted
                elif not quoted and mark[0] != "\\":
                    depth += 1 if mark in "{[" else -1
                self._at = match.end()
                if depth <= 0 and not quoted:
                    return passed + self._at - start
            # A backslash at the end is part of an escape that goes on in the next chunk.
            self._at = max(self._at, len(self._text) - self._text.endswith("\\"))
            passed += self._at - start
            if not self._grow():
                return 0
