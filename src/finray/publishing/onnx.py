"""Exports a classifier as an ONNX file with torch's exporter, and compares it with the model in ONNX Runtime."""

from __future__ import annotations

import inspect
import logging
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from finray.config.schema import ModelConfig
from finray.errors import ModelError, require_package
from finray.evaluation.artifacts import export_model, find_artifact
from finray.files import first_line, require_writable
from finray.models.export import relative_difference, require_new
from finray.models.loading import load_model
from finray.pretrained.tokenizers import load_tokenizer
from finray.results import Result

FILE = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# Maximum difference of logits, relative to their magnitude: both sides compute in fp32.
TOLERANCE = 1e-3
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_TEXTS = ("The quick brown fox jumps over the lazy dog.", "1, 2, 3", "yes")
# A file in ONNX's format has at most 2 GiB; larger weights go to a file next to it.
_LARGEST = 2**31 - 2**24


@dataclass(frozen=True, slots=True)
class OnnxExported(Result):
    """An exported ONNX file.

    Attributes:
        file: the ONNX file; the tokenizer and ``config.json`` with the labels are next to it.
        inputs: names of its inputs, each of shape (batch, tokens); its output is ``logits``.
        difference: difference of its logits in ONNX Runtime from those of the merged fp32 weights, relative to their
            magnitude.
    """

    file: Path
    inputs: tuple[str, ...]
    difference: float

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {**asdict(self), "file": str(self.file), "inputs": list(self.inputs)}

    def print(self, console: Console) -> None:
        """Where it was written, and how close it is to the trained model."""
        lines = [f"wrote {self.file} (inputs {', '.join(self.inputs)}; output logits) and its tokenizer beside it"]
        lines.append(f"ran it with ONNX Runtime: logits differ by {self.difference:.1e} of their magnitude")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)


def export_onnx(path: str | Path, output: Path, *, base: str | None = None) -> OnnxExported:
    """Write a classifier as ``model.onnx`` in fp32, for batches and texts of any length.

    Args:
        path: a run, checkpoint or model directory, or the URL of a run; an adapter is merged.
        output: directory to create.
        base: base model of an adapter, if it has moved.

    Raises:
        ModelError: a package is missing, the model is not a classifier or cannot be exported, or the file's logits
            differ from the model's.
    """
    require_new(output)
    for name in PACKAGES:
        require_package("exporting to ONNX", name, extra="onnx", where="--onnx")
    artifact = find_artifact(path, base=base)
    if artifact.labels is None:
        raise ModelError(
            "only classifiers are exported to ONNX",
            where=str(artifact.folder),
            repair="leave out --onnx",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    require_writable(output.parent)
    with tempfile.TemporaryDirectory(prefix=".tmp-onnx-", dir=output.parent) as scratch:
        merged = Path(scratch) / "merged"
        export_model(artifact.folder, merged, dtype="fp32", base=base)
        named = ModelConfig(name=str(merged), task=artifact.model.task)
        model, tokenizer = load_model(named, dtype=torch.float32).eval(), load_tokenizer(named)
        model.config.get_text_config().use_cache = False
        parameters = inspect.signature(model.forward).parameters
        inputs = tuple(name for name in _INPUTS if name in parameters and name in tokenizer.model_input_names)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if (text_config := model.config.get_text_config()).pad_token_id is None:
            # A decoder pools the last token that is not padding, so it must know it to take several texts.
            text_config.pad_token_id = tokenizer.pad_token_id
        for weights in merged.glob("*.safetensors*"):
            weights.unlink()
        _write(model, _batch(tokenizer, _TEXTS[:2], inputs), merged / FILE)
        # One text, and several of other lengths than those that were traced.
        batches = [_batch(tokenizer, texts, inputs) for texts in (_TEXTS[2:], [*_TEXTS, 3 * _TEXTS[0]])]
        difference = max(_difference(model, batch, merged / FILE) for batch in batches)
        if not difference <= TOLERANCE:
            raise ModelError(
                f"the logits of the ONNX file differ from the model's (relative difference {difference:.2e})",
                where=str(output),
                repair="the output was deleted; report this with the model's name",
            )
        if output.exists():
            output.rmdir()
        merged.rename(output)
    return OnnxExported(output / FILE, inputs, difference)


def _batch(tokenizer: Any, texts: Any, inputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
    encoded = tokenizer(
        list(texts), padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=True
    )
    return {name: encoded[name] for name in inputs}


def _write(model: Any, batch: dict[str, torch.Tensor], file: Path) -> None:
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # The exporter's own, about its versions and other packages.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                kwargs=batch,
                f=file,
                input_names=list(batch),
                output_names=["logits"],
                dynamic_shapes=dict.fromkeys(batch, axes),
                external_data=size > _LARGEST,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"torch cannot export the model to ONNX: {why[:300]}",
            where=str(model.config.name_or_path),
            repair="a model of another family may work",
        ) from None
    finally:
        log.setLevel(level)


@torch.no_grad()
def _difference(model: Any, batch: dict[str, torch.Tensor], file: Path) -> float:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        (logits,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in batch.items()})
    except Exception as error:  # ONNX Runtime's exceptions have no common base class.
        raise ModelError(
            f"ONNX Runtime cannot run the exported file: {first_line(error)}",
            where=str(model.config.name_or_path),
            repair="try another version of onnxruntime; a model of another family may work",
        ) from None
    return relative_difference(model(**batch).logits, torch.from_numpy(logits))
