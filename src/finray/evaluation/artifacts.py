"""What a run, checkpoint or model directory stands for, and exporting it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.rundir import RunDir
from finray.errors import ModelError
from finray.hardware import cpu_has_bf16
from finray.models.artifacts import Artifact, read_artifact
from finray.models.export import Exported, export
from finray.models.loading import DTYPES


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
