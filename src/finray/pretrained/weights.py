"""The safetensors files of a directory: what their headers say, and rows of their tensors.

Nothing else in finray reads such headers, but for the pieces of an optimizer's state. ``huggingface_hub`` can read them
too, but does not see that a file is cut off; ``safe_open`` does. Torch is imported to read rows only.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from finray.errors import ModelError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, its kind of elements as safetensors names them (``BF16``), and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of a directory.

    Attributes:
        tensors: by name.
        size: bytes of the files.
    """

    tensors: Mapping[str, StoredTensor]
    size: int

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Kinds of elements, the most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += math.prod(tensor.shape)
        return tuple(dtype for dtype, _ in counts.most_common())

    @property
    def elements(self) -> int:
        """In all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have a ``weight``."""
        return sorted(name.removesuffix(".weight") for name in self.tensors if name.endswith(".weight"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor; the whole of one without dimensions."""
        held = self.tensors[name]
        with safe_open(held.file, framework="pt") as file:
            if not held.shape:
                whole: torch.Tensor = file.get_tensor(name)
                return whole
            rows: torch.Tensor = file.get_slice(name)[start : held.shape[0] if stop is None else stop]
            return rows


def stored_weights(folder: Path, stem: str = "model") -> StoredWeights | None:
    """The headers of a directory's safetensors files; None where it has weights of another kind only.

    Args:
        folder: the directory.
        stem: how the names of its files begin.

    Raises:
        ModelError: there are no weights, or a file is missing or cut off.
    """
    index = folder / INDEX
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else None
    except (ValueError, KeyError, AttributeError):
        raise ModelError("the index of the weights cannot be read", where=str(index)) from None
    if named is None or stem != "model":
        files = sorted(folder.glob(f"{stem}*.safetensors"))
    else:
        files = sorted(folder / name for name in named)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(files)} files of weights are missing, such as {missing[0]}",
                where=f"model.name={folder}",
                repair="fetch the model again",
            )
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.gguf")):
            return None
        raise ModelError(
            "the directory holds no weights",
            where=f"model.name={folder}",
            repair="fetch the `.safetensors` files of the model as well",
        )
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    tensors[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"the weights are damaged: {error}", where=str(path), repair="fetch the file again; it may be cut off"
            ) from None
    return StoredWeights(tensors, sum(file.stat().st_size for file in files))
