"""`s3://` from end to end, against a server that speaks the protocol: sources, prepared datasets, and training."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.dataset.manifest import MANIFEST, PartResult
from finray.data.dataset.parts import PartWriter
from finray.data.dataset.prepare import is_prepared, prepare_here
from finray.data.dataset.prepared import PreparedDataset
from finray.data.sources import pieces
from finray.data.storage import Folder
from finray.errors import DataError
from tests.support import processes, runs, s3, tiny

ROWS = 120


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tiny.write_chat_rows(tmp_path, ROWS)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of a few kilobytes make several parts, which begin in the middle of objects."""
    monkeypatch.setattr("finray.data.sources.pieces.PIECE_BYTES", 4096)


def on_s3(model: Path, source: str | Path, folder: Path, bucket: s3.Bucket) -> runs.Plain:
    """A run whose prepared dataset lies in the bucket, and is read through a local directory."""
    prepare = {"prepare.dir": bucket.url("prepared"), "prepare.local_dir": str(folder / "fetched")}
    return runs.tiny_run(model, source, folder, prepare)


def read_all(location: str, local_dir: Path | None = None) -> list[tuple[str, list[int], list[int]]]:
    """Place, tokens and mask of every training row."""
    split = PreparedDataset(location, local_dir=local_dir).all_rows("train")
    assert split is not None
    return [(split.where(row), *(values.tolist() for values in split.row(row))) for row in range(len(split))]


# --- sources --------------------------------------------------------------------------------------------------------


def one_file(rows: Path, folder: Path) -> str:
    return "rows.jsonl"


def compressed(rows: Path, folder: Path) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(rows.read_bytes()))
    return "rows.jsonl.gz"


def parquet(rows: Path, folder: Path) -> str:
    table = pa.Table.from_pylist([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()])
    pq.write_table(table, folder / "rows.parquet", row_group_size=32)
    return "rows.parquet"


def glob(rows: Path, folder: Path) -> str:
    halves(rows, folder, ("a", "b"))
    return "many/*.jsonl"


