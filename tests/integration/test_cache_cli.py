"""`finray cache` and `finray prepare --export-jsonl` as users meet them: no good dataset is lost, no bad one passes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from finray.data.dataset.manifest import MANIFEST, PartResult
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.prepare import prepare_here
from finray.data.storage import Folder
from tests.support import runs, s3, tiny
from tests.support.runs import Plain

DAY = 86400.0


def cache_cli(*arguments: object) -> tuple[int, str]:
    """Exit code and all output."""
    code, out, err = runs.finray(*arguments)
    return code, out + err


@pytest.fixture
def plain(tiny_model_dir: Path, tmp_path: Path) -> Plain:
    return runs.tiny_run(tiny_model_dir, tiny.write_chat_rows(tmp_path, 40), tmp_path / "out")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finray.data.sources.pieces.PIECE_BYTES", 2048)


def prepared(plain: Plain, **data: Any) -> Path:
    """A prepared dataset of these settings with some changed."""
    return Path(prepare_here(runs.config_of(runs.changed(plain, {"data": data}))))


def killed(plain: Plain, monkeypatch: pytest.MonkeyPatch, **data: Any) -> Path:
    """What a preparation leaves that is killed after its first part."""

    class Killed(BaseException):
        pass

    write = PartWriter.write

    def die(self: PartWriter, part: Any) -> PartResult:
        if part.number:
            raise Killed
        return write(self, part)

    before = set(Path(plain["run"]["output_dir"], ".prepared").glob(".partial-*"))
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "write", die)
        with pytest.raises(Killed):
            prepared(plain, **data)
    (left,) = set(Path(plain["run"]["output_dir"], ".prepared").glob(".partial-*")) - before
    return left


def row_of(output: str, name: str) -> str:
    """The line of a table that begins with a name."""
    (line,) = [line for line in output.splitlines() if name in line]
    return line


# --- list -----------------------------------------------------------------------------------------------------------


def test_list_shows_what_there_is(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepared(plain, eval_ratio=0.1)
    unfinished = killed(plain, monkeypatch, max_length=48)
    (whole.parent / "notes").mkdir()
    (whole.parent / "notes" / "mine.txt").write_text("not finray's")
    by_directory = cache_cli("cache", "list", whole.parent)
    by_config = cache_cli("cache", "list", runs.write_config(plain, tmp_path / "run.yaml"))
    assert by_directory == by_config
    code, output = by_directory
    assert code == 0
    manifest = json.loads((whole / MANIFEST).read_text(encoding="utf-8"))
    line = row_of(output, f" {whole.name}")
    assert " 40 " in line
    assert f" {manifest['splits']['train']['tokens']:,} " in line
    assert "train: rows.jsonl" in line
    assert "just now" in line
    assert "unfinished" in row_of(output, unfinished.name)
    assert "notes" not in output
    assert f"2 in {whole.parent}" in output


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_finds_one_changed_byte_in_any_file(plain: Plain) -> None:
    whole, other = prepared(plain), prepared(plain, max_length=48)
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    assert len(files) > 4
    for file in files:
        content = file.read_bytes()
        # In a manifest, the first digit of the name that it gives itself.
        runs.flip(file, content.index(whole.name.encode()) if file.name == MANIFEST else None)
        code, output = cache_cli("cache", "verify", whole.parent)
        assert code == 2, file
        assert f"{whole.name}: damaged" in output
        assert f"{other.name}: whole" in output
        assert str(file) in output
        file.write_bytes(content)
    assert cache_cli("cache", "verify", whole.parent)[0] == 0


# --- prune ----------------------------------------------------------------------------------------------------------


def test_prune_goes_by_the_last_use_and_looking_is_no_use(plain: Plain) -> None:
    old, new = prepared(plain), prepared(plain, max_length=48)
    used = time.time() - 40 * DAY
    for path in (old, *old.rglob("*")):
        os.utime(path, (used, used))
    for command in ("list", "verify"):
        code, output = cache_cli("cache", command, old.parent)
        assert code == 0
    assert "40 days ago" in row_of(cache_cli("cache", "list", old.parent)[1], old.name)
    assert cache_cli("cache", "prune", "--older-than-days", "41", old.parent) == (0, "0 removed\n")
    # A preparation that finds it is one.
    assert prepared(plain) == old
    assert "just now" in row_of(cache_cli("cache", "list", old.parent)[1], old.name)
    os.utime(old / MANIFEST, (used, used))
    code, output = cache_cli("cache", "prune", "--older-than-days", "39", old.parent)
    assert code == 0
    assert [line.split()[1] for line in output.splitlines()[:-1]] == [old.name]
    assert new.is_dir()


def test_prune_leaves_a_preparation_that_is_under_way(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = killed(plain, monkeypatch)
    name = unfinished.name.removeprefix(".partial-")
    with FileLock(unfinished.parent / ".locks" / f"{name}.lock"):
        assert cache_cli("cache", "prune", "--all", unfinished.parent) == (0, "0 removed\n")
    assert unfinished.is_dir()
    assert "1 removed" in cache_cli("cache", "prune", "--all", unfinished.parent)[1]


# --- the same on s3 -------------------------------------------------------------------------------------------------


def test_the_same_on_s3(plain: Plain, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    root = bucket.url("prepared")
    good, bad = (
        prepare_here(runs.config_of(runs.changed(plain, {"data.max_length": length})), root=root) for length in (64, 48)
    )
    names = [location.rsplit("/", 1)[1] for location in (good, bad)]
    bucket.put(f"prepared/{'0' * 24}/train/part-00000.json", b"{}")
    bucket.put("prepared/mine.txt", b"not finray's")
    code, output = cache_cli("cache", "list", root)
    assert code == 0
    assert all(" 40 " in row_of(output, name) for name in names)
    assert "unfinished" in row_of(output, "0" * 24)
    assert cache_cli("cache", "verify", root)[0] == 0
    key = f"prepared/{names[1]}/train/index-00000.arrow"
    content = bytearray(bucket.get(key))
    content[100] ^= 1
    bucket.put(key, bytes(content))
    code, output = cache_cli("cache", "verify", root)
    assert code == 2
    assert bucket.url(key) in output
    code, output = cache_cli("cache", "prune", "--damaged", root)
    assert {line.split()[1] for line in output.splitlines()[:-1]} == {names[1], "0" * 24}
    assert {key.split("/")[1] for key in bucket.keys("prepared/")} == {names[0], "mine.txt"}
    # The manifest is the first to go.
    deleted: list[str] = []
    remove = Folder.remove
    monkeypatch.setattr(Folder, "remove", lambda self, name: (deleted.append(name), remove(self, name))[1])
    assert "1 removed" in cache_cli("cache", "prune", "--all", root)[1]
    assert deleted[0] == MANIFEST
    assert bucket.keys("prepared/") == ["prepared/mine.txt"]


# --- rows for people ------------------------------------------------------------------------------------------------


def exported(folder: Path) -> dict[str, list[dict[str, str]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in folder.glob("*.jsonl")
    }


def test_export_follows_a_mix_and_leaves_out_what_was_left_out(
    plain: Plain, tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    pairs = write_rows(
        [{"prompt": f"{n} ", "completion": f"{n + 1}"} for n in range(5)] + [{"prompt": 3}], "pairs.jsonl"
    )
    texts = write_rows([{"text": "one two"}, {"text": "three"}], "texts.jsonl")
    of_pairs = {"source": str(pairs), "format": "prompt_completion"}
    plain["data"] = {"mix": [of_pairs, {"source": str(texts)}], "on_bad_row": "drop", "max_length": 64}
    prepared(plain)
    config = runs.write_config(plain, tmp_path / "run.yaml")
    code, output = cache_cli("prepare", config, "--export-jsonl", tmp_path / "rows")
    assert code == 0, output
    assert "1 of 8 rows are bad" in output
    assert exported(tmp_path / "rows")["training.jsonl"] == [
        *({"input": f"{n} ", "output": f"{n + 1}"} for n in range(5)),
        {"input": "", "output": "one two"},
        {"input": "", "output": "three"},
    ]
