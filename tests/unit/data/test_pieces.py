"""Sources cut into pieces: any cut reads every row once, under the number that it has in its file; slices."""

from __future__ import annotations

import io
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finray.data.sources import pieces
from finray.data.sources.pieces import plan_parts, read, read_piece, row_number
from finray.data.sources.readers import ByteRange, Reading
from finray.data.sources.resolve import Slice, Source, resolve, split_name
from finray.errors import DataError
from tests.support.examples import examples
from tests.support.preparing import Preparing, Write, bad_rows_of, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

READING = Reading(max_row_bytes=60)

_blank = st.sampled_from([b"", b" ", b"\t"])
_long = st.integers(61, 200).map(lambda length: b'{"n": "' + b"x" * length + b'"}')
_row = st.text(alphabet="a\u00e9\u2603{", max_size=9).map(
    lambda text: json.dumps({"n": text}, ensure_ascii=False).encode()
)
_content = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(_row | _row | _blank | _long, st.sampled_from([b"\n", b"\n", b"\r\n"])), max_size=12),
    st.sampled_from([b"", b'{"n": "last"}', b"   "]),
).map(lambda made: made[0] + b"".join(row + end for row, end in made[1]) + made[2])


def expected(content: bytes) -> list[tuple[int, Any]]:
    """Rows by an independent reading of the whole: number of the line, and its value or None where it is too long."""
    rows = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            rows.append((number, None if len(line.rstrip(b"\r")) > 60 else json.loads(line)))
    return rows


def values(items: Any, first: int) -> list[tuple[int, Any]]:
    return [(first + number, None if isinstance(value, DataError) else value) for number, value in items]


