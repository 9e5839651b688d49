"""GGUF files as ordinary model directories."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.models.loading import DTYPES, load_model
from finray.pretrained.tokenizers import load_tokenizer


def convert(file: Path, output: Path, *, dtype: str) -> None:
    """Dequantise a GGUF file into safetensors, with its tokenizer and chat template.

    Raises:
        ModelError: the file cannot be read, the `gguf` package is missing, or the output is in the way.
    """
    if dtype not in DTYPES:
        raise ModelError(f"weights cannot be stored as `{dtype}`", where="--dtype", repair="use fp32 or bf16")
    if output.exists():
        raise ModelError("the output already exists", where=str(output), repair="name a new directory")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError(
            "reading a GGUF file needs the package gguf, which is not installed", repair="pip install 'finray[gguf]'"
        ) from None
    model = ModelConfig(name=str(file))
    scratch = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        loaded = load_model(model, dtype=DTYPES[dtype])
        loaded.save_pretrained(str(scratch))
        load_tokenizer(model).save_pretrained(str(scratch))
        os.replace(scratch, output)
    except OSError as error:
        raise ModelError(f"the model cannot be written: {error.strerror or error}", where=str(output)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
