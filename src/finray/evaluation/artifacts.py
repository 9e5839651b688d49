"""Finds the model in a run, checkpoint or model directory, and exports it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError, RepositoryNotFoundError

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.copies import local_copy, named_run
from finray.checkpoint.rundir import CONFIG_FILE, FINAL, RunDir
from finray.checkpoint.store import ATTEMPT_FILE
from finray.config import RUNS
from finray.config.adapter_files import NOTES, Notes
from finray.config.redact import redact_text
from finray.config.schema import ModelConfig
from finray.errors import CheckpointError, ModelError, did_you_mean_path
from finray.files import first_line
from finray.hardware import cpu_has_bf16
from finray.limits import cut
from finray.models.artifacts import Artifact, checked_notes, load_artifact, notes_of_stranger, read_artifact
from finray.models.export import TOLERANCE, Exported, export
from finray.models.loading import DTYPES
from finray.pretrained import hub
from finray.pretrained.tokenizers import TOKENIZER_FILES, check_exists, load_tokenizer, silence_transformers

_READ_BY_NAME = (*TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "*.bin", "*_config.json", "*.py")
_AGAIN = (
    "move final/ away if it exists, and run the command that trained the run: it makes final/ again from a checkpoint"
)


def find_artifact(path: str | Path, *, base: str | None = None) -> Artifact:
    """The weights in a run, checkpoint or model directory, verified if there is a manifest.

    Args:
        path: the directory, or the URL of a run; for an unfinished run, the newest valid checkpoint is used.
        base: overrides the base model that an adapter names.

    Raises:
        FinrayError: there is no model, or it is damaged.
    """
    path = Path(local_copy(named_run(path))).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"the directory does not exist{did_you_mean_path(path)}",
            where=str(path),
            repair="give a run, checkpoint or model directory; `finray runs` lists runs",
        )
    folder = path.resolve()
    run = RunDir(folder if (folder / CONFIG_FILE).exists() else folder.parent)
    if folder == run.path and not run.final.exists():
        if run.summary_file.exists():
            raise ModelError("the run is finished, but its final/ is missing", where=str(run.final), repair=_AGAIN)
        latest = CheckpointStore(run.path).latest()
        if latest is None:
            raise ModelError("the run has no checkpoint yet", where=str(path), repair="run `finray train` first")
        _require_listed(latest.path, latest.files)
        return read_artifact(latest.path, base=base)
    folder = run.final if folder == run.path else folder
    # Every model directory of a run has a manifest: without it, changes could not be detected.
    is_of_a_run = (run.path / ATTEMPT_FILE).exists() and (folder.name == FINAL or folder.name.startswith("checkpoint-"))
    if is_of_a_run or (folder / manifest.NAME).exists():
        try:
            content = manifest.verify(folder)
        except CheckpointError as error:
            repair = _AGAIN if folder.name == FINAL else "give the run, or another of its checkpoints"
            # One of another format version has its own: the other checkpoints of the run are of that version too.
            raise CheckpointError(error.message, where=error.where, repair=error.repair or repair) from None
        _require_listed(folder, [entry["path"] for entry in content["files"]])
    return read_artifact(folder, base=base)


def artifact_of(model: str | Path, *, base: str | None = None, revision: str | None = None) -> Artifact:
    """As :func:`find_artifact`, also for the model of a Hub id, whose branch, tag or commit may be given.
    Raises FinrayError: there is no model, or it is damaged."""
    model = local_copy(named_run(model))
    path = Path(model).expanduser()
    if path.is_dir() or base is not None or _is_beside_runs(path):
        return find_artifact(path, base=base)
    try:
        check_exists(str(model))
    except ModelError as error:
        repair = "give a run, checkpoint or model directory, or a Hub id"
        raise ModelError(error.message, where=str(model), repair=repair) from None
    return Artifact(Path(model), None, {} if path.exists() else _notes_on_hub(str(model), revision))


def _notes_on_hub(name: str, revision: str | None) -> Notes:
    """finray's notes beside a model on the Hub, or in its cache where the Hub is not asked; where there are none, what
    its configuration says.
    Raises ModelError: the Hub does not give them, or they are damaged."""
    silence_transformers()
    # Else the client would try for minutes.
    hub.refusal()
    try:
        folder = Path(hf_hub_download(name, NOTES, revision=revision)).parent
    except (RemoteEntryNotFoundError, RepositoryNotFoundError, HFValidationError):
        pass
    except Exception as error:
        # Whatever the client raises. It remembers which files a model does not have.
        if not is_offline_mode() and try_to_load_from_cache(name, NOTES, revision=revision) is None:
            reason = redact_text(cut(first_line(error.__cause__ or error)))
            raise ModelError(
                f"{NOTES}, which says how the model was trained, cannot be fetched from the Hub: {reason}",
                where=name,
                repair="run the command again when the Hub answers; a token that it rejects is replaced by `hf auth "
                "login` or HF_TOKEN",
            ) from None
    else:
        return checked_notes(folder, name)
    try:
        folder = Path(hf_hub_download(name, "config.json", revision=revision)).parent
    except Exception:
        return {}  # No such model, say: loading reports that.
    return notes_of_stranger(folder)


def _is_beside_runs(path: Path) -> bool:
    """Whether a path that does not exist is one of a run: it is not looked for on the Hub then."""
    parent = path.parent
    return len(path.parts) > 1 and (path.parts[0] == RUNS or any(parent.glob(f"*/{CONFIG_FILE}")))


def _require_listed(folder: Path, files: Collection[str]) -> None:
    """Refuse a verified directory with a file that Transformers or PEFT may read, but that its manifest does not list.

    They choose files by name: a stray `model.safetensors` takes precedence over the shards in an index.
    """
    for path in sorted(file for pattern in _READ_BY_NAME for file in folder.glob(pattern)):
        if (name := path.relative_to(folder).as_posix()) not in files:
            raise ModelError(
                f"{name} is not listed in the manifest",
                where=str(folder),
                repair="move it out of the directory, where it would be loaded as well",
            )


def export_model(
    path: str | Path,
    output: str | Path,
    *,
    merge: bool = True,
    dtype: str = "bf16",
    base: str | None = None,
    max_shard_size: str | None = None,
) -> Exported:
    """Write a model that plain Transformers loads (or PEFT, for an adapter), and check it by loading it.

    Args:
        path: a run, checkpoint or model directory.
        output: directory to create.
        merge: merge an adapter into its base model; False writes only the adapter.
        dtype: ``fp32``, ``bf16`` or ``fp16``, for the merged weights.
        base: overrides the base model of an adapter.
        max_shard_size: maximum size of a weight file, such as ``5GB``.

    Raises:
        FinrayError: the model cannot be loaded, the output directory exists, or the written model differs.
    """
    if dtype not in TOLERANCE:
        raise ModelError(f"weights cannot be stored as `{dtype}`", where="dtype", repair="use fp32, bf16 or fp16")
    artifact = find_artifact(path, base=base)
    return export(artifact, Path(output).expanduser(), merge=merge, dtype=dtype, max_shard_size=max_shard_size)


def load_trained(path: str | Path) -> tuple[Any, Any]:
    """Load the model of a run, checkpoint or model directory for inference, on the GPU if there is one, and its
    tokenizer; an adapter is not merged.
    Raises FinrayError: the model cannot be loaded."""
    artifact = find_artifact(path)
    device = inference_device()
    model = load_artifact(artifact, dtype=inference_dtype(None, device)).to(device)
    return model, load_tokenizer(ModelConfig(name=str(artifact.folder)))


def inference_device() -> torch.device:
    """The GPU if there is one, unless ``FINRAY_CPU`` is set."""
    return torch.device("cuda" if torch.cuda.is_available() and not os.environ.get("FINRAY_CPU") else "cpu")


def inference_dtype(precision: str | None, device: torch.device) -> torch.dtype:
    """Dtype of weights for inference: that of training, or bf16 if unknown.

    fp32 if the device would emulate it (torch does so for bf16 on a T4): fp16 on a CPU is about 40 times slower. A GPU
    keeps the dtype of training nevertheless, because fp32 may not fit into its memory.
    """
    precision = precision if precision in DTYPES else None
    if device.type == "cpu":
        fast = precision in (None, "bf16") and cpu_has_bf16()
    else:
        fast = precision is not None or torch.cuda.is_bf16_supported(including_emulation=False)
    return DTYPES[(precision or "bf16") if fast else "fp32"]
