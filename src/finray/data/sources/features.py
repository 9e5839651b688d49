"""What ``datasets`` knows of columns: in a dataset that it reads, or in the metadata of a table that it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from finray.data.sources import hub
from finray.data.sources.readers import kind_of
from finray.data.sources.resolve import Source
from finray.data.storage import opened


def features_of(source: Source) -> Mapping[str, Any]:
    """The features of a source by column, as ``Features.to_dict`` gives them; of files, those of the first.

    Empty if there are none, or if a file cannot be read; the reader of its rows reports that. Raises DataError: the
    dataset or the file cannot be opened.
    """
    if not source.is_files:
        features: Mapping[str, Any] = hub.load(source).features.to_dict()
        return features
    kind = kind_of(source.files[0])
    if kind not in ("parquet", "arrow"):
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(source.files[0]) as stream:
        try:
            if kind == "parquet":
                return features_in(pq.read_schema(stream))
            try:
                return features_in(pa.ipc.open_file(stream).schema)
            except pa.ArrowInvalid:
                stream.seek(0)
                return features_in(pa.ipc.open_stream(stream).schema)
        except (pa.ArrowInvalid, OSError):
            return {}


def features_in(schema: Any) -> Mapping[str, Any]:
    """The features that ``datasets`` put into the metadata of an Arrow schema; of anything else there are none."""
    try:
        features = json.loads((getattr(schema, "metadata", None) or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, Mapping) else {}


def class_names(feature: Any) -> tuple[str, ...]:
    """The names of a ``ClassLabel`` by id, also of a list of them; nothing of other features."""
    while isinstance(feature, list | Mapping) and (isinstance(feature, list) or "feature" in feature):
        feature = next(iter(feature), None) if isinstance(feature, list) else feature["feature"]
    names = feature.get("names") if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel" else None
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        return ()
    return tuple(names) if len(set(names)) == len(names) else ()
