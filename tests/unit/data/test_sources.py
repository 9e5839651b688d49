"""Rows from files, and mistakes in files named by file and row."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.sources.pieces import read
from finray.data.sources.resolve import resolve
from finray.errors import DataError

ROWS = [{"text": "one"}, {"text": "zwei ü"}, {"text": "three"}]


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def texts(name: str | Path, **options: str) -> list[str]:
    return [row.value["text"] for row in read(resolve(str(name), **{"split": "train", **options}))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.ndjson"])
def test_file_types(tmp_path: Path, name: str) -> None:
    assert texts(write(tmp_path / name)) == [row["text"] for row in ROWS]


def test_globs_and_directories_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "deep/c.parquet", "notes.md"):
        write(tmp_path / name)
    assert len(texts(tmp_path)) == 9
    assert [row.file.rsplit("/", 1)[1] for row in read(resolve(str(tmp_path), split="train"))][::3] == [
        "a.csv",
        "b.jsonl",
        "c.parquet",
    ]
    assert len(texts(tmp_path / "*.jsonl")) == 3


def test_named_splits_in_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    write(tmp_path / "validation-00000.jsonl")
    assert len(texts(tmp_path, split="train")) == 3
    assert [Path(file).name for file in resolve(str(tmp_path), split="validation").files] == ["validation-00000.jsonl"]
    with pytest.raises(DataError, match="no file of the split `test`"):
        resolve(str(tmp_path), split="test")


def test_directories_named_after_splits(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.jsonl")
    write(tmp_path / "validation" / "a.jsonl")
    write(tmp_path / "other.jsonl")
    assert len(texts(tmp_path, split="validation")) == 3
    assert [Path(file).parent.name for file in resolve(str(tmp_path), split="train").files] == ["train"]
    # All in one directory: its name says nothing.
    assert len(resolve(str(tmp_path / "train"), split="validation").files) == 1


def test_data_sets_that_datasets_wrote(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "saved"))
    assert len(texts(tmp_path / "saved")) == 3
    assert texts(tmp_path / "saved", split="test") == ["zwei ü"]
    with pytest.raises(DataError, match="no split is called `dev`"):
        texts(tmp_path / "saved", split="dev")


def test_hub_style_directories_with_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write(tmp_path / "set/data/part.jsonl")
    card = "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: data/part.jsonl\n---\n"
    (tmp_path / "set/README.md").write_text(card, encoding="utf-8")
    assert texts(tmp_path / "set", subset="small") == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("content", "row", "message"),
    [(b'{"text": "a"}\n{"text": \n', 2, "not JSON"), (b'{"text": "a"}\n\n[1]\n', 3, "not an object")],
)
def test_read_names_a_bad_row_by_file_and_row(tmp_path: Path, content: bytes, row: int, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts(path)
    assert caught.value.where == f"{path}:{row}"


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.jsonl", "does not exist"), ("*.csv", "matches no file"), ("notes.pdf", "not read")],
)
def test_sources_that_are_not_there(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.pdf").write_bytes(b"x")
    with pytest.raises(DataError, match=message):
        resolve(str(tmp_path / name), split="train")


def test_a_name_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="cannot be loaded"):
        texts("nobody/nothing-of-this-name")
