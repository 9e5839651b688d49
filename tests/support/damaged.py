"""Files that were damaged, or that cannot be read, as storage does it."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

# Of any file: what is drawn must not depend on its size, which may be another at the next example.
_PLACES = st.integers(0, 2**40)


def unreadable(file: Path, monkeypatch: pytest.MonkeyPatch, number: int = errno.EACCES) -> None:
    """Let every attempt of this process to read a file fail, also root's."""
    opened = io.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(name, str | os.PathLike) and Path(name) == file:
            raise OSError(number, os.strerror(number), str(name))
        return opened(name, *arguments, **options)

    # What `Path.open` and `Path.read_text` call.
    monkeypatch.setattr(io, "open", refuse)


def flip_bit(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def draw(file: Path, data: st.DataObject) -> None:
    """One flipped bit anywhere, or a cut, in a file of any size."""
    size = file.stat().st_size
    if data.draw(st.booleans(), label="flip"):
        flip_bit(file, data.draw(_PLACES, label="bit") % (8 * size))
    else:
        file.write_bytes(file.read_bytes()[: data.draw(_PLACES, label="keep") % size])
