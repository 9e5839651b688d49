"""Files and folders, local and behind a URL: the same calls, the same outcomes, and errors that name the file."""

from __future__ import annotations

import gzip
import hashlib
import uuid
from pathlib import Path

import pytest

from finray.data.dataset.fetch import DatasetFiles
from finray.data.dataset.manifest import DataFile
from finray.data.storage import Digests, Folder, opened, size
from finray.errors import DataError


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path / "a::b" if request.param == "local" else f"memory://{uuid.uuid4()}/a")


def test_a_folder_reads_lists_and_deletes_what_was_written(folder: Folder) -> None:
    assert folder.read("one.json") is None
    assert list(folder.files()) == []
    folder.remove("one.json")
    folder.delete()
    for name in ("one.json", "deep/two.bin"):
        folder.write(name, b"old")
        folder.write(name, name.encode())
    assert sorted(folder.files()) == [("deep/two.bin", 12), ("one.json", 8)]
    assert folder.sub("deep").read("two.bin") == b"deep/two.bin"
    folder.remove("one.json")
    assert [name for name, _ in folder.files()] == ["deep/two.bin"]
    folder.delete()
    assert list(folder.files()) == []


def test_a_file_is_read_from_any_place_and_unpacked_by_its_suffix(folder: Folder) -> None:
    folder.write("a.bin", b"one\ntwo\n")
    folder.write("a.gz", gzip.compress(b"one\ntwo\n"))
    assert size(folder.at("a.bin")) == 8
    for name in ("a.bin", "a.gz"):
        with opened(folder.at(name)) as stream:
            assert (stream.readline(2), stream.seek(4), stream.readline()) == (b"on", 4, b"two\n")


def test_a_digest_follows_the_content(folder: Folder) -> None:
    found = set()
    for content in (b"one", b"two", b"longer"):
        folder.write("a.bin", content)
        found.add(Digests(None).of(folder.at("a.bin")))
    assert len(found) == 3


def test_a_file_that_is_missing_or_damaged_is_named(folder: Folder) -> None:
    folder.write("cut.gz", gzip.compress(b"one" * 100)[:-9])
    for name, message in (("none.gz", "does not exist|cannot be reached"), ("cut.gz", "cannot be decompressed")):
        with pytest.raises(DataError, match=message) as caught, opened(folder.at(name)) as stream:
            stream.read()
        assert caught.value.where == folder.at(name)


def test_a_fault_of_the_reader_is_not_called_one_of_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"")
    with pytest.raises(ZeroDivisionError), opened(str(path)):
        raise ZeroDivisionError


def test_a_fetched_file_is_kept_once_it_is_verified(tmp_path: Path) -> None:
    folder = Folder(f"memory://{uuid.uuid4()}/a")
    folder.write("a.bin", b"bad")
    expected = DataFile("a.bin", 3, hashlib.sha256(b"one").hexdigest())
    files = DatasetFiles(folder, "print", [("a.bin", expected)], tmp_path)
    with pytest.raises(DataError, match="missing or damaged"):
        files.path("a.bin")
    assert list(tmp_path.rglob("*.bin*")) == []
    folder.write("a.bin", b"one")
    assert files.path("a.bin").read_bytes() == b"one"
    folder.remove("a.bin")
    assert files.path("a.bin") == tmp_path / "print" / "a.bin"
