"""Files and folders, local and behind a URL: the same calls, the same outcomes, and errors that name the file."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import socket
import threading
import time
import uuid
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finray.data import storage
from finray.data.dataset.fetch import DatasetFiles
from finray.data.dataset.manifest import DataFile
from finray.data.storage import Digests, Folder, opened, size
from finray.errors import DataError, DataUnavailable
from tests.support import damaged

TEXT = b"".join(hashlib.sha256(bytes([at])).hexdigest().encode() + b"\n" for at in range(200))
PACKED = {
    **{"gz": gzip.compress(TEXT), "bz2": bz2.compress(TEXT), "xz": lzma.compress(TEXT)},
    "zst": pa.compress(TEXT, codec="zstd", asbytes=True),
}


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


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_table_is_read_from_its_end_however_it_is_packed(tmp_path: Path, suffix: str, packing: str) -> None:
    path = tmp_path / f"rows{suffix}{packing}"
    path.write_bytes(TEXT if not packing else PACKED[packing[1:]])
    with opened(str(path)) as stream:
        assert stream.seek(-65, os.SEEK_END) == len(TEXT) - 65
        assert stream.read() == TEXT[-65:]


def test_there_is_nothing_below_a_file(folder: Folder) -> None:
    folder.write("a.bin", b"one")
    assert folder.read("a.bin/b.bin") is None
    assert Folder(f"{folder.root}/").at("a.bin") == folder.at("a.bin")


def test_a_file_that_is_missing_or_damaged_is_named(folder: Folder) -> None:
    folder.write("cut.gz", gzip.compress(b"one" * 100)[:-9])
    for name, message in (("none.gz", "does not exist|cannot be reached"), ("cut.gz", "cannot be decompressed")):
        with pytest.raises(DataError, match=message) as caught, opened(folder.at(name)) as stream:
            stream.read()
        assert caught.value.where == folder.at(name)


@pytest.mark.parametrize("suffix", PACKED)
def test_a_packed_file_that_is_not_what_was_packed_says_so(tmp_path: Path, suffix: str) -> None:
    packed, path = PACKED[suffix], tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(packed)
    with opened(str(path)) as stream:
        assert stream.read() == TEXT
    # Cut off; not packed at all; damaged within, and so that the checksum differs (Zstandard's is not there).
    bad = [packed[:-30], TEXT, packed[:15] + b"\xff" * 8 + packed[23:], packed[:-6] + b"\xff" + packed[-5:]]
    for content in bad[: 3 if suffix == "zst" else 4]:
        path.write_bytes(content)
        with pytest.raises(DataError, match="the file cannot be decompressed: ") as caught, opened(str(path)) as stream:
            stream.read()
        assert caught.value.where == str(path)


def of_web_server(cause: Exception) -> Exception:
    """As fsspec raises every error of a web server."""
    error = FileNotFoundError("http://h/rows.jsonl")
    error.__cause__ = cause
    return error


BUCKET = FileNotFoundError("The specified bucket does not exist")
REFUSED, MISSING = of_web_server(ConnectionRefusedError(111, "refused")), of_web_server(FileNotFoundError("404"))


@pytest.mark.parametrize(
    ("name", "error", "said", "kind"),
    [
        ("s3://b/rows.jsonl", BUCKET, "the bucket does not exist\n", DataError),
        ("/b/rows.jsonl", BUCKET, "the file does not exist\n", DataError),
        ("/b/rows.parquet", pa.ArrowInvalid("no table"), "the file is damaged or cut off: no table", DataError),
        ("/b/rows.parquet.gz", pa.ArrowInvalid("no table"), "the file is damaged or cut off: no table", DataError),
        ("s3://b/rows", PermissionError("Forbidden"), "the storage cannot be reached", DataError),
        ("s3://b/rows", RuntimeError("reset"), "the storage cannot be reached", DataUnavailable),
        ("http://h/rows.jsonl", REFUSED, "cannot be reached: ConnectionRefusedError", DataUnavailable),
        ("http://h/rows.jsonl", MISSING, "the file does not exist", DataError),
    ],
)
def test_an_error_of_storage_says_what_is_wrong_and_whether_to_try_again(
    name: str, error: Exception, said: str, kind: type[DataError]
) -> None:
    with pytest.raises(DataError, match=said) as caught, storage.storage_errors(name):
        raise error
    assert (caught.value.where, type(caught.value)) == (name, kind)


@pytest.mark.parametrize(
    "url", ["nowhere://a/rows.jsonl", "github://a/rows.jsonl", "zip://rows.jsonl::/none/at/all.zip"]
)
def test_a_url_that_its_library_does_not_accept_is_named(url: str) -> None:
    """An unknown scheme, one whose URL lacks something, and an archive that is not there."""
    with pytest.raises(DataError, match="the URL cannot be used: ") as caught:
        storage.filesystem(url)
    assert caught.value.where == url


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


def test_files_that_are_fetched_ahead_are_there_when_they_are_read(tmp_path: Path) -> None:
    folder = Folder(f"memory://{uuid.uuid4()}/a")
    names = [f"{number}.bin" for number in range(9)]
    expected = []
    for name in names:
        folder.write(name, name.encode())
        expected.append((name, DataFile(name, 5, hashlib.sha256(name.encode()).hexdigest())))
    files = DatasetFiles(folder, "print", [*expected, ("gone.bin", expected[0][1])], tmp_path)
    files.prefetch(["gone.bin", *names])
    for thread in threading.enumerate():
        if thread.name == "finray-fetch":
            thread.join(30)
    assert sorted(path.name for path in (tmp_path / "print").iterdir()) == names
    folder.delete()
    assert [files.path(name).read_bytes().decode() for name in names] == names
    # What failed is reported where it is wanted.
    with pytest.raises(DataError, match="missing or damaged"):
        files.path("gone.bin")


def test_fetched_files_lie_in_the_users_cache_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(f"memory://{uuid.uuid4()}/a")
    folder.write("a.bin", b"one")
    said = [("a.bin", DataFile("a.bin", 3, hashlib.sha256(b"one").hexdigest()))]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = DatasetFiles(folder, "print", said, None).path("a.bin")
    assert home == tmp_path / ".cache" / "finray" / "prepared" / "print" / "a.bin"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert DatasetFiles(folder, "print", said, None).path("a.bin").is_relative_to(tmp_path / "c" / "finray")
    assert DatasetFiles(folder, "print", said, tmp_path / "d").path("a.bin") == tmp_path / "d" / "print" / "a.bin"


def test_a_fetched_file_that_cannot_be_kept_is_an_error_with_the_repair(tmp_path: Path) -> None:
    folder = Folder(f"memory://{uuid.uuid4()}/a")
    folder.write("a.bin", b"one")
    (tmp_path / "print").write_text("in the way")
    files = DatasetFiles(
        folder, "print", [("a.bin", DataFile("a.bin", 3, hashlib.sha256(b"one").hexdigest()))], tmp_path
    )
    with pytest.raises(DataError, match="fetched data cannot be saved") as caught:
        files.path("a.bin")
    assert "prepare.local_dir" in str(caught.value.repair)


def test_a_written_file_leaves_no_scratch_file_even_where_it_fails(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    held = len(list(Path("/dev/fd").iterdir()))
    for _ in range(20):
        folder.write("a.bin", b"one")
    assert len(list(Path("/dev/fd").iterdir())) < held + 10

    def fails(*_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "adopt", fails)
        with pytest.raises(OSError, match="full"):
            folder.write("b.bin", b"two")
    assert list(folder.files()) == [("a.bin", 3)]
    assert list(scratch.iterdir()) == []


def test_what_speaks_of_other_files_is_deleted_before_them(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.bin", "manifest.json", "deep/part.json"):
        folder.write(name, b"one")

    def killed(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    if folder.is_remote:
        remove = type(folder._fs).rm
        monkeypatch.setattr(
            type(folder._fs), "rm", lambda fs, path, **options: killed() if options else remove(fs, path)
        )
    with pytest.raises(KeyboardInterrupt):
        folder.delete()
    assert list(folder.files()) == [("a.bin", 3)]


@pytest.mark.parametrize(
    ("name", "suffix", "packed"),
    [
        ("a/rows.jsonl", ".jsonl", False),
        ("a/rows.JSONL.GZ", ".jsonl", True),
        ("rows.csv.xz", ".csv", True),
        ("rows.csv.bz2", ".csv", True),
        ("a.b/rows", "", False),
        ("what?.csv", ".csv", False),
        ("rows.jsonl?x", ".jsonl?x", False),
        ("https://h/rows.json?sig=a.b", ".json", False),
        ("https://h/rows.jsonl.gz?download=true", ".jsonl", True),
        ("https://h/rows.jsonl?name=rows.gz", ".jsonl", False),
        ("s3://b/rows.gz?x", ".gz?x", False),
        ("http://h/rows.parquet?v=1", ".parquet", False),
        ("s3://b/rows.json?x", ".json?x", False),
    ],
)
def test_the_suffix_that_says_how_a_file_is_read(name: str, suffix: str, packed: bool) -> None:
    assert (storage.file_suffix(name), storage.is_compressed(name)) == (suffix, packed)


@pytest.mark.parametrize(
    ("scheme", "extra"),
    [
        *(("s3", "finray[s3]"), ("gs", "finray[gcs]"), ("gcs", "finray[gcs]")),
        *(("abfs", "finray[azure]"), ("az", "finray[azure]"), ("dropbox", "fsspec package for `dropbox://`")),
    ],
)
def test_a_scheme_that_nothing_installed_can_read_names_what_to_install(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(url: str, **options: object) -> None:
        raise ImportError(url)

    # Of the S3 server that tests with Ray have, in whose process this may run.
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(DataError, match=f"no installed package can read `{scheme}://`") as caught:
        storage.filesystem(f"{scheme}://bucket/rows.jsonl")
    assert extra in str(caught.value.repair)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", None])
def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    monkeypatch.setattr(storage.remote, "FIRST_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = f"http://127.0.0.1:{listening.getsockname()[1]}"
        if variable is not None:
            monkeypatch.setenv(variable, server)
        for name in ("s3://bucket/rows.jsonl", "s3://bucket/*.jsonl") if variable else (f"{server}/rows.jsonl",):
            with pytest.raises(DataUnavailable, match=r"the server gave no answer within 0\.3 s") as caught:
                storage.find(name)
            assert str(caught.value.where).startswith(server)


def test_files_behind_a_url_by_name_pattern_and_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.remote, "unanswered", lambda url: None)
    folder = Folder(f"memory:///{uuid.uuid4()}/a")
    for name in ("b.jsonl", "a.jsonl", "deep/c.csv", "d[1].jsonl"):
        folder.write(name, b"{}")
    assert storage.find(folder.at("d*")) == [folder.at("d[1].jsonl")], "a folder is no file"
    assert storage.find(folder.at("a.jsonl")) == [folder.at("a.jsonl")]
    assert storage.find(folder.at("?.jsonl")) == [folder.at("a.jsonl"), folder.at("b.jsonl")]
    assert storage.find(folder.at("[b-c].jsonl")) == [folder.at("b.jsonl")]
    assert storage.find(folder.root) == [folder.at(name) for name in ("a.jsonl", "b.jsonl", "d[1].jsonl", "deep/c.csv")]
    assert storage.find(folder.at("*/none")) == []
    for url in ("http://h/a?b*", "https://h/a"):
        assert storage.find(url) == [url]


def test_the_digest_of_an_object_is_what_its_storage_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    info: dict[str, object] = {}

    class Storage:
        def info(self, path: str) -> dict[str, object]:
            return info

    monkeypatch.setattr(storage, "filesystem", lambda name: (Storage(), name))
    found = set()
    keys = ("ETag", "etag", "md5Hash", "generation", "LastModified", "Last-Modified", "mtime")
    for key in keys:
        for value in (b"one", 2):
            # The first that the storage has counts, and size with it.
            for bytes_ in (3, 4):
                info = {"ETag": None, "size": bytes_, key: value, **({"mtime": "later"} if key != "mtime" else {})}
                found.add(Digests(None).of("s3://b/a.bin"))
    assert len(found) == 4


# --- remembered digests -----------------------------------------------------------------------------------------------


def settled(folder: Path, count: int) -> list[Path]:
    """Files that nobody has written to for a while, as far as their times tell."""
    files = [folder / f"{number}.txt" for number in range(count)]
    for file in files:
        file.write_text(file.name)
    return files


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a minute later than the clock says."""
    now = time.time
    monkeypatch.setattr("finray.data.storage.time.time", lambda: now() + 60)


