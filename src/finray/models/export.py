"""Exports models for other tools, merged or as an adapter, and verifies the written files by loading them."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from finray import compat
from finray.config.adapter_files import NOTES, SETTINGS, WEIGHTS
from finray.config.schema import ModelConfig
from finray.errors import ModelError, did_you_mean_path, require_package
from finray.files import FileKind, hold, remove_abandoned
from finray.limits import cut
from finray.models.adapters import load_adapter
from finray.models.artifacts import Artifact, load_artifact, load_as_trained, merge_adapter
from finray.models.loading import DTYPES, load_model
from finray.models.quantized import BITS
from finray.pretrained.tokenizers import load_tokenizer
from finray.pretrained.weights import processor_files
from finray.results import Result

# Largest difference of a logit, relative to the spread of the logits, that rounding to a dtype explains. In fp32 it is
# 3e-6 of most models; Mamba and Gemma 3n make up to 8e-4 of it.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
# Metadata next to the weights that stays valid after merging.
_KEPT = (
    "rows",
    "task",
    "auto_class",
    "problem",
    "objective",
    "labels",
    "system",
    "tool_format",
    "input_template",
    "chat_template_arguments",
)
_SCRATCH = ".tmp-export-"
_FILES = FileKind(ModelError, repair="take the file from where the adapter was made", links=True)
_PROBE = "The quick brown fox jumps over the lazy dog. 1, 2, 3, 4"


@dataclass(frozen=True, slots=True)
class Exported(Result):
    """An exported model.

    Attributes:
        folder: where.
        merged: whether it is a whole model.
        dtype: of its weights.
        difference: difference of its logits from those of base + adapter, relative to their spread.
        onto: the base model that an adapter was merged onto.
        trained_on: quantization of that base in training, if any: ``4bit`` or ``8bit``.
        rounding: difference of its logits from those of the quantized base + adapter, which learned to correct the
            rounding too; None without quantization, or if bitsandbytes is missing.
    """

    folder: Path
    merged: bool
    dtype: str
    difference: float
    onto: str | None = None
    trained_on: str | None = None
    rounding: float | None = None

    def plain(self) -> dict[str, Any]:
        """The export as JSON types."""
        return {**asdict(self), "folder": str(self.folder)}

    def print(self, console: Console) -> None:
        """Where it was written, and how close it is to the trained model."""
        what = f"model in {self.dtype}" if self.merged else "adapter"
        lines = [
            f"wrote the {what} to {self.folder}",
            f"loaded it again: logits differ by {self.difference:.1e} of their spread, which is within the rounding of "
            + self.dtype,
        ]
        if self.onto is not None:
            lines.append(f"merged onto {self.onto} in full precision")
        if self.trained_on is not None:
            measured = "not measured, because bitsandbytes is not installed"
            if self.rounding is not None:
                measured = f"differ by {self.rounding:.1e} of their spread"
            lines.append(f"the base was in {self.trained_on} during training: logits {measured}")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)


def export(artifact: Artifact, output: Path, *, merge: bool, dtype: str, max_shard_size: str | None = None) -> Exported:
    """Write a model directory that plain Transformers (or PEFT, for an adapter) loads.

    Args:
        artifact: the trained model.
        output: directory to create; it must not exist, or be empty.
        merge: merge the adapter into the base weights.
        dtype: ``fp32``, ``bf16`` or ``fp16``, for the merged weights.
        max_shard_size: maximum size of a weight file, such as ``5GB``; None means Transformers' default.

    Raises:
        ModelError: the output exists or cannot be written, or does not give the same logits when it is loaded.
    """
    require_new(output)
    base, notes = artifact.base, artifact.notes
    if not merge and base is None:
        raise ModelError(
            "there is no adapter: all weights were trained",
            where=str(artifact.folder),
            repair="leave --adapter out to write the full model",
        )
    if max_shard_size is not None and not re.fullmatch(r"[1-9]\d*[KMGT]B", max_shard_size):
        raise ModelError(
            f"`{max_shard_size}` is not a file size", where="--max-shard-size", repair="write it as 5GB or 500MB"
        )
    if max_shard_size is not None and not merge:
        raise ModelError(
            "an adapter is one file", where="--max-shard-size", repair="leave out --max-shard-size or --adapter"
        )
    with _scratch(output) as scratch:
        tokenizer = load_tokenizer(ModelConfig(name=str(artifact.folder)))
        probe = _probe(tokenizer)
        trained = load_artifact(artifact, dtype=torch.float32)
        expected = _logits(trained, probe)
        if not merge:
            assert base is not None
            used = "fp32"
            shutil.copy2(artifact.folder / WEIGHTS, scratch / WEIGHTS)
            for name, field in ((SETTINGS, "base_model_name_or_path"), (NOTES, "base_model")):
                if (artifact.folder / name).is_file():
                    content = _FILES.json(artifact.folder / name, dict[str, Any])
                    _write_json(scratch / name, {**content, field: base.name})
            again = load_adapter(load_model(base, dtype=torch.float32, labels=artifact.labels), scratch)
        else:
            used = dtype
            whole = trained if base is None else merge_adapter(trained)
            if base is None:
                compat.publish(whole)
            if dtype == "fp16":
                _require_range(whole, output)
            options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            # Not `to`: complex numbers of rotary embeddings would lose a half.
            for tensor in (*whole.parameters(), *whole.buffers()):
                tensor.data = tensor.data.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor.data
            whole.save_pretrained(str(scratch), **options)
            for name, prepares in processor_files(artifact.model).items():
                (scratch / name).write_bytes(prepares)
            written = ModelConfig(name=str(scratch), task=artifact.model.task)
            again = load_model(written, dtype=torch.float32).eval()
        tokenizer.save_pretrained(str(scratch))
        difference = relative_difference(expected, _logits(again, probe))
        if not difference <= TOLERANCE[used]:
            raise ModelError(
                f"the logits of the written model differ from the trained one (relative difference {difference:.2e}; "
                f"rounding explains at most {TOLERANCE[used]:.0e})",
                where=str(output),
                repair="the output was deleted; try --dtype fp32, or report this with the model's name",
            )
        facts: dict[str, Any] = {**notes}
        kept = {name: facts[name] for name in _KEPT if name in facts}
        if base is None and kept:
            _write_json(scratch / NOTES, kept)
        if base is None or not merge:
            return Exported(output, not artifact.is_adapter, used, difference)
        stored = notes.get("quantization")
        trained_on = stored if stored in BITS else None
        rounding = None
        if trained_on is not None and find_spec("bitsandbytes") is not None:
            del trained
            packed = load_as_trained(artifact, bits=BITS[trained_on])
            rounding = relative_difference(_logits(packed, probe), _logits(again, probe))
        exported: dict[str, Any] = {**kept, "merged_onto": base.name, "revision": base.revision}
        exported |= {"trained_on": trained_on or "full precision", "difference_from_training": rounding or difference}
        _write_json(scratch / NOTES, exported)
        return Exported(output, True, used, difference, base.name, trained_on, rounding)


def require_new(output: Path) -> None:
    """Check that a directory does not exist yet, or is empty. Raises ModelError: it is not."""
    if output.resolve() == Path.cwd():
        raise ModelError("the output directory is the working directory", where=str(output), repair="name a new one")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError("the output directory is not empty", where=str(output), repair="choose a new directory")


def _require_range(model: Any, output: Path) -> None:
    """Refuse weights that would become infinite in fp16: few of them show in the logits of a short text."""
    most = torch.finfo(torch.float16).max
    for name, parameter in model.named_parameters():
        if parameter.numel() and (largest := max(abs(float(end)) for end in torch.aminmax(parameter.detach()))) > most:
            raise ModelError(
                f"{name} holds {largest:.3g}, and the largest number of fp16 is {most:.3g}",
                where=str(output),
                repair="use --dtype bf16 or fp32",
            )


def convert_gguf(file: Path, output: Path, *, dtype: str) -> None:
    """Dequantize a GGUF file into a directory with safetensors, its tokenizer and its chat template.
    Raises ModelError: the file cannot be read, the `gguf` package is missing, or the output exists."""
    if output.exists():
        raise ModelError("the output already exists", where=str(output), repair="choose a new directory")
    if not file.is_file():
        raise ModelError(
            "this is no file" if file.exists() else f"the file does not exist{did_you_mean_path(file, '*.gguf')}",
            where=str(file),
            repair="give a .gguf file",
        )
    require_package("reading a GGUF file", "gguf", extra="gguf")
    model = ModelConfig(name=str(file))
    with _scratch(output) as scratch:
        loaded = load_model(model, dtype=torch.float32 if dtype == "fp16" else DTYPES[dtype])
        if dtype == "fp16":
            _require_range(loaded, output)
            loaded = loaded.half()
        loaded.save_pretrained(str(scratch))
        load_tokenizer(model).save_pretrained(str(scratch))


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A directory to fill, which is then renamed to the output; it is removed on failure.

    The process that fills it holds its lock: the model-sized remains of a killed export are removed by the next one
    next to it.
    """
    remove_abandoned(output.parent, _SCRATCH)
    scratch, lock = output.with_name(f"{_SCRATCH}{output.name}-{uuid.uuid4().hex[:8]}"), None
    try:
        scratch.mkdir(parents=True)
        lock = hold(scratch)
        yield scratch
        # safetensors creates files that only their owner can read; a server may run as another user.
        mode = (scratch / "tokenizer_config.json").stat().st_mode
        for weights in scratch.glob("*.safetensors"):
            weights.chmod(mode)
        if output.exists():
            output.rmdir()
        os.replace(scratch, output)
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as text.
        why = (isinstance(error, OSError) and error.strerror) or cut(str(error))
        raise ModelError(
            f"the model cannot be written: {why}",
            where=str(output),
            repair="free some disk space, or choose another directory",
        ) from None
    finally:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(scratch, ignore_errors=True)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def probe_logits(model: Any, folder: Path) -> torch.Tensor:
    """Logits of a short text, with the tokenizer of a directory."""
    return _logits(model.eval(), _probe(load_tokenizer(ModelConfig(name=str(folder)))))


def _probe(tokenizer: Any) -> torch.Tensor:
    return torch.tensor([tokenizer(_PROBE, add_special_tokens=False)["input_ids"]])


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=tokens).logits.float()
    return result


def relative_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Difference of logits, relative to their spread."""
    # A classifier has few logits: use their magnitude instead of the spread.
    spread = expected.std() if expected.ndim == 3 else expected.abs().max()
    return float((expected - actual).abs().max() / spread)