@settings(max_examples=examples(300), deadline=None)
@given(content=_content, cuts=st.lists(st.integers(1, 400), max_size=6))
def test_any_cut_reads_every_row_once_under_its_number(content: bytes, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(content)
        source = Source(str(path), (str(path),))
        borders = [0, *sorted({cut for cut in cuts if cut < len(content)}), None]
        found = []
        for start, stop in pairwise(borders):
            assert start is not None
            piece = ByteRange(str(path), "lines", start, stop, first=None if start else 0)
            found += values(read_piece(piece, source, READING), row_number(piece, 0, READING))
    assert found == expected(content)


@settings(max_examples=examples(200), deadline=None)
@given(content=_content, size=st.integers(5, 300), low=st.integers(-15, 15), high=st.integers(-15, 15))
def test_slices_of_planned_pieces_are_those_of_the_list_of_rows(content: bytes, size: int, low: int, high: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", size)
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(content)
        both = (str(path), str(path))
        source = Source(str(path), both, slice=Slice(str(low), str(high)))
        found = []
        for piece in (piece for part in plan_parts(source, READING) for piece in part):
            assert piece.first is not None
            found += values(read_piece(piece, source, READING), piece.first)
    rows = expected(content) * 2
    assert found == rows[slice(low, high)]


@settings(max_examples=examples(300), deadline=None)
@given(rows=st.integers(0, 3000), low=st.integers(0, 100), high=st.integers(0, 100), sign=st.booleans())
def test_percentages_are_rounded_as_datasets_rounds_them(rows: int, low: int, high: int, sign: bool) -> None:
    spec = f"train[{low}%:{-high if sign and high else high}%]"
    (wanted,) = datasets.ReadInstruction.from_spec(spec).to_absolute({"train": rows})
    start, stop = wanted.from_ or 0, rows if wanted.to is None else wanted.to
    _, own = split_name(spec)
    assert own is not None
    found = own.of(rows)
    if sign and high and not round(rows * high / 100):
        # `datasets` takes -1% of few rows for 0; here nothing is cut off the end.
        assert found[1] == rows
    elif stop > start or found[1] > found[0]:
        assert found == (start, stop)


NO_SPLITS = (
    "train[",
    "train[:",
    "train[5]",
    "train[-:]",
    "train[%:]",
    "train[a:b]",
    "train+test",
    "[:5]",
    "train[::2]",
    "",
)
# `datasets` takes both ends for percentages.
MIXED = ("train[5:50%]", "train[50%:-1]")


@pytest.mark.parametrize("split", [*NO_SPLITS, *MIXED])
def test_a_split_that_is_none_is_refused(put: Write, split: str) -> None:
    source = put("a.jsonl", lines([{"text": "one"}]))
    with pytest.raises(DataError, match="mixes rows and percent" if split in MIXED else "is not a split"):
        resolve(str(source), split=split)


def test_an_empty_slice_is_an_empty_data_set(preparing: Preparing, put: Write) -> None:
    source = put("a.jsonl", lines([{"text": "one"}] * 3))
    for split in ("train[3:]", "train[2:1]", "train[:0]"):
        assert "empty" in preparing.refused(source, train_split=split).message


def table(path: Path, count: int) -> None:
    rows = [{"text": f"row {at}", "more": "x" * (at % 7)} for at in range(count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=9)
    elif path.suffix == ".csv":
        path.write_text("text,more\n" + "".join(f'"{row["text"]}",{row["more"]}\n' for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" * (1 + at % 3) for at, row in enumerate(rows)))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("size", [40, 700, 10**6])
@pytest.mark.parametrize("split", ["train", "train[7:31]", "train[-20%:]"])
def test_files_of_each_kind_in_pieces_of_any_size(
    tmp_path: Path, suffix: str, size: int, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    for name in ("a", "b"):
        table(tmp_path / f"{name}.{suffix}", 25)
    rows = list(read(resolve(str(tmp_path), split=split)))
    wanted = [(f"{name}.{suffix}", at) for name in ("a", "b") for at in range(25)]
    _, cut = split_name(split)
    low, high = (0, 50) if cut is None else cut.of(50)
    assert [(Path(row.file).name, row.value["text"]) for row in rows] == [
        (file, f"row {at}") for file, at in wanted[low:high]
    ]
    if suffix == "jsonl":
        # Blank lines have numbers too.
        where = {at: 1 + sum(1 + before % 3 for before in range(at)) for at in range(25)}
        assert [row.number for row in rows] == [where[at] for _, at in wanted[low:high]]
    else:
        assert [row.number for row in rows] == [at + 1 for _, at in wanted[low:high]]


def test_a_line_without_end_is_not_read_again_for_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file of a single line would be read once from every piece to its end."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 500_000 + b'"}')
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    read_bytes = 0

    class Counting(io.BufferedReader):
        def readline(self, most: int | None = -1) -> bytes:
            nonlocal read_bytes
            line = super().readline(most)
            read_bytes += len(line)
            return line

    monkeypatch.setattr("finray.data.sources.readers.opened", lambda name: Counting(io.FileIO(name)))
    source = Source(str(path), (str(path),))
    rows = [
        item for part in plan_parts(source, READING) for piece in part for item in read_piece(piece, source, READING)
    ]
    assert len(rows) == 1
    assert read_bytes < 3 * 500_000


@pytest.mark.parametrize("size", [50, 400, 10**6])
def test_where_names_the_file_and_row_of_a_prepared_row(
    preparing: Preparing, put: Write, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through files, pieces, blank lines, dropped rows, a slice, held-out rows and texts of several rows."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    whole: dict[str, str] = {}
    for name, count in (("b/one.jsonl", 30), ("a/two.jsonl", 20)):
        for at in range(count):
            whole[f"{name}:{at * 2 + 1}"] = f"{name[2:5]} {at} " + "ten " * (40 * (at % 9 == 0))
        content = "".join(
            f"{json.dumps({'text': text})}\n\n" for where, text in whole.items() if where.startswith(name)
        )
        folder = put(name, content.replace("one 5 ", "\\ud800"))
    splits = preparing.splits(folder.parent.parent, train_split="train[3:45]", eval_ratio=0.2, on_bad_row="drop")
    found: dict[str, str] = {}
    for split in (splits.train, splits.eval):
        for at, text in enumerate(preparing.said(split)):
            assert split is not None
            found[split.where(at)] = found.get(split.where(at), "") + text
    del whole["b/one.jsonl:11"]
    in_order = sorted(whole, key=lambda where: (where[0], int(where.rsplit(":", 1)[1])))
    assert found == {where: whole[where] for where in in_order[3:44]}
    assert splits.train is not None
    dataset = preparing.dataset(folder.parent.parent, on_bad_row="drop")
    assert [(row["file"], row["row"]) for row in bad_rows_of(dataset)] == [("b/one.jsonl", 11)]