def test_remembering_a_file_writes_one_line_however_many_are_known(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_STALE", 3)
    kept = tmp_path / "kept" / "digests"
    digests = Digests(kept)
    sizes = []
    for file in settled(tmp_path, 50):
        assert digests.of(file) == hashlib.sha256(file.name.encode()).hexdigest()
        sizes.append(kept.stat().st_size)
    inode = kept.stat().st_ino
    lines = kept.read_bytes().splitlines(keepends=True)
    assert [len(line) for line in lines] == [after - before for before, after in pairwise([0, *sizes])]
    Digests(kept).of(settled(tmp_path, 1)[0])
    assert kept.stat().st_ino == inode, "it was written anew"


def test_a_remembered_file_is_not_read_again_and_a_changed_one_is(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = settled(tmp_path, 2)
    kept = tmp_path / "digests"
    found = [Digests(kept).of(file) for file in (first, second)]
    second.write_text("other")
    read: list[Path] = []
    real = storage.digest_of

    def spy(path: Path) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(storage, "digest_of", spy)
    again = Digests(kept)
    assert (again.of(first), again.of(second)) == (found[0], hashlib.sha256(b"other").hexdigest())
    assert read == [second]


def test_a_file_with_the_size_and_the_time_that_it_had_is_read_again(tmp_path: Path, later: None) -> None:
    (file,) = settled(tmp_path, 1)
    before, kept = file.stat(), tmp_path / "digests"
    first = Digests(kept).of(file)
    content = bytes(reversed(file.read_bytes()))
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert Digests(kept).of(file) == hashlib.sha256(content).hexdigest() != first


def test_a_file_that_changed_a_moment_ago_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could change once more within the resolution of the clock, without another time."""
    file = tmp_path / "new"
    digests = Digests(tmp_path / "digests")
    known = storage.Path.stat
    file.write_text("first")
    frozen = file.stat()
    monkeypatch.setattr(storage.Path, "stat", lambda path, **_: frozen if path == file else known(path))
    found = digests.of(file)
    file.write_text("other")
    assert (found, digests.of(file)) == tuple(hashlib.sha256(text).hexdigest() for text in (b"first", b"other"))


def test_a_file_that_was_given_an_older_time_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    (file,) = settled(tmp_path, 1)
    os.utime(file, (0, 0))
    Digests(tmp_path / "digests").of(file)
    assert not (tmp_path / "digests").exists()


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_damage_to_what_is_remembered_never_gives_another_digest(
    data: st.DataObject, tmp_path: Path, later: None
) -> None:
    files = settled(tmp_path, 3)
    kept = tmp_path / "digests"
    kept.unlink(missing_ok=True)
    right = [Digests(kept).of(file) for file in files]
    damaged.draw(kept, data)
    assert [Digests(kept).of(file) for file in files] == right


def test_lines_about_files_that_have_changed_since_are_given_up(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_STALE", 3)
    (file,) = settled(tmp_path, 1)
    kept = tmp_path / "digests"
    for number in range(9):
        file.write_text(str(number))
        Digests(kept).of(file)
    assert len(kept.read_bytes().splitlines()) <= 6
    assert Digests(kept).of(file) == hashlib.sha256(b"8").hexdigest()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = settled(tmp_path, 1)
    damaged.unreadable(file, monkeypatch, number)
    with pytest.raises(DataError, match="cannot be read: ") as caught:
        Digests(None).of(file)
    assert caught.value.where == str(file)


@pytest.mark.parametrize("name", ["/dev/null", "/"])
def test_what_is_no_file_has_no_digest(name: str) -> None:
    with pytest.raises(DataError, match="is not a file") as caught:
        Digests(None).of(name)
    assert caught.value.where == name
