"""Row-sharded tensors, in one safetensors file per rank; readable by any number of ranks.

The header of every file says which rows of which tensor it holds, so no separate index is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finray.errors import CheckpointError
from finray.files import FileKind

_ROWS = "rows"
_FILES = FileKind(CheckpointError)


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Some rows of a tensor."""

    name: str  # of the whole tensor
    tensor: torch.Tensor  # rows ``start`` to ``start + len(tensor)``; the whole tensor if it has no dimensions
    start: int  # first row; if ``flat``, first element
    shape: tuple[int, ...]  # of the whole tensor
    flat: bool = False  # whether ``tensor`` is 1-D and holds elements, which may end in the middle of a row


def file_name(stem: str, *, rank: int, world_size: int) -> str:
    """``optimizer-00001-of-00004.safetensors`` for the second of four ranks."""
    return f"{stem}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def write_pieces(path: Path, pieces: Iterable[TensorPiece]) -> None:
    """Write the pieces of one rank."""
    held = sorted(pieces, key=lambda piece: piece.name)
    rows = {
        piece.name: {"start": piece.start, "shape": list(piece.shape)} | ({"flat": True} if piece.flat else {})
        for piece in held
    }
    save_file({piece.name: piece.tensor.contiguous() for piece in held}, path, metadata={_ROWS: json.dumps(rows)})


@dataclass(frozen=True, slots=True)
class _Rows:
    """The entry of a tensor in the header of a file; see :class:`TensorPiece`."""

    start: int
    shape: tuple[int, ...]
    flat: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """Elements of a tensor in one file; ``width`` of them for each step along its first dimension."""

    path: Path
    start: int
    stop: int
    width: int


class PieceReader:
    """Reads any rows of tensors, for any number of writing ranks.

    Args:
        folder: directory of the files.
        stem: prefix of their names.
        files: names of those that the manifest lists; others are ignored.

    Raises:
        CheckpointError: there is no such file, or one is incomplete.
    """

    def __init__(self, folder: Path, stem: str, files: Iterable[str]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._held: dict[str, list[_Held]] = {}
        paths = sorted(folder / name for name in files if fnmatchcase(name, f"{stem}-*-of-*.safetensors"))
        if not paths:
            raise CheckpointError(f"there is no {stem} state", where=str(folder))
        for path in paths:
            _FILES.require(path, folder)
            with _FILES.reading(path, also=(SafetensorError,)), safe_open(path, framework="pt") as file:
                content = (file.metadata() or {}).get(_ROWS, "{}").encode()
                rows = _FILES.parsed(content, dict[str, _Rows], path)
                for name, entry in rows.items():
                    shape = entry.shape
                    self.shapes[name] = shape
                    width = 1 if entry.flat else math.prod(shape[1:])
                    count = file.get_slice(name).get_shape()[0] if shape else 1
                    held = _Held(path, entry.start * width, (entry.start + count) * width, width)
                    self._held.setdefault(name, []).append(held)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor; all rows by default. Raises CheckpointError: rows are missing."""
        shape = self.shapes.get(name)
        if shape is None:
            raise CheckpointError(f"there is no tensor {name}")
        pieces = sorted(self._held[name], key=lambda held: held.start)
        if not shape:
            with safe_open(pieces[0].path, framework="pt") as file:
                scalar: torch.Tensor = file.get_tensor(name)
                return scalar
        stop = shape[0] if stop is None else stop
        row = math.prod(shape[1:])
        parts, at, end = [], start * row, stop * row
        for held in pieces:
            low, high = max(held.start, at), min(held.stop, end)
            if low < high:
                if low != at:
                    break
                with safe_open(held.path, framework="pt") as file:
                    first, last = (low - held.start) // held.width, -(-(high - held.start) // held.width)
                    part = file.get_slice(name)[first:last].reshape(-1)
                skipped = low - held.start - first * held.width
                parts.append(part[skipped : skipped + high - low])
                at = high
        if at < end:
            raise CheckpointError(f"rows {at // row} to {stop} of {name} are missing")
        whole = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(0)
        return whole.reshape(stop - start, *shape[1:])
