"""Records of a table all have the same fields: those that a record does not have are null, and are not learned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.sources.memory import write_rows
from tests.support.preparing import Preparing, lines
from tests.support.preparing import preparing as preparing


def calling(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "do"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TEXT = {"type": "string"}
ROWS = [
    {"messages": calling("depth", river="Ob"), "tools": [tool("depth", river=TEXT)]},
    {"messages": calling("time", zone="UTC"), "tools": [tool("time", zone=TEXT), tool("stop")]},
]


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def arrow(folder: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    return folder / "rows.arrow"


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def table_in_memory(folder: Path) -> Path:
    return write_rows(pa.Table.from_pylist(ROWS), folder)


def dataset_in_memory(folder: Path) -> Path:
    return write_rows(datasets.Dataset.from_list(ROWS), folder)


@pytest.mark.parametrize("write", [parquet, arrow, saved, table_in_memory, dataset_in_memory])
@pytest.mark.parametrize("converter", [None, "passes_on:f"])
def test_tools_and_calls_of_a_table_are_those_of_json_lines(
    preparing: Preparing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], Path],
    converter: str | None,
) -> None:
    # The case before has imported a file of the same name, which is gone.
    monkeypatch.delitem(sys.modules, "passes_on", raising=False)
    (tmp_path / "passes_on.py").write_text("def f(row):\n    return row\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    wanted = preparing.texts(tmp_path / "rows.jsonl", max_length=512)
    assert json.dumps({"river": "Ob"}) in wanted[0]
    (tmp_path / "table").mkdir()
    found = preparing.texts(write(tmp_path / "table"), max_length=512, converter=converter)
    assert [sorted(text) for text in found] == [sorted(text) for text in wanted]
    assert "null" not in "".join(found)


def test_a_null_in_json_lines_is_meant(preparing: Preparing, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines([{"messages": calling("depth", river=None)}]))
    assert '"river": null' in preparing.texts(tmp_path / "rows.jsonl", max_length=512)[0]
