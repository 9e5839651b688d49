"""Converts a model to one GGUF file for llama.cpp and Ollama, with llama.cpp's converter, and verifies it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from finray import compat
from finray.config.schema import ModelConfig
from finray.errors import ModelError, require_package
from finray.evaluation.artifacts import export_model, find_artifact
from finray.files import require_writable
from finray.models.export import probe_logits, relative_difference, require_new
from finray.models.loading import load_model
from finray.pretrained.tokenizers import load_tokenizer
from finray.publishing.modelfile import modelfile
from finray.results import Result

Kind = Literal["f16", "q8_0"]
KINDS: tuple[str, ...] = get_args(Kind)
# Maximum difference of logits from those of the merged weights, relative to their spread.
TOLERANCE = {"f16": 5e-2, "q8_0": 5e-1}
_MODULE = "convert_hf_to_gguf"
_BOS_FIELDS = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.model", "tokenizer.ggml.pre")
_BOS_PRE = ("llama3", "llama-v3", "llama-bpe", "tekken")
_COMMANDS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")


@dataclass(frozen=True, slots=True)
class GgufExported(Result):
    """An exported GGUF file.

    Attributes:
        file: the GGUF file; a ``Modelfile`` for Ollama is next to it.
        kind: type of its weights.
        difference: difference of its logits from those of the merged fp32 weights, relative to their spread.
        template: why the ``Modelfile`` has no template; None if it has one, or the model has none.
    """

    file: Path
    kind: str
    difference: float
    template: str | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {**asdict(self), "file": str(self.file)}

    def print(self, console: Console) -> None:
        """Where it was written, and how close it is to the trained model."""
        lines = [f"wrote {self.file} ({self.kind}, {self.file.stat().st_size / 1e6:,.1f} MB) and a Modelfile beside it"]
        lines.append(f"read it again: logits differ by {self.difference:.1e} of their spread from the merged weights'")
        if self.template is not None:
            lines.append(f"the Modelfile has no TEMPLATE: {self.template}")
        console.print("\n".join(lines), highlight=False, soft_wrap=True)


def find_converter(named: Path | None) -> list[str]:
    """The command of llama.cpp's converter: the given script, or the installed one.
    Raises ModelError: there is none."""
    if named is not None:
        if not named.is_file():
            raise ModelError(
                "there is no such file", where=f"--converter {named}", repair="give the path of convert_hf_to_gguf.py"
            )
        return [sys.executable, str(named.resolve())]
    if find_spec(_MODULE) is not None:
        return [sys.executable, "-m", _MODULE]
    if (command := next(filter(None, map(shutil.which, _COMMANDS)), None)) is not None:
        return [command]
    raise ModelError(
        "llama.cpp's converter was not found",
        where="--gguf",
        repair="give its path with --converter llama.cpp/convert_hf_to_gguf.py, from a checkout of llama.cpp",
    )


def added_bos(file: Path, tokenizer: Any) -> str:
    """The token that llama.cpp and Ollama prepend to every text, according to a GGUF file; empty for none."""
    from gguf import GGUFReader

    with compat.quick_gguf():
        fields = GGUFReader(file).fields
    values = {name: fields[name].contents() for name in _BOS_FIELDS if name in fields}
    # llama.cpp's default if the file does not say.
    usual = values.get("tokenizer.ggml.model") == "llama" or values.get("tokenizer.ggml.pre") in _BOS_PRE
    return str(tokenizer.bos_token or "") if values.get("tokenizer.ggml.add_bos_token", usual) else ""


def export_gguf(
    path: str | Path, output: Path, *, kind: str, converter: Path | None = None, base: str | None = None
) -> GgufExported:
    """Write a GGUF file and a ``Modelfile``.

    Args:
        path: a run, checkpoint or model directory, or the URL of a run; an adapter is merged.
        output: directory to create.
        kind: of the weights, ``f16`` or ``q8_0``.
        converter: llama.cpp's `convert_hf_to_gguf.py`; None uses the installed one.
        base: base model of an adapter, if it has moved.

    Raises:
        ModelError: the converter is missing, does not support the model, or its output differs from the model.
    """
    if kind not in KINDS:
        raise ModelError(f"unknown type `{kind}`", where="--gguf", repair=f"use {' or '.join(KINDS)}")
    require_new(output)
    command = find_converter(converter)
    require_package("checking the GGUF file", "gguf", extra="gguf")
    artifact = find_artifact(path, base=base)
    output.parent.mkdir(parents=True, exist_ok=True)
    require_writable(output.parent)
    with tempfile.TemporaryDirectory(prefix=".tmp-gguf-", dir=output.parent) as scratch:
        merged, made = Path(scratch) / "merged", Path(scratch) / "made"
        made.mkdir()
        file = made / f"model-{kind}.gguf"
        export_model(artifact.folder, merged, dtype="fp32", base=base)
        options = ["--outtype", kind, "--outfile", str(file)]
        done = subprocess.run([*command, str(merged), *options], capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
            raise ModelError(
                f"llama.cpp's converter cannot convert the model: {lines[-1][:300]}",
                where=" ".join(command),
                repair="use a newer converter with --converter, or a model that llama.cpp supports",
            )
        expected = probe_logits(load_model(ModelConfig(name=str(merged)), dtype=torch.float32), merged)
        with compat.quick_gguf():
            again = probe_logits(load_model(ModelConfig(name=str(file)), dtype=torch.float32), merged)
        apart = relative_difference(expected, again)
        if not apart <= TOLERANCE[kind]:
            raise ModelError(
                f"the logits of the file differ from the merged weights (relative difference {apart:.2e})",
                where=str(output),
                repair="the output was deleted; try another version of the converter",
            )
        tokenizer = load_tokenizer(ModelConfig(name=str(merged)))
        text, refused = modelfile(tokenizer, file.name, artifact.notes, bos=added_bos(file, tokenizer))
        (made / "Modelfile").write_text(text, encoding="utf-8")
        if output.exists():
            output.rmdir()
        made.rename(output)
    return GgufExported(output / file.name, kind, apart, refused)
