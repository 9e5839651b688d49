"""Remembers which models may be packed: the check of :mod:`finray.models.packing_check` takes a second.

Imports neither torch nor Transformers if the answer is known.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finray.config.paths import cache_dir
from finray.config.resolved import Packing
from finray.config.schema import ModelConfig
from finray.config.tasks import CAUSAL_LM, SPECS, task_spec
from finray.errors import ModelError
from finray.files import FileKind, replace_text
from finray.pretrained.tokenizers import source_options

_FILES = FileKind(ModelError)
_MODELS = FileKind(ModelError, links=True)
# The code that the result depends on.
_CODE = (
    *("models/packing_check.py", "models/packed.py", "models/pooled.py", "models/attention.py", "models/ropes.py"),
    *("models/states.py", "models/by_row.py", "compat.py"),
)


def packing_of(model: ModelConfig, folder: Path | None = None) -> Packing:
    """Whether rows of a model may be packed: from an earlier check, or checked now, which imports torch.

    Args:
        model: the model section.
        folder: where results are cached; None is ``finray/packing`` in the user's cache.

    Raises:
        ModelError: as for :func:`finray.models.packing_check.check_packing`.
    """
    folder = folder or cache_dir("packing")
    cached = cached_packing(model, folder)
    if cached is not None:
        return cached
    from finray.models.packing_check import check_packing

    packing = check_packing(model)
    store_packing(model, folder, packing)
    return packing


def packing_of_config(config: Any, *, auto_class: str = CAUSAL_LM.auto_class, folder: Path | None = None) -> Packing:
    """The same for the Transformers configuration of a loaded model, whose code does not come with it.

    Args:
        config: of the text model.
        auto_class: Transformers' class that the model was loaded with.
        folder: as for :func:`packing_of`.
    """
    from finray.models.packing_check import check_packing_of

    folder = folder or cache_dir("packing")
    # Not where it was loaded from, and how.
    plain = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
    text = json.dumps(plain, sort_keys=True, default=str)
    key = _digest(f"{type(config).__module__} {text}".encode(), auto_class)
    if (cached := _read(key, folder)) is not None:
        return cached
    _write(key, folder, packing := check_packing_of(config, auto_class=auto_class))
    return packing


def cached_packing(model: ModelConfig, folder: Path | None = None) -> Packing | None:
    """The result of an earlier check of this model's configuration; None if there was none."""
    key = _packing_key(model)
    return None if key is None else _read(key, folder or cache_dir("packing"))


def store_packing(model: ModelConfig, folder: Path, packing: Packing) -> None:
    """Store the result of a check, for :func:`cached_packing`. An unwritable folder is not an error."""
    if (key := _packing_key(model)) is not None:
        _write(key, folder, packing)


def _read(key: str, folder: Path) -> Packing | None:
    try:
        return _FILES.json(folder / f"{key}.json", Packing)
    except ModelError:
        return None


def _write(key: str, folder: Path, packing: Packing) -> None:
    if packing.lasting:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / f"{key}.json", json.dumps(asdict(packing)))


def _packing_key(model: ModelConfig) -> str | None:
    """A digest of everything that the result depends on; None if that is unknown without loading the model.

    That is: the model's configuration, the code of the check and of finray's attention, and the libraries. Code that
    comes with a model (`trust_remote_code`) may import anything, so its result is never cached.
    """
    if model.trust_remote_code:
        return None
    name = str(source_options(model)["pretrained_model_name_or_path"])
    try:
        if model.name.endswith(".gguf"):
            # Its configuration is in its header; the file is too large to be read for this.
            stat = Path(model.name).expanduser().resolve().stat()
            text = f"{model.name} {stat.st_size} {stat.st_mtime_ns}".encode()
        elif Path(name).is_dir():
            text = _MODELS.read(Path(name) / "config.json")
        else:
            from huggingface_hub import hf_hub_download

            # As Transformers does: the Hub is asked whether the cached file is the newest, if it can be reached.
            text = _MODELS.read(Path(hf_hub_download(name, "config.json", revision=model.revision)))
    except Exception:
        # Whatever the Hub's client raises, loading the model says it better.
        return None
    # A user's task may have another class of model at another time.
    auto_class = "" if model.task in SPECS else task_spec(model.task).auto_class
    return _digest(text, f"{model.task} {auto_class}")


def _digest(text: bytes, task: str) -> str:
    digest = hashlib.sha256(text)
    for part in _CODE:
        digest.update((Path(__file__).parents[1] / part).read_bytes())
    digest.update(f"{version('torch')} {version('transformers')} {task}".encode())
    return digest.hexdigest()[:32]
