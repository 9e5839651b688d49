"""What an evaluation has computed is kept line by line: a kill loses the line that it cut off, and no other."""

from __future__ import annotations

import errno
import io
import json
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finray.errors import FinrayError
from finray.evaluation.result_cache import ResultCache
from tests.support.examples import examples

BELONGS = {"model": "m", "sampling": {"seed": 1}}


def add(folder: Path, values: dict[int, object], by: str = "one") -> ResultCache:
    kept = ResultCache(folder, "answers", BELONGS)
    with kept.writer(made_by={"engine": by}) as keep:
        for row, value in values.items():
            keep(row, value)
    return kept


def test_values_are_found_again_by_row_and_by_what_they_belong_to(tmp_path: Path) -> None:
    first = add(tmp_path, {3: ["a"], 1: [0.5, 2]})
    assert first.values == {3: ["a"], 1: [0.5, 2]}
    again = ResultCache(tmp_path, "answers", BELONGS)
    assert again.values == first.values
    assert again.made_by == [{"engine": "one"}]
    for kind, belongs in (("losses", BELONGS), ("answers", {**BELONGS, "model": "other"})):
        other = ResultCache(tmp_path, kind, belongs)
        assert (other.values, other.made_by) == ({}, [])
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("answers-")
    assert len(file.stem) == len("answers-") + 16


def test_the_file_says_what_it_belongs_to_once_and_who_made_the_lines_when_that_changes(tmp_path: Path) -> None:
    for by, row in (("one", 0), ("one", 1), ("two", 2), ("one", 3)):
        kept = add(tmp_path, {row: row}, by)
    text = next(tmp_path.iterdir()).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    sums = [line.pop("crc32") for line in lines]
    assert sums == [zlib.crc32((line.rpartition(", ")[0] + "}").encode()) for line in text.splitlines()]
    one, two = {"made_by": {"engine": "one"}}, {"made_by": {"engine": "two"}}
    rows = [{"row": row, "value": row} for row in range(4)]
    assert lines == [{"belongs_to": BELONGS}, one, rows[0], rows[1], two, rows[2], one, rows[3]]
    assert kept.made_by == [{"engine": "one"}, {"engine": "two"}, {"engine": "one"}]
    assert kept.values == {row: row for row in range(4)}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40))
@given(cut=st.integers(0, 400))
def test_after_a_kill_at_any_byte_whole_lines_are_there_and_the_rest_is_computed_again(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    values = {row: f"text ü {row}" for row in range(5)}
    add(folder, values)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:cut])
    whole = [json.loads(line) for line in content[:cut].split(b"\n")[:-1]]
    kept = ResultCache(folder, "answers", BELONGS)
    assert kept.values == {one["row"]: one["value"] for one in whole if "row" in one}
    add(folder, {row: value for row, value in values.items() if row not in kept.values})
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"value": 12.5', b'"value": 82.5'),
        (b'"row": 1', b'"row": 3'),
        (b'"row": 1', b'"rov": 1'),
        (b'{"row": 1', b'["row": 1'),
        (b', "crc32"', b', "crc33"'),
    ],
)
def test_a_line_that_was_changed_is_computed_again(tmp_path: Path, before: bytes, after: bytes) -> None:
    """And no other one; a line without a checksum is one of an earlier version."""
    values: dict[int, object] = {0: 7.0, 1: 12.5, 2: 3.0}
    add(tmp_path, values)
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    assert before in lines[3]
    file.write_bytes(b"".join([*lines[:3], lines[3].replace(before, after), *lines[4:]]))
    kept = ResultCache(tmp_path, "answers", BELONGS)
    assert kept.values == {0: 7.0, 2: 3.0}
    add(tmp_path, {1: 12.5})
    assert ResultCache(tmp_path, "answers", BELONGS).values == values


def test_a_file_of_something_else_under_the_same_name_is_written_anew(tmp_path: Path) -> None:
    add(tmp_path, {0: 7.0})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b'"model": "m"', b'"model": "x"'))
    assert ResultCache(tmp_path, "answers", BELONGS).values == {}
    add(tmp_path, {1: 1.0})
    assert ResultCache(tmp_path, "answers", BELONGS).values == {1: 1.0}


def test_text_that_is_no_character_is_kept_all_the_same(tmp_path: Path) -> None:
    add(tmp_path, {0: "half \ud83d of a pair"})
    assert set(ResultCache(tmp_path, "answers", BELONGS).values) == {0}


def test_each_line_is_on_disk_when_the_next_is_computed(tmp_path: Path) -> None:
    kept = ResultCache(tmp_path, "answers", BELONGS)
    with kept.writer(made_by={"engine": "one"}) as keep:
        keep(7, "a")
        assert ResultCache(tmp_path, "answers", BELONGS).values == {7: "a"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    kept = ResultCache(tmp_path / "missing", "answers", BELONGS)
    with pytest.raises(FinrayError, match="answers cannot be written: No such file") as caught, kept.writer(made_by={}):
        pass
    assert str(tmp_path / "missing") in str(caught.value.where)


def test_an_error_of_what_computes_is_not_one_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), ResultCache(tmp_path, "answers", BELONGS).writer(made_by={}):
        raise ConnectionError("an engine is out of reach")


def test_a_disk_that_is_full_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    kept = add(tmp_path, {1: "a"})
    monkeypatch.setattr("finray.evaluation.result_cache.appending", lambda *given: Full())
    with pytest.raises(FinrayError, match="answers cannot be written: No space left"), kept.writer(made_by={}) as keep:
        keep(2, "b")
    assert kept.values == {1: "a"}
