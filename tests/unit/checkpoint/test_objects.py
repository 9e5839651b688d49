"""What is behind a URL: compared with what was sent, begun again where that may help, and never half there."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from finray.checkpoint import objects as module
from finray.checkpoint.objects import Objects, open_filesystem
from finray.errors import CheckpointError, StorageError


def made(url: str, **options: Any) -> tuple[Objects, list[float]]:
    slept: list[float] = []
    return Objects(url, sleep=slept.append, **options), slept


def failing(objects: Objects, name: str, errors: list[Exception]) -> list[str]:
    """Let a method of the file system fail so many times; returns what it was called with."""
    there, called = getattr(objects._fs, name), list[str]()

    def method(*arguments: Any, **options: Any) -> Any:
        called.append(str(arguments[-1]))
        if errors:
            raise errors.pop(0)
        return there(*arguments, **options)

    objects._fs = SimpleNamespace(**{one: getattr(objects._fs, one) for one in METHODS} | {name: method})
    return called


METHODS = ("cat_file", "put_file", "info", "open", "ls", "find", "cp_file", "rm_file", "_strip_protocol")


def test_objects_are_written_read_listed_copied_and_removed(url: str, tmp_path: Path) -> None:
    objects, _ = made(f"{url}/")
    assert (objects.url, objects.at("a/b"), objects.at("")) == (url, f"{url}/a/b", url)
    assert objects.read("a") is None
    assert (objects.files(), objects.folders(), objects.files("sub")) == ([], [], [])
    objects.write("b.json", b"two")
    objects.write("sub/a.json", b"one")
    assert objects.read("b.json") == b"two"
    assert objects.files() == ["b.json", "sub/a.json"]
    assert objects.files("sub") == ["sub/a.json"]
    assert objects.folders() == ["b.json", "sub"]
    objects.copy("sub/a.json", f"{url}/c.json")
    assert objects.read("c.json") == b"one"
    objects.remove("c.json", "not there", "b.json")
    assert objects.files() == ["sub/a.json"]
    (tmp_path / "file").write_bytes(b"x" * 1000)
    objects.upload(tmp_path / "file", "large")
    assert objects.read("large") == b"x" * 1000


def fetched(objects: Objects, name: str, path: Path, content: bytes) -> None:
    objects.download(name, path, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def test_a_download_is_whole_and_replaces_what_was_there(url: str, tmp_path: Path) -> None:
    objects, _ = made(url)
    objects.write("a", b"content")
    path = tmp_path / "new" / "folder" / "a"
    fetched(objects, "a", path, b"content")
    path.write_bytes(b"older")
    fetched(objects, "a", path, b"content")
    assert path.read_bytes() == b"content"
    assert [one.name for one in path.parent.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("wanted", "said"), [(b"contents", "has 7 bytes instead of 8"), (b"CONTENT", "has changed since it was written")]
)
def test_a_download_of_other_bytes_is_damage_and_leaves_what_was_there(
    url: str, tmp_path: Path, wanted: bytes, said: str
) -> None:
    objects, slept = made(url)
    objects.write("a", b"content")
    (tmp_path / "a").write_bytes(b"older")
    tried = failing(objects, "open", [])
    with pytest.raises(CheckpointError) as caught:
        fetched(objects, "a", tmp_path / "a", wanted)
    assert (caught.value.message, caught.value.where) == (said, f"{url}/a")
    assert len(tried) == 3, "the way may have changed them"
    assert slept == []
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"older")]
    with pytest.raises(CheckpointError, match="is missing"):
        fetched(objects, "b", tmp_path / "a", wanted)


def test_bytes_that_the_way_has_changed_are_fetched_once_more(url: str, tmp_path: Path) -> None:
    objects, _ = made(url)
    objects.write("a", b"content")
    there, opened = objects._fs.open, list[int]()

    class Changed:
        def __enter__(self) -> Any:
            import io

            return io.BytesIO(b"CONTENT")

        def __exit__(self, *error: object) -> None: ...

    def opens(*arguments: Any) -> Any:
        opened.append(1)
        return Changed() if len(opened) < 3 else there(*arguments)

    objects._fs = SimpleNamespace(open=opens)
    fetched(objects, "a", tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("method", "action", "expected"),
    [
        ("cat_file", lambda one: one.read("a"), b"content"),
        ("put_file", lambda one: one.write("a", b"new"), None),
        ("ls", lambda one: one.folders(), ["a"]),
        ("find", lambda one: one.files(), ["a"]),
        ("rm_file", lambda one: one.remove("a"), None),
        ("cp_file", lambda one: one.copy("a", one.at("b")), None),
    ],
)
def test_what_fails_is_begun_again_and_named_where_it_fails_for_good(
    url: str, method: str, action: Callable[[Objects], Any], expected: Any
) -> None:
    for count in (2, 3):
        objects, slept = made(url, tries=3)
        objects.write("a", b"content")
        called = failing(objects, method, [ConnectionError("away\nmore") for _ in range(count)])
        if count == 2:
            assert action(objects) == expected
        else:
            with pytest.raises(StorageError) as caught:
                action(objects)
            assert caught.value.message == "the storage failed 3 times: ConnectionError: away"
            assert caught.value.where in (objects.at("a"), url)
        assert len(called) == 3
        assert len(slept) == 2, "no pause after the last try"
        made(url)[0].remove("a", "b")


def test_storage_that_is_away_for_half_a_minute_is_waited_for(url: str) -> None:
    objects, slept = made(url)
    called = failing(objects, "cat_file", [ConnectionError("away")] * 99)
    with pytest.raises(StorageError, match="failed 6 times"):
        objects.read("a")
    assert len(called) == 6
    # One second and then twice as long each time, 31 in total, each half as much more or less.
    assert 15.5 <= sum(slept) <= 46.5
    assert len(slept) == 5


@pytest.mark.parametrize("error", [PermissionError("no"), IsADirectoryError("no"), NotADirectoryError("no")])
def test_what_another_try_would_meet_again_is_not_tried_again(url: str, error: Exception) -> None:
    objects, slept = made(url)
    called = failing(objects, "cat_file", [error] * 9)
    with pytest.raises(StorageError, match=type(error).__name__):
        objects.read("a")
    assert (len(called), slept) == (1, [])


def test_a_bucket_that_is_not_there_is_named(url: str) -> None:
    objects, _ = made(url)
    failing(objects, "put_file", [FileNotFoundError("no bucket")])
    with pytest.raises(StorageError, match="cannot write there: no bucket") as caught:
        objects.write("a", b"x")
    assert caught.value.repair == "create the bucket"


# --- what the storage says of an upload -----------------------------------------------------------------------------


def told(objects: Objects, answers: list[dict[str, Any]]) -> list[int]:
    """Let the storage say these things of objects, the last one for good; returns what was read back."""
    there, read_back = objects._fs, list[int]()

    def info(path: str) -> dict[str, Any]:
        return {"size": there.info(path)["size"]} | (answers.pop(0) if len(answers) > 1 else answers[0])

    def opened(*arguments: Any) -> Any:
        read_back.append(1)
        return there.open(*arguments)

    objects._fs = SimpleNamespace(**{one: getattr(there, one) for one in METHODS} | {"info": info, "open": opened})
    return read_back


CONTENT = b"0123456789"
MD5 = hashlib.md5(CONTENT, usedforsecurity=False)


def parts_etag(part: int) -> str:
    digests = [hashlib.md5(CONTENT[at : at + part]).digest() for at in range(0, len(CONTENT), part)]
    return f'"{hashlib.md5(b"".join(digests)).hexdigest()}-{len(digests)}"'


@pytest.mark.parametrize(
    ("said", "is_known"),
    [
        ({"md5Hash": base64.b64encode(MD5.digest()).decode()}, True),
        ({"md5Hash": base64.b64encode(b"other").decode()}, False),
        ({"ETag": f'"{MD5.hexdigest()}"'}, True),
        ({"ETag": MD5.hexdigest()}, True),
        ({"ETag": '"other"'}, False),
        ({"ETag": parts_etag(4)}, True),
        ({"ETag": parts_etag(5)}, False),
        ({}, False),
    ],
)
def test_a_digest_that_the_storage_keeps_saves_reading_the_object_back(
    url: str, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], is_known: bool
) -> None:
    """Where it says another one, or none, the bytes themselves decide."""
    monkeypatch.setattr(module, "_PART", 4)
    objects, _ = made(url)
    read_back = told(objects, [said])
    objects.write("a", CONTENT)
    assert len(read_back) == (not is_known)


def test_an_upload_that_arrives_cut_off_or_changed_is_sent_again(url: str) -> None:
    objects, _ = made(url)
    told(objects, [{"size": 9}, {"size": None}, {}])
    objects.write("a", CONTENT)
    told(objects, [{"size": 9}])
    with pytest.raises(StorageError, match="9 of 10 bytes arrived"):
        objects.write("a", CONTENT)
    other, _ = made(url)
    there = other._fs

    def changed(path: str, target: str, **_: Any) -> None:
        there.pipe_file(target, b"9876543210")

    other._fs = SimpleNamespace(**{one: getattr(there, one) for one in METHODS} | {"put_file": changed})
    with pytest.raises(StorageError, match="the bytes that arrived are not the bytes that were sent") as caught:
        other.write("a", CONTENT)
    assert (caught.value.where, caught.value.repair) == (f"{url}/a", "run the same command again")


# --- file systems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "repair"),
    [
        ("s3://b/x", "`pip install 'finray[s3]'`"),
        ("gs://b/x", "`pip install 'finray[gcs]'`"),
        ("gcs://b/x", "`pip install 'finray[gcs]'`"),
        ("abfs://b/x", "`pip install 'finray[azure]'`"),
        ("az://b/x", "`pip install 'finray[azure]'`"),
        ("odd://b/x", "install the fsspec package for `odd://`"),
    ],
)
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, url: str, repair: str) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("none")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(StorageError, match="no installed package can write") as caught:
        open_filesystem(url)
    assert caught.value.repair == repair
    assert caught.value.where == url


def test_a_url_that_no_library_knows_is_refused() -> None:
    with pytest.raises(StorageError, match="the URL cannot be used"):
        open_filesystem("nothing-of-the-kind://b/x")


def test_storage_that_does_not_answer_is_named_but_not_to_a_run_that_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        module.remote, "silence", lambda fs, scheme: (asked.append(scheme), ("http://here", "no answer in 6 s"))[1]
    )
    with pytest.raises(StorageError, match="the storage gave no answer in 6 s: http://here") as caught:
        Objects(url)
    assert caught.value.where == url
    assert asked == ["memory"]
    objects = Objects(url, patient=True)
    objects.write("a", b"content")
    assert objects.read("a") == b"content"
    assert asked == ["memory"]
