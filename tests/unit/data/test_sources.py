"""Rows from files, and mistakes in files named by file and row."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.sources import hub, pieces
from finray.data.sources.memory import write_rows
from finray.data.sources.pieces import plan_parts, read, read_piece
from finray.data.sources.readers import Reading
from finray.data.sources.resolve import Source, resolve, unread
from finray.data.storage import Digests, Folder
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


def test_data_sets_that_datasets_wrote(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "saved"))
    assert len(texts(tmp_path / "saved")) == 3
    assert texts(tmp_path / "saved", split="test") == ["zwei ü"]
    with pytest.raises(DataError, match="there is no split `dev`"):
        texts(tmp_path / "saved", split="dev")


def test_a_data_set_that_was_saved_with_a_format_has_the_values_that_it_was_made_of(tmp_path: Path) -> None:
    row = {"text": "a", "label": 1, "messages": [{"role": "user", "content": "b"}]}
    made = datasets.Dataset.from_list([row])
    made.set_format("numpy")
    made.save_to_disk(str(tmp_path / "saved"))
    (value,) = (one.value for one in read(resolve(str(tmp_path / "saved"), split="train")))
    assert value == row
    assert [type(value[name]) for name in row] == [str, int, list]


SPLITS = {"train": [f"{at}" for at in range(10)], "test": ["x", "y"]}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    sets = {name: datasets.Dataset.from_dict({"text": values}) for name, values in SPLITS.items()}
    datasets.DatasetDict(sets).save_to_disk(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("test", SPLITS["test"]),
        ("train[3:]", SPLITS["train"][3:]),
        ("train[:3]", SPLITS["train"][:3]),
        ("train[2:-1]", SPLITS["train"][2:-1]),
        ("train[:20%]", SPLITS["train"][:2]),
        ("train[:2]+train[8:]", ["0", "1", "8", "9"]),
    ],
)
def test_slices_of_a_saved_data_set(saved: str, split: str, wanted: list[str]) -> None:
    assert texts(saved, split=split) == wanted


def test_rows_in_memory_that_cannot_be_written_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="the rows cannot be written: ") as caught:
        write_rows(ROWS, tmp_path / "file" / "rows")
    assert caught.value.where == str(tmp_path / "file" / "rows")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pandas.DataFrame({"prompt": ["a", 5], "completion": ["b", "c"]}), "column prompt with type object"),
        (pandas.DataFrame([["a", "b"]], columns=["text", "text"]), "Duplicate column names"),
    ],
)
def test_a_table_in_memory_that_cannot_be_read_is_one_error(tmp_path: Path, table: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        write_rows(table, tmp_path)
    assert "pass a list of dicts" in str(caught.value.repair)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("train", "train", True),
        ("train", "test", False),
        ("train[:5]", "train[5:]", False),
        ("train[5:]", "train[:5]", False),
        ("train[:6]", "train[5:]", True),
        ("train[5:]", "train[:6]", True),
        ("train[:20%]", "train[2:]", False),
        ("train[:-2]", "train[-2:]", False),
        ("train[:5]", "test[:1]", False),
        ("train", "train[9:]", True),
        ("train", "train[:1]", True),
        # Slices of sums are taken for the whole.
        ("train[:5]+train[6:]", "train[5:6]", True),
        ("test[:1]+test[1:]", "train", False),
    ],
)
def test_whether_two_splits_of_a_data_set_have_rows_in_common(saved: str, one: str, other: str, shared: bool) -> None:
    first, second = (resolve(saved, split=split) for split in (one, other))
    assert hub.share_rows(first, second) is shared


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("train+test", "test", True),
        ("test", "train[:2] + test[:1]", True),
        ("dev+train", "test+dev", True),
        ("train+test", "dev", False),
        ("train[:2]+test", "dev+more", False),
    ],
)
def test_sums_of_splits_have_rows_in_common_where_they_name_one_split(
    saved: str, monkeypatch: pytest.MonkeyPatch, one: str, other: str, shared: bool
) -> None:
    named = {name: datasets.Dataset.from_dict({"text": [name]}) for name in (one, other)}
    monkeypatch.setattr(hub, "load", lambda source: named.get(source.split, range(9)))
    source = resolve(saved, split="train")
    assert hub.share_rows(replace(source, split=one), replace(source, split=other)) is shared


def test_another_subset_revision_or_directory_has_other_rows(saved: str) -> None:
    first, second = (resolve(saved, split=split) for split in ("train[:6]", "train[5:]"))
    assert hub.share_rows(first, second)
    for change in ({"subset": "a"}, {"revision": "b"}, {"data_dir": "c"}):
        assert not hub.share_rows(first, replace(second, **change))
    # The name and what else was asked for is part of what the prepared rows are called.
    everything = [first, second, *(replace(first, **change) for change in ({"subset": "a"}, {"revision": "b"}))]
    assert len({hub.digest(source, Digests(None)) for source in everything}) == 4


def test_an_edited_data_set_with_the_time_it_had_is_another_one(saved: str) -> None:
    source = resolve(saved, split="test")
    before = hub.digest(source, Digests(None))
    (file,) = (Path(saved) / "test").glob("*.arrow")
    found = file.stat()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"xy", b"xz"))
    assert file.stat().st_size == found.st_size
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert hub.digest(source, Digests(None)) != before
    assert texts(saved, split="test") == ["x", "z"]


def test_a_damaged_file_of_a_data_set_is_the_reason(tmp_path: Path) -> None:
    """`datasets` says only that the dataset was not generated."""
    write(tmp_path / "rows.jsonl")
    (tmp_path / "more.jsonl").write_text('{"text": "cut')
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    with pytest.raises(DataError, match="JSON parse error") as caught:
        texts(tmp_path)
    assert "without its README.md, finray reads the files itself" in str(caught.value.repair)
    (tmp_path / "README.md").unlink()
    with pytest.raises(DataError, match="the row is not JSON"):
        texts(tmp_path)


def test_a_copy_of_a_saved_data_set_is_the_same_one(saved: str, tmp_path: Path) -> None:
    """Whatever the times and permissions of its files are: a copy need not be prepared again."""
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "test" / "state.json").chmod(0o600)
    both = [hub.digest(resolve(str(one), split="test"), Digests(None)) for one in (saved, copy)]
    assert both[0] == both[1]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 300, 600])
def test_rows_of_a_data_set_in_pieces(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` is asked for 256 rows at a time, and pieces begin anywhere."""
    monkeypatch.setattr(pieces, "ROWS_PER_PIECE", 100)
    monkeypatch.setattr(pieces, "MOST_PARTS", 3)
    datasets.Dataset.from_dict({"text": [f"{at}" for at in range(count)]}).save_to_disk(str(tmp_path / "saved"))
    source = resolve(str(tmp_path / "saved"), split="train")
    parts = plan_parts(source, Reading())
    assert len(parts) == (-(-count // 100) if count <= 300 else 3)
    found = [row for (piece,) in parts for row in read_piece(piece, source, Reading())]
    assert [value["text"] for _, value in found] == [f"{at}" for at in range(count)]  # type: ignore[index]
    assert [piece.first for (piece,) in parts] == [piece.start for (piece,) in parts]
    assert [row["text"] for row in hub.rows(source, count // 3, None)] == [f"{at}" for at in range(count // 3, count)]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("", ["train-0.jsonl", "train-1.jsonl"]),
        ("/*.jsonl", ["train-0.jsonl", "train-1.jsonl", "validation.jsonl"]),
        ("/validation.jsonl", ["validation.jsonl"]),
    ],
)
def test_files_behind_a_url_are_chosen_as_those_of_a_directory(name: str, files: list[str]) -> None:
    folder = Folder(f"memory:///{uuid.uuid4()}/a")
    for file in ("train-0.jsonl", "train-1.jsonl", "validation.jsonl", "picture.png"):
        folder.write(file, b'{"text": "one"}')
    source = resolve(f"{folder.root}{name}", split="train")
    assert [source.short(file) for file in source.files] == files
    assert len(texts(f"{folder.root}{name}")) == len(files)
    folder.delete()
    with pytest.raises(DataError, match="there are no data files"):
        resolve(f"{folder.root}{name}", split="train")


def test_hidden_files_behind_a_url_are_skipped_as_those_of_a_directory(tmp_path: Path) -> None:
    url = f"memory:///{uuid.uuid4()}/.runs/a"
    for folder in (Folder(url), Folder(tmp_path)):
        for file in ("rows.jsonl", "more/rows.jsonl", ".cache/rows.jsonl", "more/.rows.jsonl", "..rows.jsonl"):
            folder.write(file, b'{"text": "one"}')
        source = resolve(folder.root, split="train")
        assert [source.short(file) for file in source.files] == ["more/rows.jsonl", "rows.jsonl"]


def test_a_url_that_is_no_file_of_a_known_type_says_so(tmp_path: Path) -> None:
    folder = Folder(f"memory:///{uuid.uuid4()}/a")
    folder.write("rows.zip", b"x")
    folder.write("rows", b"x")
    for name, said in (("rows.zip", "files of type `.zip` are not supported"), ("rows", "files without a suffix")):
        with pytest.raises(DataError, match=said):
            resolve(f"{folder.root}/{name}", split="train")
    with pytest.raises(DataError, match="there are no data files"):
        resolve(folder.root, split="train")
    # The only file of a directory is of its split there, as it is in a local one.
    for place in (Folder(f"memory:///{uuid.uuid4()}/a"), Folder(tmp_path)):
        place.write("validation.jsonl", b'{"text": "one"}')
        with pytest.raises(DataError, match="there is no file for the split `train`"):
            resolve(place.root, split="train")
        assert len(resolve(f"{place.root}/validation.jsonl", split="train").files) == 1


def test_files_of_a_directory_that_are_not_read_are_named(tmp_path: Path) -> None:
    for folder in (Folder(tmp_path), Folder(f"memory:///{uuid.uuid4()}/a")):
        for file in ("train.jsonl", "extra.jsonl", "validation.jsonl", "notes.txt", "b.bin", "sub/a.xlsx", ".hidden"):
            folder.write(file, b'{"text": "one"}')
        named = {split: resolve(folder.root, split=split) for split in ("train", "validation")}
        assert unread([named["train"]]) == [
            f"{folder.root}: files that are not read: 1 text (notes.txt); 2 of other splits (extra.jsonl, "
            "validation.jsonl); 2 of other types (a.xlsx, b.bin)"
        ]
        (line,) = unread(named.values())
        assert "1 of other splits (extra.jsonl)" in line
        # A file that was named has nothing beside it.
        assert not unread([resolve(f"{folder.root}/train.jsonl", split="train")])
    (tmp_path / "set").mkdir()
    assert not unread([resolve(str(write(tmp_path / "set" / "a.jsonl").parent), split="train")])


def test_what_stands_behind_a_colon_is_a_directory_inside(tmp_path: Path) -> None:
    write(tmp_path / "set" / "inner" / "a.jsonl")
    write(tmp_path / "odd:name.jsonl")
    assert texts(f"{tmp_path / 'set'}:inner") == [row["text"] for row in ROWS]
    assert texts(tmp_path / "odd:name.jsonl") == [row["text"] for row in ROWS]
    hub_set = resolve("someone/set:some/dir", split="test", subset="s", revision="r")
    assert hub_set == Source("someone/set:some/dir", subset="s", revision="r", split="test", data_dir="some/dir")
    plain = resolve("someone/set", split="test", subset="s", revision="r")
    assert plain == Source("someone/set", subset="s", revision="r", split="test")
    assert not plain.is_files
    for name in ("missing:part", ":part"):
        assert resolve(name, split="train") == Source(name, split="train")


@pytest.mark.parametrize(
    ("files", "split", "wanted"),
    [
        ("train.jsonl valid.jsonl", "validation", "valid.jsonl"),
        ("train/a.jsonl validation/a.jsonl other.jsonl", "train", "train/a.jsonl"),
        ("odd.jsonl/a.jsonl", "train", "odd.jsonl/a.jsonl"),
        ("train.jsonl dev-0.jsonl", "val", "dev-0.jsonl"),
        ("train.jsonl val.jsonl validation.jsonl", "validation", "validation.jsonl"),
        ("training_a.jsonl testing.jsonl", "train", "training_a.jsonl"),
        ("training_a.jsonl testing.jsonl", "test", "testing.jsonl"),
        ("trained.jsonl test.jsonl", "train", "trained.jsonl"),
        ("own-1.jsonl own-2.jsonl train.jsonl", "own", "own-1.jsonl own-2.jsonl"),
        ("a.jsonl test.jsonl", "train", "a.jsonl"),
        ("a.jsonl b.jsonl", "validation", "a.jsonl b.jsonl"),
        ("x/test/a.jsonl x/train/deep/a.jsonl", "train", "x/train/deep/a.jsonl"),
        ("train/test/a.jsonl train/b.jsonl", "test", "train/test/a.jsonl"),
        ("train/val.jsonl train/b.jsonl", "validation", "train/val.jsonl"),
        ("x/eval.jsonl x/train.jsonl", "eval", "x/eval.jsonl"),
        ("test.jsonl", "train", ""),
        ("a.jsonl test.jsonl", "validation", ""),
    ],
)
def test_the_files_of_a_directory_that_belong_to_a_split(tmp_path: Path, files: str, split: str, wanted: str) -> None:
    for file in (*files.split(), "notes.md", ".hidden/train.jsonl"):
        write(tmp_path / "d" / file)
    if not wanted:
        with pytest.raises(DataError, match=f"there is no file for the split `{split}`") as caught:
            resolve(str(tmp_path / "d"), split=split)
        assert "there are: " in str(caught.value.repair)
        return
    found = resolve(str(tmp_path / "d"), split=split).files
    assert [str(Path(file).relative_to(tmp_path / "d")) for file in found] == wanted.split()


def test_hub_style_directories_with_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write(tmp_path / "set/data/part.jsonl")
    card = "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: data/part.jsonl\n---\n"
    (tmp_path / "set/README.md").write_text(card, encoding="utf-8")
    assert texts(tmp_path / "set", subset="small") == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "does not exist$"),
        ("conversation.jsonl", r"does not exist \(did you mean `.*/conversations.jsonl`\?\)$"),
        ("missing", "does not exist"),
        ("*.csv", "matches no file"),
        ("notes.pdf", "not supported"),
        ("*", "not supported"),
        ("pictures", "the directory holds no data files"),
    ],
)
def test_sources_that_are_not_there(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.pdf").write_bytes(b"x")
    write(tmp_path / "a.jsonl")
    write(tmp_path / "conversations.jsonl")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        resolve(str(tmp_path / name), split="train")
    assert re.search(message, caught.value.message)


def test_a_name_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="cannot be loaded"):
        texts("nobody/nothing-of-this-name")
