"""Datasets read by the ``datasets`` library: from the Hugging Face Hub, or directories that it wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from finray import compat
from finray.data.sources.resolve import Source, is_saved
from finray.data.storage import Digests
from finray.errors import DataError
from finray.files import first_line
from finray.pretrained import hub


def load(source: Source) -> Any:
    """The split of a source as a ``datasets.Dataset``, memory-mapped.
    Raises DataError: it cannot be loaded, or has no such split."""
    return _load(source, _state(source))


def _files(source: Source) -> list[Path]:
    """The files of a local directory; none for a dataset on the Hub."""
    path = Path(source.name).expanduser()
    return sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else []


def _state(source: Source) -> str:
    """Changes with the files of a local directory, within a process: by sizes, times and inodes. Empty without any, as
    for a dataset on the Hub."""
    files = [(str(file), file.stat()) for file in _files(source)]
    state = [[name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino] for name, about in files]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24] if state else ""


@lru_cache(maxsize=8)
def _load(source: Source, state: str) -> Any:
    import datasets

    compat.check_etags()
    datasets.disable_progress_bars()
    path = Path(source.name).expanduser()
    try:
        if not is_saved(path):
            name = str(path) if path.is_dir() else source.name.rpartition(":")[0] if source.data_dir else source.name
            if not path.is_dir():
                hub.refusal()
            # `datasets` uses its cached copy of a local directory even if files in it have changed since.
            apart = {"cache_dir": str(Path(datasets.config.HF_DATASETS_CACHE) / f"finray-{state}")} if state else {}
            return datasets.load_dataset(
                name, source.subset, data_dir=source.data_dir, split=source.split, revision=source.revision, **apart
            )
        loaded = datasets.load_from_disk(str(path))
        split = source.split.partition("[")[0]
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                there = f"there are: {', '.join(loaded)}"
                raise DataError(f"there is no split `{split}`", where=source.name, repair=there)
            loaded = loaded[split]
        if loaded.format["type"] is not None:
            # Values as they were written, not as arrays or tensors: a format is saved with the dataset.
            loaded = loaded.with_format(None)
        if split == source.split:
            return loaded
        ranges = datasets.ReadInstruction.from_spec(source.split).to_absolute({split: len(loaded)})
        return datasets.concatenate_datasets([loaded.select(range(part.from_ or 0, part.to)) for part in ranges])
    except DataError:
        raise
    except Exception as error:
        refused = None if path.exists() else hub.refusal()
        if refused is not None:
            raise DataError(
                "the dataset is not in the local cache, and the Hub cannot be reached",
                where=source.name,
                repair=f"{refused}; run the command again when it answers; if you meant a local path: it does not "
                "exist",
            ) from None
        # `datasets` raises a dozen unrelated types here (missing split, no network, gated, unknown configuration).
        cause: BaseException = error
        while path.exists() and cause.__cause__ is not None:
            # Of a damaged file, it only says that the dataset was not generated.
            cause = cause.__cause__
        repair = "check data.source (it is not a local path either), data.subset and the split names"
        if path.exists():
            repair = "check its files, data.subset and the split names"
            if not is_saved(path):
                repair += "; without its README.md, finray reads the files itself, and names the row"
        raise DataError(
            f"the dataset cannot be loaded: {first_line(cause)}", where=source.name, repair=repair
        ) from None


def rows(source: Source, start: int, stop: int | None) -> Iterator[dict[str, Any]]:
    """A range of rows of a dataset, in order."""
    dataset = load(source)
    stop = len(dataset) if stop is None else stop
    for at in range(start, stop, 256):
        columns = dataset[at : min(at + 256, stop)]
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def digest(source: Source, digests: Digests) -> str:
    """A digest that identifies the rows: the fingerprint of ``datasets``, their number, and the content of local
    files."""
    dataset, folder = load(source), Path(source.name).expanduser()
    contents = [[str(file.relative_to(folder)), digests.of(file)] for file in _files(source)]
    identity = [source.subset, source.revision, source.split, source.data_dir]
    return hashlib.sha256(
        json.dumps([*identity, compat.dataset_fingerprint(dataset), len(dataset), contents]).encode()
    ).hexdigest()


def share_rows(first: Source, other: Source) -> bool:
    """Whether two splits of a dataset overlap, according to their names and slices."""
    if compat.dataset_fingerprint(load(first)) == compat.dataset_fingerprint(load(other)):
        return True
    if (first.subset, first.revision, first.data_dir) != (other.subset, other.revision, other.data_dir):
        return False
    ranges = [_ranges(source) for source in (first, other)]
    return any(
        name == split and max(start, begin) < min(stop, end)
        for name, start, stop in ranges[0]
        for split, begin, end in ranges[1]
    )


def _ranges(source: Source) -> list[tuple[str, int, int]]:
    """Split names, with the first row of each and the one after the last."""
    import datasets

    name = source.split.partition("[")[0]
    if "[" not in source.split or "+" in source.split:
        return [(part.strip().partition("[")[0], 0, 2**62) for part in source.split.split("+")]
    count = len(load(replace(source, split=name)))
    parts = datasets.ReadInstruction.from_spec(source.split).to_absolute({name: count})
    return [(name, part.from_ or 0, count if part.to is None else part.to) for part in parts]
