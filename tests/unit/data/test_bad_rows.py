"""Rows that cannot be used: each is named by file and row, or dropped, counted and listed; the others are untouched."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finray.config.schema import FIELDS
from finray.data.sources import pieces, readers
from finray.data.sources.pieces import read
from finray.data.sources.resolve import resolve
from finray.errors import DataError
from tests.support import tiny
from tests.support.examples import examples
from tests.support.preparing import Preparing, Write, bad_rows_of, ids, lines
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

pytestmark = pytest.mark.long

GOOD = [{"text": f"{tiny.WORDS[at]} {at}"} for at in range(20)]
CHATS = tiny.chat_rows(20)


@dataclass(frozen=True)
class Case:
    """A file in which one row is bad.

    Attributes:
        name: of the file; its suffix says how it is read.
        before: of the file, up to the bad row.
        bad: the row.
        after: the rest.
        row: its number.
        message: what is said of it.
    """

    name: str
    before: bytes
    bad: bytes
    after: bytes
    row: int
    message: str


def line(row: Any) -> bytes:
    return (json.dumps(row) + "\n").encode()


def jsonl(bad: bytes, message: str, good: list[Any] = GOOD) -> Case:
    """In the middle, after a blank line."""
    return Case("rows.jsonl", b"".join(map(line, good[:11])) + b"\n", bad, b"".join(map(line, good[11:])), 13, message)


def chat(turns: Any, message: str) -> Case:
    return jsonl(line({"messages": turns}), message, CHATS)


def array(bad: bytes, message: str) -> Case:
    before, after = (b",\n".join(json.dumps(row).encode() for row in part) for part in (GOOD[:11], GOOD[11:]))
    return Case("rows.json", b"[" + before + b",\n", bad + b",\n", after + b"]\n", 12, message)


def table(bad: bytes, message: str, *, end: bytes = b"\n") -> Case:
    before, after = (
        b"".join(f"{row['text']},{at}".encode() + end for at, row in enumerate(part)) for part in (GOOD[:11], GOOD[11:])
    )
    return Case("rows.csv", b"text,n" + end + before, bad + end, after, 12, message)


def text(bad: bytes, message: str) -> Case:
    before, after = (b"".join(f"{row['text']}\n".encode() for row in part) for part in (GOOD[:11], GOOD[11:]))
    return Case("rows.txt", before, bad + b"\n", after, 12, message)


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
BOM = b"\xef\xbb\xbf"

CASES = {
    "broken UTF-8": jsonl(b'{"text": "caf\xe9"}\n', "not UTF-8 at byte 13"),
    "UTF-16": jsonl('{"text": "café"}'.encode("utf-16") + b"\n", "not UTF-8"),
    "not JSON": jsonl(b'{"text": "one}\n', "not JSON"),
    "no object": jsonl(b'["text"]\n', "the row is a list"),
    "too many digits": jsonl(b'{"text": ' + b"1" * 5000 + b"}\n", "too many digits"),
    "too deep": jsonl(b'{"text": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
    "null field": jsonl(line({"text": None}), "`text` is null"),
    "missing field": jsonl(line({"txt": "one"}), "`text` is missing (columns: txt)"),
    "number": jsonl(line({"text": 5}), "holds int, not text"),
    "nested column": jsonl(line({"text": {"en": "one"}}), "holds dict, not text"),
    "half a pair": jsonl(b'{"text": "one \\ud83d"}\n', "half of a surrogate pair"),
    "half a pair in a name": jsonl(b'{"\\udc00": "one"}\n', "half of a surrogate pair"),
    "mark of byte order": jsonl(BOM + line(GOOD[0]), "begins with a byte order mark"),
    "10 MB": jsonl(line({"text": "one " * 2_500_000}), "longer than 8,000,000 bytes"),
    "a key twice": jsonl(b'{"text": "one", "n": 1, "text": "two"}\n', "an object has the key `text` twice"),
    "a key twice inside": jsonl(
        b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}\n', "the key `role` twice", CHATS
    ),
    "a key twice in JSON text": chat('[{"role": "user", "role": "user", "content": "a"}]', "the key `role` twice"),
    "no messages": chat([], "empty list of messages"),
    "null messages": chat(None, "`messages` is null"),
    "null content": chat([USER, {"role": "assistant", "content": None}], "messages[1] has no text"),
    "two answers": chat([USER, ANSWER, ANSWER], "messages[2]: two assistant turns in a row"),
    "unknown role": chat([{"role": "asistant", "content": "a"}], "unknown role `asistant` (did you mean `assistant`?)"),
    "half a pair in a role": jsonl(b'{"messages": [{"role": "\\ud800", "content": ""}]}\n', "surrogate", CHATS),
    "answer first": chat([ANSWER, USER, ANSWER], "begins with an assistant turn"),
    "array, broken UTF-8": array(b'{"text": "caf\xe9"}', "not UTF-8 at byte 13"),
    "array, no object": array(b"5", "the row is a int"),
    "array, a key twice": array(b'{"text": "one", "text": "two"}', "the key `text` twice"),
    "array, null": array(b'{"text": null}', "`text` is null"),
    "array, half a pair": array(b'{"text": "\\ud83d"}', "half of a surrogate pair"),
    "array, 10 MB": array(json.dumps({"text": 'o"{[\\' + "x" * 10**7}).encode(), "longer than 8,000,000 bytes"),
    "CSV, broken UTF-8": table(b"caf\xe9,1", "not UTF-8"),
    "CSV, too few": table(b"one", "the row has 1 columns, but the header has 2"),
    "CSV, too many": table(b"one,1,2", "the row has 3 columns, but the header has 2"),
    "CSV, quotes": table(b'"one" two,1', "not CSV"),
    "CSV, mark of byte order": table(BOM + b"text,n", "begins with a byte order mark"),
    "CSV, 10 MB": table(b"one " * 2_500_000 + b",1", "longer than 8,000,000 bytes"),
    "text, broken UTF-8": text(b"caf\xe9", "not UTF-8 at byte 3"),
}


@pytest.mark.parametrize("parts", [1, 6])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_bad_row_is_named_or_dropped(
    preparing: Preparing, put: Write, case: Case, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", len(case.before + case.bad + case.after) // parts + 1)
    options: dict[str, Any] = {"prepare": {"text_rows": "line"}}
    source = put(f"bad/{case.name}", case.before + case.bad + case.after)
    error = preparing.refused(source, **options)
    assert error.where == f"{source}:{case.row}"
    assert case.message in error.message
    dataset = preparing.dataset(source, on_bad_row="drop", **options)
    (listed,) = bad_rows_of(dataset)
    assert case.message in listed.pop("message")
    assert listed == {"split": "train", "file": case.name, "row": case.row}
    stats = dataset.manifest.splits["train"]
    assert (stats.bad_rows, stats.source_rows, stats.rows) == (1, 21, 20)
    # The rows are those of the file without it.
    clean = preparing.dataset(put(f"good/{case.name}", case.before + case.after), **options)
    assert clean.manifest.splits["train"].bad_rows == 0
    assert ids(dataset.all_rows("train")) == ids(clean.all_rows("train"))
    assert dataset.all_rows("train").where(15).split(":")[0] == case.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content", "row", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n{"text": "thr', 3, "and the file ends there"),
        ("a.csv", b'text,n\none,1\ntwo,2\n"thr', 3, "unexpected end of data"),
        ("a.csv", b"text,n\none,1\ntwo,2\nthr", 3, "columns, but the header has"),
        ("a.json", b'[{"text": "one"},\n{"text": "two"},\n{"text": "thr', 3, "not JSON"),
        ("a.json", b'[{"text": "one"},\n{"text": "two"}', 3, "ends inside its array"),
        ("a.json", b'[{"text": "one"},\n{"text": "two"},', 3, "ends inside its array"),
        ("a.json", b'[{"text": "one"},\n{"text": "two"}]\n[{"text": "lost"}]', 3, "there is text after the array"),
        ("a.json", b'[{"text": "one"},\n{"text": "two"},\n{"text": three}]', 3, "rows after this one"),
    ],
)
def test_a_file_that_was_cut_off(
    preparing: Preparing, put: Write, name: str, content: bytes, row: int, message: str
) -> None:
    source = put(name, content)
    error = preparing.refused(source)
    assert error.where == f"{source}:{row}"
    assert message in str(error)
    if not name.endswith(".json"):
        assert preparing.texts(source, on_bad_row="drop") == ["one", "two"]


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


PACKED = [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd)]


@pytest.mark.parametrize(("suffix", "pack"), PACKED)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_a_packed_file_is_read_as_the_file_that_is_in_it(
    preparing: Preparing, put: Write, suffix: str, pack: Callable[[bytes], bytes], name: str
) -> None:
    """Also of several packed files, one after the other."""
    texts = [row["text"] for row in GOOD]
    plain = {
        "rows.jsonl": lines(GOOD),
        "rows.json": json.dumps(GOOD),
        "rows.csv": "\n".join(["text", *texts]),
        "rows.txt": "\n".join(texts),
    }[name].encode()
    packed = pack(plain[:100]) + pack(plain[100:])
    assert preparing.texts(put(f"{name}.{suffix}", packed), prepare={"text_rows": "line"}) == texts


def damaged_tables() -> Iterator[tuple[str, bytes]]:
    table = pa.table({"text": [f"{row['text']} {at}" for at, row in enumerate(GOOD * 100)]})
    with pa.BufferOutputStream() as stream:
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
        whole = stream.getvalue().to_pybytes()
        yield "cut.arrow", whole[:-1000]
        yield "none.arrow", b"not a table at all, only a few words"
        yield "empty.arrow", b""
    with pa.BufferOutputStream() as stream:
        pq.write_table(table, stream)
        whole = stream.getvalue().to_pybytes()
        yield "cut.parquet", whole[:-1000]
        yield "flipped.parquet", whole[:50] + bytes(255 - byte for byte in whole[50:500]) + whole[500:]
        yield "empty.parquet", b""


@pytest.mark.parametrize(
    ("name", "content"), damaged_tables(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_table_that_is_damaged_is_named(preparing: Preparing, put: Write, name: str, content: bytes) -> None:
    source = put(name, content)
    error = preparing.refused(source)
    assert error.where == str(source)
    assert "written" not in error.message


def test_broken_utf8_in_a_parquet_file_is_named_by_its_row(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    words = [row["text"].encode() for row in GOOD]
    words[12] = b"caf\xe9"
    plain = pa.array(words, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(plain), plain.buffers())
    source = put("rows.parquet", b"")
    pq.write_table(pa.table({"text": column}), source, row_group_size=5)
    error = preparing.refused(source)
    assert error.where == f"{source}:13"
    dataset = preparing.dataset(source, on_bad_row="drop")
    assert [row["row"] for row in bad_rows_of(dataset)] == [13]
    assert preparing.said(dataset.all_rows("train")) == [row["text"] for at, row in enumerate(GOOD) if at != 12]


def test_what_is_unusual_but_right(preparing: Preparing, put: Write) -> None:
    """A byte order mark at the start, Windows line ends, a large row below the limit, a pair of surrogates."""
    smile = '{"text": "\\ud83d\\ude00"}'
    content = BOM + b'{"text": "one"}\r\n\r\n{"text": "two"}\r\n' + smile.encode() + b"\r\n"
    assert preparing.texts(put("a.jsonl", content)) == ["one", "two", "😀"]
    array = BOM + b'[\r\n{"text": "one"},\r\n' + smile.encode() + b"\r\n]\r\n"
    assert preparing.texts(put("a.json", array)) == ["one", "😀"]
    table = BOM + b'text,n\r\none,1\r\n"two\r\nthree",2\r\n'
    assert preparing.texts(put("a.csv", table)) == ["one", "two\nthree"]
    assert preparing.texts(put("a.txt", BOM + b"one\r\ntwo\r\n")) == ["one\ntwo\n"]
    large = line({"text": "one", "page": "x" * 7_900_000})
    assert preparing.texts(put("b.jsonl", large)) == ["one"]
    assert preparing.texts(put("b.json", b"[" + large + b"," + large + b"]")) == ["one", "one"]


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_row_of_an_array_that_never_ends_is_refused_before_it_fills_the_memory(
    preparing: Preparing, put: Write, on_bad_row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_WINDOW", 1000)
    monkeypatch.setattr(readers, "CHUNK", 100)
    for end in (b'"}]', b""):
        source = put("a.json", b'[{"text": "one"}, {"text": "' + b"x" * 5000 + end)
        error = preparing.refused(source, on_bad_row=on_bad_row, prepare={"max_row_bytes": 100})
        assert error.where == f"{source}:2"
        assert "the row has more than" in error.message
        assert "write the file as .jsonl" in str(error.repair)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_the_limit_is_of_the_row_without_its_line_end(preparing: Preparing, put: Write, name: str) -> None:
    row = b'{"text": "one"}'
    for end in (b"\n", b"\r\n"):
        content = end.join([row, row]) + end if name == "a.jsonl" else b"[" + row + b"," + end + row + b"]"
        source = put(name, content)
        assert len(preparing.texts(source, prepare={"max_row_bytes": len(row)})) == 2
        assert "longer than 14 bytes" in preparing.refused(source, prepare={"max_row_bytes": len(row) - 1}).message


def test_a_header_that_is_not_utf8_is_named(preparing: Preparing, put: Write) -> None:
    source = put("a.csv", b"text,caf\xe9\none,1\n")
    error = preparing.refused(source)
    assert (error.message, error.where) == ("the header is not UTF-8", str(source))


def test_several_bad_rows_in_several_files_and_splits(
    preparing: Preparing, put: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 90)
    bad = {"a": {3, 7, 19}, "b": {1}, "c": set(range(1, 21)) - {10}}
    for name, rows in bad.items():
        content = b"".join(b"\xff\n" if at in rows else line(GOOD[at - 1]) for at in range(1, 21))
        folder = put(f"set/train-{name}.jsonl", content).parent
    put("set/test.jsonl", lines([{"text": None}, GOOD[0]]))
    dataset = preparing.dataset(folder, test_split="test", on_bad_row="drop")
    found = [(row["split"], row["file"], row["row"]) for row in bad_rows_of(dataset)]
    assert found == [
        *(("train", f"train-{name}.jsonl", row) for name in "abc" for row in sorted(bad[name])),
        ("test", "test.jsonl", 1),
    ]
    assert dataset.manifest.splits["train"].bad_rows == 23
    assert dataset.manifest.splits["test"].bad_rows == 1


def test_nothing_but_bad_rows_is_an_error_in_either_case(preparing: Preparing, put: Write) -> None:
    source = put("a.jsonl", b"\xff\n" * 3)
    assert "not UTF-8" in preparing.refused(source).message
    assert "not UTF-8" in preparing.refused(source, on_bad_row="drop").message


# --- anything at all ------------------------------------------------------------------------------------------------

_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800")
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_turns = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", "human", "function_call", "robot"])
            | _values,
            "content": _values,
            "value": _values,
            "tool_calls": _values,
            "train": _values,
        },
    )
    | _values,
    max_size=4,
)
_rows = st.dictionaries(st.sampled_from(sorted(FIELDS)), _turns | _values | st.text(max_size=20), max_size=4)
_mended = st.fixed_dictionaries(
    {"instruction": st.text(max_size=9), "output": st.text(max_size=9)},
    optional={"history": _values, "system": _values, "input": _values},
)
_chats = st.fixed_dictionaries({"messages": _turns}, optional={"tools": _values | _turns})


@pytest.fixture(scope="module")
def anything(tiny_model_dir: Path, tokenizer: Any) -> Callable[..., None]:
    def prepare(content: bytes, suffix: str, **options: Any) -> None:
        """Either it is prepared, or a DataError says why not; nothing else comes of it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"rows{suffix}"
            path.write_bytes(content)
            preparing = Preparing(tiny_model_dir, tokenizer, Path(folder) / "prepared")
            for on_bad_row in ("error", "drop"):
                try:
                    dataset = preparing.dataset(path, on_bad_row=on_bad_row, **options)
                except DataError as error:
                    # What is said must be fit to be printed.
                    str(error).encode("utf-8")
                else:
                    counts = dataset.manifest.splits["train"]
                    assert len(bad_rows_of(dataset)) == counts.bad_rows
                    assert on_bad_row == "drop" or not counts.bad_rows

    return prepare


