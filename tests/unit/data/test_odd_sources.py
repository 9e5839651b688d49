"""Sources that were once read without a word: each is named, or means what its writer meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finray.data.sources.resolve import resolve, split_name
from finray.errors import DataError
from tests.support.preparing import Preparing, Write
from tests.support.preparing import preparing as preparing
from tests.support.preparing import put as put

ROW = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_in_a_table_are_refused(preparing: Preparing, tmp_path: Path, kind: str) -> None:
    """The last one would win."""
    columns = [pa.array([value]) for value in ("a", "b", "c")]
    table = pa.table(columns, names=["prompt", "completion", "completion"])
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match="two columns are called `completion`") as caught:
        preparing.dataset(file)
    assert str(file) in str(caught.value)


def test_two_columns_of_one_name_are_refused(preparing: Preparing, put: Write) -> None:
    with pytest.raises(DataError, match="the header has 1 name more than once: `prompt`"):
        preparing.dataset(put("rows.csv", "prompt,completion,prompt\na,b,c\n"))


@pytest.mark.parametrize(
    ("between", "before", "after", "said"),
    [
        (",,,,", "", "", "a row is missing between two commas"),
        (" , \n , ", "", "", "a row is missing between two commas"),
        (" ", "", "", "there is no comma before the row"),
        ("", "", "", "there is no comma before the row"),
        (",", ",", "", "a row is missing"),
        (",", "", ",,", "a row is missing between two commas"),
        (",", "", ",", None),
        (" ,\n", " ", "\n", None),
    ],
)
def test_rows_of_an_array_have_one_comma_between_them(
    between: str, before: str, after: str, said: str | None, preparing: Preparing, put: Write
) -> None:
    source = put("rows.json", f"[{before}{json.dumps(ROW)}{between}{json.dumps({**ROW, 'prompt': 'c'})}{after}]")
    if said is None:
        assert preparing.dataset(source).manifest.splits["train"].rows == 2
        return
    with pytest.raises(DataError, match=said) as caught:
        preparing.dataset(source)
    assert str(source) in str(caught.value.where)


def test_commas_at_the_end_of_the_window_are_counted(preparing: Preparing, put: Write) -> None:
    rows = [json.dumps({"pad": "x" * (2**20 - 60 + number), **ROW}) for number in range(3)]
    assert preparing.dataset(put("rows.json", f"[{' ,  '.join(rows)}]")).manifest.splits["train"].source_rows == 3


def test_a_link_that_leads_nowhere_is_named(put: Write) -> None:
    folder = put("rows/a.jsonl", json.dumps(ROW)).parent
    (folder / "b.jsonl").symlink_to(folder / "gone.jsonl")
    with pytest.raises(DataError, match="the symbolic link is broken") as caught:
        resolve(str(folder), split="train")
    assert caught.value.where == str(folder / "b.jsonl")
    with pytest.raises(DataError, match="the symbolic link is broken"):
        resolve(f"{folder}/*.jsonl", split="train")
    (folder / "b.jsonl").unlink()
    (folder / "more").symlink_to(folder / "gone")
    with pytest.raises(DataError, match="the symbolic link is broken"):
        resolve(str(folder), split="train")


def test_a_link_to_a_directory_is_followed_and_not_in_a_circle(put: Write, tmp_path: Path) -> None:
    folder = put("rows/a.jsonl", json.dumps(ROW)).parent
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text(json.dumps(ROW))
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    found = resolve(str(folder), split="train")
    assert list(found.files) == [str(folder / "a.jsonl"), str(folder / "more" / "b.jsonl")]
    # Rows of a folder that is in the source by itself are not read a second time.
    (folder / "x").mkdir()
    (folder / "x" / "c.jsonl").write_text(json.dumps(ROW))
    (folder / "again").symlink_to(folder / "x")
    assert [Path(file).name for file in resolve(str(folder), split="train").files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert str(folder / "x" / "c.jsonl") in resolve(str(folder), split="train").files


@pytest.mark.parametrize("split", ["train[:200%]", "train[101%:]", "train[-200%:]"])
def test_more_than_all_rows_cannot_be_asked_for(split: str) -> None:
    with pytest.raises(DataError, match="more than 100%"):
        split_name(split)
    assert split_name("train[:100%]")[1] is not None


def test_a_converter_that_leaves_every_row_out_is_the_reason(
    preparing: Preparing, put: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_out.py").write_text("def f(row):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match="2 were left out by the converter") as caught:
        preparing.dataset(put("rows.jsonl", f"{json.dumps(ROW)}\n" * 2), converter="leaves_out:f")
    assert caught.value.repair == "the converter must return rows"


def test_a_date_beyond_pythons_is_a_bad_row(preparing: Preparing, put: Write) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = put("rows.parquet", b"")
    stamps = pa.array([0, 2**40], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "completion": ["c", "d"], "at": stamps}), path)
    with pytest.raises(DataError, match="a value that Python cannot represent") as caught:
        preparing.dataset(path)
    assert str(caught.value.where).endswith("rows.parquet:2")


@pytest.mark.parametrize("between", [",", ";", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_file_is_separated_by_what_its_header_has(
    preparing: Preparing, put: Write, between: str, mark: str, end: str
) -> None:
    """As spreadsheets write it; a comma in a value is no separator then."""
    rows = [["prompt", "completion"], ['"one, two"', '" three;\tfour"'], ['"a ""b"""', " c"]]
    text = mark + end.join(between.join(row) for row in rows)
    assert preparing.texts(put("rows.csv", text), format="prompt_completion") == ["one, two three;\tfour", 'a "b" c']


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        # Quotes after a space are quotes.
        *(
            (f'{header}\n"one, two", "three, four"\n"a", "b"\n', ["one, twothree, four", "ab"])
            for header in ("prompt, completion", "prompt,completion", '"prompt", "completion"')
        ),
        # A space in a value stays, also in front of a quote that belongs to the text.
        ('prompt,completion\na, b\na," ""b"""\n', ["a b", 'a "b"']),
        # A comma in the header is the separator.
        ("prompt,completion,a;b\none, two;,x;y\n", ["one two;"]),
    ],
)
def test_spaces_quotes_and_commas_of_a_csv_file(
    preparing: Preparing, put: Write, content: str, texts: list[str]
) -> None:
    assert preparing.texts(put("rows.csv", content), format="prompt_completion") == texts


@pytest.mark.parametrize(
    ("name", "first"), [("rows.jsonl", "[\n"), ("rows.jsonl", "{\n"), ("rows.json", '{\n "data": [')]
)
def test_lines_that_are_a_whole_array_or_object_are_known(
    preparing: Preparing, put: Write, name: str, first: str
) -> None:
    error = preparing.refused(put(name, f"{first}\n{json.dumps(ROW)}\n"))
    assert error.repair == "write each object on one line, or all of them as one array in a .json file"


def test_preferred_answers_are_mapped_as_the_message_says(preparing: Preparing, put: Write) -> None:
    file = put("rows.jsonl", json.dumps({"prompt": "a", "chosen": " b", "rejected": " c"}))
    repair = str(preparing.refused(file).repair)
    assert ("`completion: chosen`" in repair, "set train.objective to dpo" in repair) == (True, True)
    options: dict[str, Any] = {"format": "prompt_completion", "field_mapping": {"completion": "chosen"}}
    assert preparing.texts(file, **options) == ["a b"]
