"""A prepared dataset is the same, byte for byte, from one process and from any number of Ray workers: for every format,
and every kind of file."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from finray.config.schema import Config
from finray.data.dataset.plan import Part, plan
from finray.data.dataset.prepare import Preparation, plan_preparation, prepare_here
from finray.pretrained.tokenizers import load_tokenizer
from finray.runtime.prepare import prepare
from tests.support import runs, tiny

ROWS = 120
# Loaded by Ray's workers, too: they run in the directory that the tests were started in.
CONVERTER = "tests.integration.test_prepare_ray:questions"


def questions(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """A converter: several rows of one, or none."""
    words = row["text"].split()
    if len(words) % 4 == 0:
        return None
    return [{"prompt": f"{word} ", "completion": words[-1]} for word in words[:2]]


def sentences(count: int, *, start: int = 0, longest: int = 12) -> list[str]:
    return [
        " ".join(tiny.WORDS[(index * 7 + step * step) % len(tiny.WORDS)] for step in range(3 + index % longest))
        for index in range(start, start + count)
    ]


# --- the formats, each in another kind of file ----------------------------------------------------------------------


def lines(path: Path, rows: Sequence[Any]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content, 1, mtime=0) if path.suffix == ".gz" else content)
    return path


def table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    columns = pa.Table.from_pylist(list(rows))
    if path.suffix == ".parquet":
        pq.write_table(columns, path, row_group_size=25)
    else:
        pa.feather.write_feather(columns, str(path), chunksize=25)
    return path


def separated(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def several(folder: Path, suffix: str, write: Callable[[Path, Sequence[Any]], Path], rows: Sequence[Any]) -> Path:
    """Files in a directory; where a file is not cut into pieces, each is one."""
    folder.mkdir()
    for start in range(0, len(rows), 30):
        write(folder / f"{start:03d}{suffix}", rows[start : start + 30])
    return folder


def tool_conversations() -> list[dict[str, Any]]:
    tools = json.dumps([{"name": "count", "description": "counts", "parameters": {"type": "object", "properties": {}}}])
    return [
        {
            "conversations": [
                {"from": "human", "value": text},
                {"from": "function_call", "value": json.dumps({"name": "count", "arguments": {"n": number}})},
                {"from": "observation", "value": str(number)},
                {"from": "gpt", "value": text.split()[0]},
            ],
            "system": "some stone",
            "tools": tools,
        }
        for number, text in enumerate(sentences(ROWS))
    ]


def saved_dataset(path: Path) -> Path:
    """What `datasets` wrote."""
    datasets.Dataset.from_list(tiny.chat_rows(ROWS, start=11)).save_to_disk(str(path))
    return path


def sources(folder: Path) -> list[dict[str, Any]]:
    """Every format, every kind of file; together one mix."""
    texts = sentences(ROWS)
    folder.mkdir()
    chat = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in tiny.chat_rows(ROWS, start=40)
    ]
    pairs = [{"prompt": f"{text} ", "completion": text.split()[-1]} for text in texts]
    alpaca = [
        {"instruction": text, "input": "stone" * (number % 2), "output": text} for number, text in enumerate(texts)
    ]
    # So varied that they stay long when they are compressed.
    varied = [{"text": hashlib.shake_256(str(number).encode()).hexdigest(40)} for number in range(ROWS)]
    documents = sentences(60, longest=60)
    (folder / "documents").mkdir()
    for number, text in enumerate(documents):
        (folder / "documents" / f"{number:02d}.txt").write_text(text + "\n\n" + text, encoding="utf-8")
    return [
        {"source": str(lines(folder / "messages.jsonl", [*tiny.chat_rows(ROWS), {"messages": []}]))},
        {"source": str(several(folder / "pairs", ".csv", separated, pairs)), "format": "prompt_completion"},
        {"source": str(lines(folder / "chat.jsonl", chat))},
        {"source": str(several(folder / "alpaca", ".json", array, alpaca))},
        {"source": str(table(folder / "tools.parquet", tool_conversations())), "format": "sharegpt"},
        {"source": str(folder / "documents")},
        {"source": str(several(folder / "texts", ".arrow", table, [{"content": text} for text in texts]))},
        {
            "source": str(
                several(folder / "templates", ".tsv", separated, [{"q": text, "a": "yes"} for text in texts])
            ),
            "input_template": "question {q}\\n",
            "output_template": "{a}",
        },
        {"source": str(several(folder / "compressed", ".jsonl.gz", lines, varied))},
        {"source": str(saved_dataset(folder / "saved"))},
    ]


def array(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


KINDS = ["messages", "prompt_completion", "alpaca", "sharegpt", "text", "template"]


# --- preparing ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts per source. They are planned in the driver; workers get them as they are."""
    monkeypatch.setattr("finray.data.sources.pieces.PIECE_BYTES", 4096)
    monkeypatch.setattr("finray.data.sources.pieces.ROWS_PER_PIECE", 50)


