"""Files that were damaged, or that cannot be read, as storage does it."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st

from finray.checkpoint import CheckpointStore, manifest
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.checkpoint.store import directory_name
from tests.support.s3 import Bucket

# Of any file: what is drawn must not depend on its size, which may be another at the next example.
_PLACES = st.integers(0, 2**40)


def unreadable(file: Path, monkeypatch: pytest.MonkeyPatch, number: int = errno.EACCES) -> None:
    """Let every attempt of this process to read a file fail, also root's."""

    def refusing(opened: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(name: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(name, str | os.PathLike) and Path(name) == file:
                raise OSError(number, os.strerror(number), str(name))
            return opened(name, *arguments, **options)

        return refuse

    # What `Path.open` and `Path.read_text` call, and what finray does.
    monkeypatch.setattr(io, "open", refusing(io.open))
    monkeypatch.setattr(os, "open", refusing(os.open))


def flip_bit(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def draw(file: Path, data: st.DataObject) -> None:
    """One flipped bit anywhere, or a cut, in a file of any size."""
    size = file.stat().st_size
    if data.draw(st.booleans(), label="flip"):
        flip_bit(file, data.draw(_PLACES, label="bit") % (8 * size))
    else:
        file.write_bytes(file.read_bytes()[: data.draw(_PLACES, label="keep") % size])


def damages(content: bytes, other: bytes | None) -> dict[str, bytes | None]:
    """What may become of a file; None is that it is gone."""
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 8
    found: dict[str, bytes | None] = {
        "missing": None,
        "empty": b"",
        "truncated": content[:-1],
        "flipped": bytes(flipped),
    }
    # What is the same at every step is not damaged by that of another.
    return {**found, "of another step": other} if other not in (None, content) else found


def check_that_all_damage_is_named(run_dir: Path) -> list[str]:
    """Damage each file of a run's newest checkpoint in each way: it is named, and the checkpoint before is used.

    Returns their names. Afterwards the files are as they were.
    """
    store = CheckpointStore(run_dir)
    *_, before, newest = store.steps()
    names = []
    for path in sorted(one for one in store.path_of(newest).rglob("*") if one.is_file()):
        content, other = path.read_bytes(), store.path_of(before) / path.relative_to(store.path_of(newest))
        if not content:
            continue
        for kind, damaged in damages(content, other.read_bytes() if other.exists() else None).items():
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            said: list[str] = []
            found = CheckpointStore(run_dir).latest(said.append)
            assert found is not None, (path, kind)
            assert (found.step, len(said)) == (before, 1), (path, kind)
            assert str(path) in said[0], (kind, said)
        path.write_bytes(content)
        names.append(path.relative_to(store.path_of(newest)).as_posix())
    # Negative control: as they were, the newest is used, and nothing said.
    assert CheckpointStore(run_dir).latest(pytest.fail) is not None
    return names


def check_that_all_damage_behind_a_url_is_named(objects: Objects, bucket: Bucket, copy: Path) -> list[str]:
    """The same of a run in a bucket, read by somebody who has no file of the checkpoint but those that are whole."""
    store = RemoteStore(copy, objects)
    places = store.places()
    *_, before, newest = sorted(places)
    prefix = objects.url.removeprefix(bucket.url())
    files, older = (bucket.content(f"{prefix}/{places[step]}/") for step in (newest, before))

    def latest(store: RemoteStore, warn: Callable[[str], None]) -> int:
        found = store.latest(warn)
        assert found is not None
        return found.step

    # Negative control: as they are, the newest is used, and nothing said.
    assert latest(store, pytest.fail) == newest
    # What is fetched a second time, as it may have changed on the way, is the same here.
    with mock.patch("finray.checkpoint.objects._OTHERS", 1):
        for name, content in sorted(files.items()):
            key = f"{prefix}/{places[newest]}/{name}"
            for kind, damaged in damages(content, older.get(name)).items():
                if damaged is None:
                    bucket.delete(key)
                else:
                    bucket.put(key, damaged)
                (copy / directory_name(newest) / name).unlink(missing_ok=True)
                said: list[str] = []
                # A store reads a manifest once.
                reader = RemoteStore(copy, objects) if name == manifest.NAME else store
                assert (latest(reader, said.append), len(said)) == (before, 1), (name, kind)
                assert objects.at(f"{places[newest]}/{name}") in said[0], (kind, said)
            bucket.put(key, content)
    assert latest(RemoteStore(copy, objects), pytest.fail) == newest
    return [*files]