_quickly = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))


@_quickly
@given(
    content=st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [b'{"text": "', b'"}', b"\n", b"\r\n", b"[", b"]", b",", b'"', b"\xff", BOM, b"\\ud800", b"one", b"\0"]
        )
    ).map(b"".join),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".jsonl.gz", ".json.xz"]),
)
def test_random_bytes_end_in_rows_or_in_a_data_error(
    anything: Callable[..., None], content: bytes, suffix: str
) -> None:
    anything(content, suffix)


@_quickly
@given(
    rows=st.lists(_rows, min_size=1, max_size=3)
    | st.lists(_mended, min_size=1, max_size=3)
    | st.lists(_chats, min_size=1, max_size=3),
    wanted=st.sampled_from(["auto", "auto", "labelled_text"]),
)
def test_random_rows_end_in_rows_or_in_a_data_error(
    anything: Callable[..., None], rows: list[dict[str, Any]], wanted: str
) -> None:
    anything(lines(rows).encode(), ".jsonl", format=wanted)


@pytest.mark.parametrize(
    ("name", "content", "said", "where"),
    [
        ("rows.csv", b'text\x00,"a\n', "the header is not CSV", "rows.csv"),
        ("rows.json", b"[" + b'{"a":' * 60_000 + b"1" + b"}" * 60_000 + b"]", "nested too deeply", "rows.json:1"),
        ("rows.json", b'[{"a": 1}, {"a": ' + b"1" * 5_000 + b"}]", "a number has too many digits", "rows.json:2"),
    ],
)
def test_what_no_reader_takes_is_named(put: Write, name: str, content: bytes, said: str, where: str) -> None:
    path = put(name, content)
    with pytest.raises(DataError, match=said) as caught:
        list(read(resolve(str(path), split="train")))
    assert str(caught.value.where).endswith(where)