def directory(rows: Path, folder: Path) -> str:
    """Files below, some of another split."""
    halves(rows, folder, ("train-0", "train-1"))
    (folder / "many" / "validation.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    return "many"


def halves(rows: Path, folder: Path, names: tuple[str, str]) -> None:
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "many").mkdir()
    for name, some in zip(names, (lines[: ROWS // 3], lines[ROWS // 3 :]), strict=True):
        (folder / "many" / f"{name}.jsonl").write_text("".join(some), encoding="utf-8")


@pytest.mark.parametrize("make", [one_file, compressed, parquet, glob, directory])
def test_a_source_gives_the_same_rows_as_on_disk(
    make: Callable[[Path, Path], str],
    tiny_model_dir: Path,
    rows: Path,
    tmp_path: Path,
    bucket: s3.Bucket,
    small_pieces: None,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "rows.jsonl").write_bytes(rows.read_bytes())
    name = make(rows, source)
    bucket.upload(source, "data")
    local, remote = (
        prepare_here(runs.config_of(runs.tiny_run(tiny_model_dir, place, tmp_path)), root=tmp_path / kind)
        for kind, place in (("local", f"{source}/{name}"), ("remote", bucket.url(f"data/{name}")))
    )
    found = read_all(remote)
    assert len(found) == ROWS
    assert found == read_all(local)
    if make is not compressed:
        assert len(list(Path(remote).glob("train/tokens-*"))) > 1


def test_another_object_is_another_source(tiny_model_dir: Path, rows: Path, tmp_path: Path, bucket: s3.Bucket) -> None:
    """Negative control of being prepared once: what lies behind the name counts, and not the name."""
    config = runs.config_of(runs.tiny_run(tiny_model_dir, bucket.upload(rows, "rows.jsonl"), tmp_path))
    first = prepare_here(config)
    assert is_prepared(config) == first
    tiny.write_chat_rows(tmp_path, ROWS, start=1)
    bucket.upload(rows, "rows.jsonl")
    assert is_prepared(config) is None
    assert prepare_here(config) != first


def test_a_source_that_changes_meanwhile_is_noticed(
    tiny_model_dir: Path, rows: Path, tmp_path: Path, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.upload(rows, "data/rows.jsonl")
    config = runs.config_of(runs.tiny_run(tiny_model_dir, bucket.url("data"), tmp_path))
    write = PartWriter.write

    def write_and_change(self: PartWriter, part: Any) -> PartResult:
        done = write(self, part)
        bucket.upload(tiny.write_chat_rows(tmp_path, ROWS, start=1), "data/rows.jsonl")
        return done

    monkeypatch.setattr(PartWriter, "write", write_and_change)
    with pytest.raises(DataError, match="the source changed while it was being prepared"):
        prepare_here(config, root=tmp_path / "prepared")
    assert list((tmp_path / "prepared").rglob("*.arrow")) == []


# --- what went wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"source": "s3://no-such-bucket/rows.jsonl"}, ["s3://no-such-bucket/rows.jsonl", "bucket does not exist"]),
        ({"dir": "s3://no-such-bucket/prepared"}, ["s3://no-such-bucket/prepared", "bucket does not exist"]),
        ({"credentials": ""}, ["s3://{bucket}/rows.jsonl", "credentials", "AWS_ACCESS_KEY_ID"]),
    ],
    ids=["bucket of the source", "bucket of prepare.dir", "credentials"],
)
def test_one_clear_message(
    change: dict[str, str], expected: list[str], tiny_model_dir: Path, rows: Path, tmp_path: Path, bucket: s3.Bucket
) -> None:
    source = change.get("source", bucket.upload(rows, "rows.jsonl")).format(bucket=bucket.name)
    plain = on_s3(tiny_model_dir, source, tmp_path, bucket)
    plain["prepare"]["dir"] = change.get("dir", plain["prepare"]["dir"])
    config = runs.write_config(plain, tmp_path / "run.yaml")
    if "credentials" in change:
        # Clients keep the credentials that they were made with.
        drop = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
        code, out, err = runs.cli("prepare", str(config), env=drop)
    else:
        code, out, err = runs.finray("prepare", config)
    assert code == 2, out + err
    assert "Traceback" not in out + err
    assert err.count("error:") == 1, err
    for part in expected:
        assert part.format(bucket=bucket.name) in err
    assert s3.SECRET not in out + err
    assert bucket.keys("prepared") == []


# --- prepared datasets ----------------------------------------------------------------------------------------------


def test_a_prepared_dataset_is_the_same_on_s3_and_on_disk(
    tiny_model_dir: Path, rows: Path, tmp_path: Path, bucket: s3.Bucket, small_pieces: None
) -> None:
    local = prepare_here(runs.config_of(runs.tiny_run(tiny_model_dir, rows, tmp_path)))
    config = runs.config_of(on_s3(tiny_model_dir, rows, tmp_path, bucket))
    remote = prepare_here(config)
    files = {path.relative_to(local).as_posix(): path.read_bytes() for path in Path(local).rglob("*") if path.is_file()}
    assert len(files) > 5
    assert bucket.content(f"prepared/{Path(local).name}/") == files
    assert read_all(remote, tmp_path / "fetched") == read_all(local)
    mark = bucket.mark()
    assert prepare_here(config) == remote
    assert bucket.asked("PUT", mark) == []
    assert read_all(remote, tmp_path / "fetched") == read_all(local)
    assert [key for key in bucket.asked("GET", mark) if key.endswith(".arrow")] == []


@pytest.mark.parametrize("damage", ["changed", "cut off", "missing"])
def test_a_damaged_object_is_refused_by_name(
    damage: str, tiny_model_dir: Path, rows: Path, tmp_path: Path, bucket: s3.Bucket, small_pieces: None
) -> None:
    plain = on_s3(tiny_model_dir, rows, tmp_path, bucket)
    location = prepare_here(runs.config_of(plain))
    key = next(key for key in bucket.keys("prepared") if key.endswith("train/tokens-00002.arrow"))
    content = bytearray(bucket.get(key))
    content[len(content) // 2] ^= 1
    if damage == "missing":
        bucket.delete(key)
    else:
        bucket.put(key, bytes(content) if damage == "changed" else bucket.get(key)[:-1])
    # What another size shows is seen before anything is read.
    read = PreparedDataset if damage != "changed" else lambda location: runs.run_alone(plain, tmp_path / "run")
    with pytest.raises(DataError, match=r"missing or (damaged|cut off)") as refused:
        read(location)
    assert refused.value.where == bucket.url(key)


# --- killed ---------------------------------------------------------------------------------------------------------


def prepare_in_small_pieces(plain: runs.Plain, env: dict[str, str]) -> None:
    """In a process that is to be killed."""
    os.environ.update(env)
    pieces.PIECE_BYTES = 512
    prepare_here(runs.config_of(plain))


def test_a_killed_preparation_leaves_nothing_that_is_accepted_and_is_gone_on_with(
    tiny_model_dir: Path, rows: Path, tmp_path: Path, bucket: s3.Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many parts that most are left when it is killed.
    monkeypatch.setattr(pieces, "PIECE_BYTES", 512)
    plain = on_s3(tiny_model_dir, rows, tmp_path, bucket)
    config = runs.config_of(plain)
    name = Path(prepare_here(config, root=tmp_path / "undisturbed")).name
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = processes.CONTEXT.Process(target=prepare_in_small_pieces, args=(plain, env))
    process.start()
    prefix = f"prepared/{name}/"
    runs.wait_until(lambda: len(finished(bucket, prefix)) >= 2 or not process.is_alive())
    process.kill()
    process.join()
    done = finished(bucket, prefix)
    assert f"{prefix}{MANIFEST}" not in bucket.keys(prefix), "it was finished before it was killed"
    assert is_prepared(config) is None
    with pytest.raises(DataError, match="not a prepared dataset"):
        PreparedDataset(bucket.url(prefix))
    mark = bucket.mark()
    prepare_here(config)
    written = {key for key in bucket.asked("PUT", mark) if key.endswith(".arrow")}
    assert written
    assert not {key for key in written if key.split("-")[-1].split(".")[0] in done}
    undisturbed = tmp_path / "undisturbed" / name
    expected = {
        path.relative_to(undisturbed).as_posix(): path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()
    }
    assert bucket.content(prefix) == expected


def finished(bucket: s3.Bucket, prefix: str) -> set[str]:
    """Numbers of the parts that are done."""
    return {key.split("part-")[1].split(".")[0] for key in bucket.keys(prefix) if "/part-" in key}


def test_a_storage_that_is_too_slow_shows_as_waiting(
    tiny_model_dir: Path,
    rows: Path,
    tmp_path: Path,
    bucket: s3.Bucket,
    small_pieces: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = on_s3(tiny_model_dir, rows, tmp_path, bucket)
    prepare_here(runs.config_of(plain))
    read, slow = Folder.read, list[str]()

    def slowly(self: Folder, name: str) -> bytes | None:
        if "tokens" in name:
            slow.append(name)
            time.sleep(1)
        return read(self, name)

    monkeypatch.setattr(Folder, "read", slowly)
    runs.run_alone(plain, tmp_path / "run")
    assert sum(runs.values(tmp_path / "run", "data_wait_s")) > 0.3
    count = len(slow)
    assert count
    # What was fetched is not waited for once more.
    runs.run_alone(plain, tmp_path / "again")
    assert len(slow) == count
