"""What the headers of a model directory's safetensors files say; no weight is read, and torch is not imported."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finray.errors import ModelError

INDEX = "model.safetensors.index.json"
_MOST_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of a directory.

    Attributes:
        names: of the tensors.
        dtypes: kinds of elements, as safetensors names them (``BF16``), the most frequent first.
        elements: in all tensors.
        size: bytes of the files.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    elements: int
    size: int

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have a ``weight``."""
        return sorted({name.removesuffix(".weight") for name in self.names if name.endswith(".weight")})


def stored_weights(folder: Path) -> StoredWeights | None:
    """The headers of a directory's safetensors files; None where it has weights of another kind only.

    Raises:
        ModelError: there are no weights, or a file is missing or cut off.
    """
    files = _files(folder)
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.gguf")):
            return None
        raise ModelError(
            "the directory holds no weights",
            where=f"model.name={folder}",
            repair="fetch the `.safetensors` files of the model as well",
        )
    names: list[str] = []
    counts: dict[str, int] = {}
    for file in files:
        for name, tensor in _header(file).items():
            names.append(name)
            elements = math.prod(tensor["shape"])
            counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + elements
    dtypes = tuple(sorted(counts, key=lambda dtype: -counts[dtype]))
    return StoredWeights(tuple(names), dtypes, sum(counts.values()), sum(file.stat().st_size for file in files))


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("model*.safetensors"))
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        raise ModelError("the index of the weights cannot be read", where=str(index)) from None
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(named)} files of weights are missing, such as {missing[0]}",
            where=f"model.name={folder}",
            repair="fetch the model again",
        )
    return [folder / name for name in named]


def _header(file: Path) -> dict[str, Any]:
    """Name to dtype, shape and offsets (https://huggingface.co/docs/safetensors)."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _MOST_HEADER):
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if end > size:
            raise ValueError(f"{end - size} bytes are missing at the end")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(
            f"the weights are damaged: {error}", where=str(file), repair="fetch the file again; it may be cut off"
        ) from None
    return header
