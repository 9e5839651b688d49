"""Data sets that the ``datasets`` library reads: from the Hugging Face hub, or directories that it wrote."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from finray import compat
from finray.data.sources.resolve import Source
from finray.errors import DataError


def load(source: Source) -> Any:
    """The split of a source as a ``datasets.Dataset``, memory-mapped.

    Raises:
        DataError: it cannot be loaded, or has no such split.
    """
    return _load(source, _state(source))


def _state(source: Source) -> str:
    """A digest of names, sizes and times of the files in a local directory; empty for what lies on the Hub."""
    path = Path(source.name).expanduser()
    if not path.is_dir():
        return ""
    files = sorted(item for item in path.rglob("*") if item.is_file())
    known = [[str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]


@lru_cache(maxsize=8)
def _load(source: Source, state: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    path = Path(source.name).expanduser()
    # `datasets` takes its own copy of a local directory for current when the files in there have changed since.
    apart = {"cache_dir": str(Path(datasets.config.HF_DATASETS_CACHE) / f"finray-{state}")} if state else {}
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _saved(datasets, path, source)
        name = str(path) if path.is_dir() else source.name.rpartition(":")[0] if source.data_dir else source.name
        return datasets.load_dataset(
            name, source.subset, data_dir=source.data_dir, split=source.split, revision=source.revision, **apart
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
    """A digest of what identifies the rows: the fingerprint that ``datasets`` keeps, their number, and local files."""
    dataset, state = load(source), _state(source)
    asked = [source.subset, source.revision, source.split, source.data_dir]
    return hashlib.sha256(
        json.dumps([*asked, compat.dataset_fingerprint(dataset), len(dataset), state]).encode()
    ).hexdigest()


def share_rows(one: Source, other: Source) -> bool:
    """Whether two splits of a data set have rows in common, as far as their names and slices tell."""
    if compat.dataset_fingerprint(load(one)) == compat.dataset_fingerprint(load(other)):
        return True
    if (one.subset, one.revision, one.data_dir) != (other.subset, other.revision, other.data_dir):
        return False
    ranges = [_ranges(source) for source in (one, other)]
    return any(
        name == split and max(start, begin) < min(stop, end)
        for name, start, stop in ranges[0]
        for split, begin, end in ranges[1]
    )


def _ranges(source: Source) -> list[tuple[str, int, int]]:
    import datasets

    name = source.split.partition("[")[0]
    if "[" not in source.split or "+" in source.split:
        return [(part.strip().partition("[")[0], 0, 2**62) for part in source.split.split("+")]
    rows = len(load(replace(source, split=name)))
    parts = datasets.ReadInstruction.from_spec(source.split).to_absolute({name: rows})
    return [(name, part.from_ or 0, rows if part.to is None else part.to) for part in parts]