@pytest.fixture(scope="module")
def mixed(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All formats but two, with a bad row, chunks that overlap, and evaluation rows of their own."""
    folder = tmp_path_factory.mktemp("mixed")
    prepare = {"chunk_overlap": 8, "text_rows": "paragraph"}
    plain = runs.tiny_run(tiny_model_dir, "unused", folder, {"prepare": prepare})
    plain["data"] = {
        "mix": sources(folder / "sources"),
        "eval_source": str(lines(folder / "held-out.jsonl", tiny.chat_rows(30, start=300))),
        "on_bad_row": "drop",
        "max_length": 64,
    }
    return plain


@pytest.fixture(scope="module")
def labelled(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The two that are left: text with labels, and a converter."""
    folder = tmp_path_factory.mktemp("labelled")
    rows = [{"text": text, "label": number % 3} for number, text in enumerate(sentences(ROWS))]
    source = lines(folder / "rows.jsonl", rows)
    return runs.tiny_run(tiny_model_dir, source, folder, {"data.format": "labelled_text"})


@pytest.fixture(scope="module")
def converted(labelled: dict[str, Any]) -> dict[str, Any]:
    return {**labelled, "data": {"source": labelled["data"]["source"], "converter": CONVERTER, "max_length": 64}}


def into(plain: dict[str, Any], folder: Path, workers: int | None = None) -> Config:
    return runs.config_of(runs.changed(plain, {"prepare": {"dir": str(folder), "num_workers": workers}}))


def digests(location: str | Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        path.relative_to(location).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(location).rglob("*")
        if path.is_file()
    }


class Helpers:
    """What Ray tasks took of the preparations of a test, and how many parts they had at a time."""

    def __init__(self) -> None:
        self.taken = self.at_a_time = self.most = 0
        self.one_taken, self.all_taken = threading.Event(), threading.Event()


@pytest.fixture
def helpers(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> Helpers:
    seen = Helpers()
    take, give = Preparation.take, Preparation.give

    def noted_take(self: Preparation) -> Part | None:
        part = take(self)
        if part is None:
            seen.all_taken.set()
        else:
            seen.one_taken.set()
            seen.taken += 1
            seen.at_a_time += 1
            seen.most = max(seen.most, seen.at_a_time)
        return part

    def noted_give(self: Preparation, result: Any) -> None:
        seen.at_a_time -= 1
        give(self, result)

    monkeypatch.setattr(Preparation, "take", noted_take)
    monkeypatch.setattr(Preparation, "give", noted_give)
    return seen


def begin_after(event: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process begins to write when helpers have taken so much."""

    def late(model: Any) -> Any:
        assert event.wait(120)
        return load_tokenizer(model)

    monkeypatch.setattr("finray.data.dataset.prepare.load_tokenizer", late)


# --- the tests ------------------------------------------------------------------------------------------------------


def test_the_mix_holds_what_it_should(mixed: dict[str, Any], tmp_path: Path) -> None:
    """Every format, and several parts of every source: else equality would say little."""
    planned = plan_preparation(into(mixed, tmp_path))
    parts = plan(planned.settings, planned.streams)
    assert {part.row_format.kind for part in parts} == set(KINDS)
    assert {piece.kind for part in parts for piece in part.pieces} == {
        *("lines", "csv", "tsv", "array", "parquet", "arrow", "text", "datasets")
    }
    by_stream = {stream.name: sum(part.stream == stream for part in parts) for stream in planned.streams}
    assert min(by_stream.values()) > 1, by_stream
    assert len(by_stream) == len(mixed["data"]["mix"]) + 1


@pytest.mark.parametrize(("workers", "alone"), [(2, False), (4, True)])
def test_every_format_gives_the_same_bytes_from_any_cluster(
    workers: int, alone: bool, mixed: dict[str, Any], tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Ray's tasks write all parts or share them with this process."""
    expected = digests(prepare_here(into(mixed, tmp_path / "here")))
    assert len(expected) > 40
    assert {"manifest.json", "bad-rows.jsonl", "train-0/tokens-00001.arrow", "eval/index-00000.arrow"} <= set(expected)
    # It would be done before a helper comes.
    begin_after(helpers.all_taken if alone else helpers.one_taken, monkeypatch)
    assert digests(prepare(into(mixed, tmp_path / "ray", workers))) == expected
    parts = sum("tokens" in name for name in expected)
    assert helpers.taken == parts if alone else 0 < helpers.taken <= parts
    assert helpers.most == workers - 1


@pytest.mark.parametrize("name", ["labelled", "converted"])
def test_labels_and_converters(
    name: str, tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plain = request.getfixturevalue(name)
    here = prepare_here(into(plain, tmp_path / "here"))
    expected = digests(here)
    assert len(expected) > 4
    manifest = json.loads((Path(here) / "manifest.json").read_text(encoding="utf-8"))["splits"]["train"]
    assert (manifest["kind"], manifest["labels"], manifest["left_out"] > 0) == (
        ("labelled", ["0", "1", "2"], False) if name == "labelled" else ("completion", [], True)
    )
    begin_after(helpers.all_taken, monkeypatch)
    assert digests(prepare(into(plain, tmp_path / "ray", 3))) == expected
    assert helpers.taken == sum("tokens" in name for name in expected)


def test_what_is_done_in_seconds_needs_no_ray(
    converted: dict[str, Any], tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finray.runtime.cluster.connected", lambda cluster: pytest.fail("Ray was asked for"))
    expected = digests(prepare_here(into(converted, tmp_path / "here")))
    for workers in (1, None):
        assert digests(prepare(into(converted, tmp_path / f"{workers} workers", workers))) == expected


def test_one_changed_word_shows(converted: dict[str, Any], tmp_path: Path) -> None:
    """Negative control: the comparison sees a row that differs."""
    expected = digests(prepare_here(into(converted, tmp_path / "here")))
    source = Path(converted["data"]["source"])
    changed = tmp_path / "rows.jsonl"
    changed.write_text(source.read_text(encoding="utf-8").replace("house", "stone", 1), encoding="utf-8")
    other = runs.changed(converted, {"data.source": str(changed)})
    found = digests(prepare_here(into(other, tmp_path / "other")))
    assert found.keys() == expected.keys()
    assert sum(found[name] != expected[name] for name in found) == 3


def test_a_bad_row_is_named_whoever_meets_it(
    converted: dict[str, Any],
    tmp_path: Path,
    helpers: Helpers,
    monkeypatch: pytest.MonkeyPatch,
    write_rows: Callable[..., Path],
) -> None:
    """In the middle of a file that several workers share; and nothing is left of the attempt."""
    rows: list[Any] = [{"text": text} for text in sentences(ROWS)]
    rows[99] = {"text": 7}
    plain = {**converted, "data": {"source": str(write_rows(rows)), "max_length": 64}}
    messages = []
    for run in (prepare_here, prepare):
        if run is prepare:
            begin_after(helpers.all_taken, monkeypatch)
        with pytest.raises(Exception, match=r"rows\.jsonl:100.*holds int, not text") as refused:
            run(into(plain, tmp_path / run.__name__, 2))
        messages.append(str(refused.value))
        assert not [
            path for path in (tmp_path / run.__name__).glob("*") if not path.name.startswith((".locks", ".dig"))
        ]
    assert messages[0] == messages[1]
