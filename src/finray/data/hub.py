"""Data sets that the ``datasets`` library reads: from the Hugging Face hub, or directories that it wrote."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from finray.data.sources import Source
from finray.errors import DataError


@lru_cache(maxsize=8)
def load(source: Source) -> Any:
    """The split of a source as a ``datasets.Dataset``, memory-mapped.

    Raises:
        DataError: it cannot be loaded, or has no such split.
    """
    import datasets

    datasets.disable_progress_bars()
    path = Path(source.name).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _saved(datasets, path, source)
        name = str(path) if path.is_dir() else source.name.rpartition(":")[0] if source.data_dir else source.name
        return datasets.load_dataset(
            name, source.subset, data_dir=source.data_dir, split=source.split, revision=source.revision
        )
    except DataError:
        raise
    except Exception as error:
        # `datasets` raises a dozen unrelated types here (missing split, no network, gated, unknown configuration).
        lines = str(error).strip().splitlines()
        raise DataError(
            f"the data set cannot be loaded: {lines[0] if lines else type(error).__name__}",
            where=source.name,
            repair="check data.source (no such file or directory exists here either), data.subset and the split names",
        ) from None


def _saved(datasets: Any, path: Path, source: Source) -> Any:
    """What ``save_to_disk`` wrote; slices are taken by ``datasets``' own rules."""
    loaded = datasets.load_from_disk(str(path))
    name, bracket, _ = source.split.partition("[")
    if isinstance(loaded, datasets.DatasetDict):
        if name not in loaded:
            raise DataError(f"no split is called `{name}`", where=source.name, repair=f"there are: {', '.join(loaded)}")
        loaded = loaded[name]
    if not bracket:
        return loaded
    instruction = datasets.ReadInstruction.from_spec(source.split)
    parts = instruction.to_absolute({name: len(loaded)})
    return datasets.concatenate_datasets([loaded.select(range(part.from_ or 0, part.to)) for part in parts])


def digest(source: Source) -> str:
    """A digest of what identifies the rows: the fingerprint that ``datasets`` keeps, and their number."""
    dataset = load(source)
    identity = [source.subset, source.revision, source.split, source.data_dir, dataset._fingerprint, len(dataset)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def label_names(source: Source) -> dict[str, list[str]]:
    """Column to names, for columns that hold the numbers of named classes."""
    features = load(source).features
    return {column: list(feature.names) for column, feature in features.items() if hasattr(feature, "names")}
