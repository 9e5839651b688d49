"""What a run, checkpoint or model directory stands for, and exporting it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.rundir import RunDir
from finray.config.schema import ModelConfig
from finray.errors import ModelError
from finray.hardware import cpu_has_bf16
from finray.models.artifacts import Artifact, load_artifact, read_artifact
from finray.models.export import TOLERANCE, Exported, export
from finray.models.loading import DTYPES
from finray.pretrained.tokenizers import load_tokenizer


def find_artifact(path: Path, *, base: str | None = None) -> Artifact:
    """The weights that a run, checkpoint or model directory stands for, verified where there is a manifest.

    Args:
        path: the directory; of a run that is not finished, the newest valid checkpoint is taken.
        base: overrides the base model that an adapter names.

    Raises:
        FinrayError: nothing is there, or it is damaged.
    """
    if not path.is_dir():
        raise ModelError(
            "the directory does not exist", where=str(path), repair="name a run, checkpoint or model directory"
        )
    run = RunDir(path.resolve())
    folder = run.path
    if run.config_file.is_file():
        folder = run.final
        if not folder.is_dir():
            latest = CheckpointStore(run.path).latest()
            if latest is None:
                raise ModelError("the run has no checkpoint yet", where=str(path), repair="`finray train` it first")
            folder = latest.path
    if (folder / manifest.NAME).is_file():
        manifest.verify(folder)
    return read_artifact(folder, base=base)


def export_model(
    path: str | Path, output: str | Path, *, merge: bool = True, dtype: str = "bf16", base: str | None = None
) -> Exported:
    """Write a model that plain Transformers loads (or PEFT, for an adapter), and check it by loading it.

    Args:
        path: a run, checkpoint or model directory.
        output: directory to make.
        merge: fold an adapter into its base model, or write the adapter alone.
        dtype: ``fp32`` or ``bf16``, of the merged weights.
        base: overrides the base model of an adapter.

    Raises:
        FinrayError: the model cannot be loaded, or the output is in the way or not the same model.
    """
    if dtype not in TOLERANCE:
        raise ModelError(f"weights cannot be stored as `{dtype}`", where="dtype", repair="use fp32 or bf16")
    return export(find_artifact(_folder(path), base=base), _folder(output), merge=merge, dtype=dtype)


def load_trained(path: str | Path, *, base: str | None = None) -> tuple[Any, Any]:
    """A trained model, ready for inference on the GPU if there is one, and its tokenizer; an adapter is not merged.

    Args:
        path: a run, checkpoint or model directory.
        base: overrides the base model of an adapter.

    Raises:
        FinrayError: it cannot be loaded.
    """
    artifact = find_artifact(_folder(path), base=base)
    device = inference_device()
    model = load_artifact(artifact, dtype=inference_dtype(None, device)).to(device)
    return model, load_tokenizer(ModelConfig(name=str(artifact.folder)))


def _folder(path: str | Path) -> Path:
    return Path(path).expanduser()


def inference_device() -> torch.device:
    """The GPU if there is one, unless ``FINRAY_CPU`` is set."""
    return torch.device("cuda" if torch.cuda.is_available() and not os.environ.get("FINRAY_CPU") else "cpu")


def inference_dtype(precision: str | None, device: torch.device) -> torch.dtype:
    """Dtype of weights for inference: that of training, or bf16 where it is not known.

    fp32 where a device would emulate that (torch does so for bf16 on a T4): fp16 on a CPU is about 40 times slower. A
    GPU keeps a dtype that was trained in all the same, because fp32 may not fit into its memory.
    """
    precision = precision if precision in DTYPES else None
    if device.type == "cpu":
        fast = precision in (None, "bf16") and cpu_has_bf16()
    else:
        fast = precision is not None or torch.cuda.is_bf16_supported(including_emulation=False)
    return DTYPES[(precision or "bf16") if fast else "fp32"]
