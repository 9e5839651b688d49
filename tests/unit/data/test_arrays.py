"""An array of JSON is read through a window: wherever that ends, the rows are those that `json` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from finray.data.sources import readers
from finray.data.sources.readers import ByteRange, Reading, read_array
from finray.errors import DataError
from tests.support.examples import examples

TEXTS = st.text(st.sampled_from('ab "\\{}[],:\né😀'), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS
INSIDE = st.recursive(LEAVES | st.floats(allow_nan=False, allow_infinity=False), lambda one: st.lists(one, max_size=3))
ROWS = st.dictionaries(TEXTS, INSIDE, max_size=3)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150))
@given(
    rows=st.lists(ROWS | LEAVES | st.lists(LEAVES, max_size=3), max_size=6),
    space=st.sampled_from(["", " ", "\n\t "]),
    chunk=st.integers(1, 40),
    ascii_only=st.booleans(),
)
@example(rows=[123456, {"a": 1.5}, 7], space="", chunk=4, ascii_only=True)  # A number that the window cuts.
@example(rows=[{"a": 1}, {"b": 2}], space=" ", chunk=1, ascii_only=True)
def test_rows_are_those_of_json_wherever_the_window_ends(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], space: str, chunk: int, ascii_only: bool
) -> None:
    file = tmp_path_factory.mktemp("array") / "rows.json"
    texts = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    file.write_text(f"{space}[{space}{f'{space},{space}'.join(texts)}{space}]{space}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", chunk)
        found = list(read_array(ByteRange(str(file), "array"), Reading()))
    assert len(found) == len(rows)
    for one, row in zip(found, rows, strict=True):
        if isinstance(row, dict):
            assert one == row
        else:
            assert isinstance(one, DataError)
            assert one.message == f"the row is a {type(row).__name__}, not an object with columns"


@pytest.mark.parametrize(
    ("rest", "is_refused"), [("", False), (" \n\t\r ", False), ("x", True), (" " * 90 + "]", True)]
)
def test_what_follows_the_array_is_refused(
    tmp_path: Path, rest: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "CHUNK", 8)
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1}]' + rest, encoding="utf-8")
    rows = read_array(ByteRange(str(file), "array"), Reading())
    assert next(rows) == {"a": 1}
    if is_refused:
        with pytest.raises(DataError, match="there is text after the array"):
            list(rows)
    else:
        assert list(rows) == []
