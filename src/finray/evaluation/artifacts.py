"""What a run, checkpoint or model directory stands for, and exporting it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.rundir import RunDir
from finray.errors import ModelError
from finray.models.artifacts import Artifact, read_artifact
from finray.models.export import Exported, export
from finray.models.loading import DTYPES, resolve_precision


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


def export_model(path: Path, output: Path, *, merge: bool, dtype: str, base: str | None = None) -> Exported:
    """Export what a directory stands for; see :func:`finray.models.export.export`."""
    return export(find_artifact(path, base=base), output, merge=merge, dtype=dtype)


def inference_device() -> torch.device:
    """The GPU if there is one, unless ``FINRAY_CPU`` is set."""
    return torch.device("cuda" if torch.cuda.is_available() and not os.environ.get("FINRAY_CPU") else "cpu")


def inference_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Dtype of weights for inference with what ``train.precision`` names.

    A CPU has no fast fp16 arithmetic (it is about 40 times slower than fp32), so fp16 is fp32 there.
    """
    resolved = resolve_precision(precision, device)
    return DTYPES["fp32" if resolved == "fp16" and device.type == "cpu" else resolved]
