"""The safetensors files of a directory: what their headers say, and rows of their tensors.

Nothing else in finray reads such headers, but for the pieces of an optimizer's state. ``huggingface_hub`` can read them
too, but does not see that a file is cut off; ``safe_open`` does. Torch is imported to read rows only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from finray.config.adapter_files import PROCESSOR_FILES
from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.files import FileKind

if TYPE_CHECKING:
    import torch

_FILES = FileKind(ModelError, repair="fetch the file again; it may be cut off", links=True)
# What Transformers calls the pickled weights whose safetensors are called so.
_PICKLED = {"model": "pytorch_model"}
# Kinds of elements that are numbers by themselves. The others are codes, which mean something with their scales only.
_NUMBERS = ("F64", "F32", "F16", "BF16")
# Names that libraries for quantized weights give to scales and codes: bitsandbytes, GPTQ, AWQ, compressed-tensors,
# DeepSeek's and NVIDIA's FP8 and FP4, MXFP4, torchao, HQQ.
_OF_QUANTIZED = re.compile(
    r"(^|\.)(SCB|(nested_)?(absmax|quant_map)|quant_state\..+|weight_format|q?scales|q?zeros|g_idx|qweight|W_q)$"
    r"|(^|[._])(weight|input|activation|proj)_(scale|scales|scale_inv|scale_2|zero_point|packed|blocks|g_idx)$"
    r"|(^|[._])scale_inv$"
)


@dataclass(frozen=True, slots=True)
class _WeightIndex:
    """Which file has which tensor, beside several files of weights."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, its kind of elements as safetensors names them (``BF16``), and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of a directory."""

    tensors: Mapping[str, StoredTensor]  # by name
    size: int  # bytes of the files

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Kinds of elements, the most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += math.prod(tensor.shape)
        return tuple(dtype for dtype, _ in counts.most_common())

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have a ``weight``."""
        return sorted(name.removesuffix(".weight") for name in self.tensors if name.endswith(".weight"))

    def coded(self, names: Iterable[str]) -> list[str]:
        """Those of these tensors whose elements are no numbers by themselves, with their kind."""
        held = ((name, self.tensors[name].dtype) for name in sorted(names))
        return [f"{name} ({dtype})" for name, dtype in held if dtype not in _NUMBERS]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor; the whole of one without dimensions."""
        held = self.tensors[name]
        with safe_open(_FILES.require(held.file), framework="pt") as file:
            if not held.shape:
                whole: torch.Tensor = file.get_tensor(name)
                return whole
            rows: torch.Tensor = file.get_slice(name)[start : held.shape[0] if stop is None else stop]
            return rows


def stored_weights(folder: Path, stem: str = "model", *, files: Collection[str] | None = None) -> StoredWeights | None:
    """The headers of a directory's safetensors files; None where its weights are pickled.

    Which files those are is what Transformers and PEFT go by: the one named after the stem, else those of the index.
    Others that lie there are not looked at.

    Args:
        folder: the directory.
        stem: name of the weights' file, without its suffix.
        files: the only ones to look at, where a manifest lists them.

    Raises:
        ModelError: there are no weights, or a file is missing, cut off or cannot be read.
    """

    def there(name: str) -> bool:
        return name in files if files is not None else (folder / name).is_file()

    def named(name: str) -> list[Path]:
        """The files of weights of one kind: the only one, or those of an index."""
        if there(name):
            return [folder / name]
        index = folder / f"{name}.index.json"
        if not there(index.name):
            return []
        parts = _FILES.json(index, _WeightIndex).weight_map.values()
        paths = sorted({_FILES.inside(folder, part, where=index) for part in parts})
        missing = [path.name for path in paths if not there(path.relative_to(folder).as_posix())]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(paths)} weight files are missing, such as {missing[0]}",
                where=f"model.name={folder}",
                repair="download the model again, with all of its `.safetensors` files",
            )
        return paths

    paths = named(f"{stem}.safetensors")
    if not paths:
        if named(f"{_PICKLED.get(stem, stem)}.bin"):
            return None
        raise ModelError(
            "the directory holds no weights",
            where=f"model.name={folder}",
            repair="download the model's `.safetensors` files as well, with their names from the Hub"
            + ("; for a GGUF file, give the file itself" if any(folder.glob("*.gguf")) else ""),
        )
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        # Whatever is in a header, which others have written.
        with _FILES.reading(path, also=(Exception,)), safe_open(_FILES.require(path), framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                tensors[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
    stored = StoredWeights(tensors, sum(path.stat().st_size for path in paths))
    if stem != "model" and (coded := stored.coded(tensors)):
        raise ModelError(
            f"tensors of an adapter are no floating-point numbers: {_first(coded)}",
            where=str(folder),
            repair="take an adapter that is not quantized",
        )
    return stored


def like_scales(names: Iterable[str]) -> list[str]:
    """Names of tensors that look like the scales or codes of quantized weights."""
    return sorted(name for name in names if _OF_QUANTIZED.search(name))


def require_numbers(coded: list[str], scales: list[str], where: str) -> None:
    """Refuse files of quantized weights that would be read as numbers.

    Args:
        coded: weights whose elements are no numbers by themselves (:meth:`StoredWeights.coded`).
        scales: tensors beside them that the model does not have (:func:`like_scales`).
        where: the model.

    Raises:
        ModelError: there are some.
    """
    if coded or scales:
        what = f"have weights of a type that is no floating-point number: {_first(coded)}"
        if not coded:
            what = f"have what look like scales of quantized weights: {_first(scales)}"
        raise ModelError(
            f"its files {what}; the weights would be read as plain numbers",
            where=f"model.name={where}",
            repair="give its `config.json` the `quantization_config` that the weights were made with, or take the "
            "model's weights in bf16",
        )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def folder_of(model: ModelConfig, *, local: bool = False) -> Path | None:
    """Where the files of a model lie: its directory, or the cache of the Hub; None where that cannot be told.

    With ``local`` nothing is downloaded, and the Hub is not asked.
    """
    path = Path(model.name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.name, revision=model.revision, allow_patterns=["*.safetensors", "*.json"], local_files_only=local
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None


def processor_files(model: ModelConfig) -> dict[str, bytes]:
    """The files of a model that turn images into its input, by name; of one on the Hub as they are in the cache."""
    folder = folder_of(model, local=True)
    if folder is None:
        return {}
    return {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}
