"""The Python API: rows in memory as a source, the commands' defaults, results that show themselves, observers."""

from __future__ import annotations

import datetime
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import typer.main
import yaml

import finray
from finray import api
from finray.checkpoint.copies import push
from finray.checkpoint.objects import Objects
from finray.checkpoint.rundir import RunDir, open_run
from finray.cli.main import app
from finray.config.paths import PREPARED, with_absolute_paths
from finray.data.sources.memory import write_rows
from finray.errors import ConfigError, DataError
from finray.records import EvalRecord, Note, Record, TrainRecord
from finray.reporting.run import TrainResult
from finray.tracking.jsonl import FILE, metrics_table
from tests.support import runs
from tests.support.recorded import write_run
from tests.support.tiny import chat_rows

Plain = dict[str, Any]
ROWS = [{"prompt": f"{word}?", "completion": word, "weight": None} for word in ("one", "zwei", "três")]
FORMS: dict[str, Callable[[list[Plain]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "Dataset": datasets.Dataset.from_list,
    "Dataset with a format": lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
    "pandas": pd.DataFrame,
    "pandas, filtered": lambda rows: pd.DataFrame([{"prompt": "", "completion": "", "weight": None}, *rows]).query(
        "prompt != ''"
    ),
    "Arrow": pa.Table.from_pylist,
}


@pytest.mark.parametrize("form", FORMS)
def test_equal_rows_are_the_same_file_whatever_holds_them(form: str, tmp_path: Path) -> None:
    path = write_rows(FORMS[form](ROWS), tmp_path)
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == ROWS
    assert path == write_rows(ROWS, tmp_path)
    other = write_rows(FORMS[form]([*ROWS[:2], {**ROWS[2], "completion": "tres"}]), tmp_path)
    assert other != path
    assert sorted(tmp_path.iterdir()) == sorted((path, other))


def test_missing_numbers_and_values_of_numpy_are_written_as_json_has_them(tmp_path: Path) -> None:
    table = pd.DataFrame({"text": ["a", "b"], "score": [0.5, float("nan")], "at": pd.to_datetime(["2024-05-01"] * 2)})
    rows = [json.loads(line) for line in write_rows(table, tmp_path).read_text().splitlines()]
    assert [row["score"] for row in rows] == [0.5, None]
    assert rows[0]["at"].startswith("2024-05-01")
    values = {"n": np.int64(3), "l": np.arange(2), "p": Path("a", "b"), "d": datetime.date(2024, 7, 26)}
    (row,) = [json.loads(one) for one in write_rows([values], tmp_path).open()]
    assert row == {"n": 3, "l": [0, 1], "p": "a/b", "d": "2024-07-26"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no rows"),
        ([{"a": 1}, "text"], "row 2 in memory: .* a row is a dict"),
        ([{"a": float("nan")}], "row 1 in memory: .*JSON"),
        ([{"a": b"bytes"}], "row 1 in memory: .*bytes is not JSON"),
        ([{"a": "\ud800"}], "row 1 in memory: .*surrogates"),
        (7, "a int is not a data source"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
            "a DatasetDict is not a data source[^$]*one split",
        ),
    ],
)
def test_what_are_no_rows_is_refused_and_leaves_nothing(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        finray.load_config(model="m", data=rows, run={"output_dir": str(tmp_path)})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_rows_may_stand_wherever_a_source_is_named(tmp_path: Path) -> None:
    base = {"model": "m", "run.output_dir": tmp_path / "out"}
    expected = str(write_rows(ROWS, tmp_path / "out" / PREPARED / "rows"))
    config = finray.load_config(base, data=ROWS)
    assert config.data.source == expected
    assert finray.load_config(base, {"data.source": ROWS}) == config
    assert finray.load_config({**base, "data": {"source": ROWS}}) == config
    assert finray.load_config(finray.load_config(base, data="elsewhere"), data=ROWS) == config
    both = finray.load_config(base, data={"source": "d.jsonl", "eval_source": pd.DataFrame(ROWS)})
    assert (both.data.source, both.data.eval_source) == ("d.jsonl", expected)
    mix = finray.load_config(base, data={"mix": [{"source": "a", "weight": 1}, {"source": iter(ROWS), "weight": 2}]})
    assert [(one.source, one.weight) for one in mix.data.mix] == [("a", 1), (expected, 2)]


def test_a_run_on_rows_in_memory_is_continued_by_the_same_rows_and_by_no_others(
    tiny_run: Callable[..., Plain], tmp_path: Path
) -> None:
    plain = tiny_run({"run.output_dir": str(tmp_path)})
    rows = chat_rows(12)
    first = finray.prepare(plain, data=rows, quiet=True)
    assert first.splits["train"]["rows"] == 12
    assert first == finray.prepare(plain, data=datasets.Dataset.from_list(rows), quiet=True)
    for given in (rows, list(rows)):
        with open_run(with_absolute_paths(finray.load_config(plain, data=given)), fresh=False, notify=print) as run:
            saved = yaml.safe_load(run.config_file.read_text())
    # A run without a step binds no config.
    (run.path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
    assert Path(saved["data"]["source"]).is_file()
    with (
        pytest.raises(ConfigError) as caught,
        open_run(with_absolute_paths(finray.load_config(plain, data=rows[:-1])), fresh=False, notify=print),
    ):
        pass
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["data.source"]


COMMANDS = ("train", "prepare", "plan", "inspect", "generate", "evaluate", "export", "report")
# What only one of the two has, or says in its own way.
OWN = {
    *("config", "overrides", "changed", "observers", "quiet", "verbose", "as_json", "help", "samples", "prompts"),
    *("output", "row", "run", "runs", "model"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_function_has_the_options_and_defaults_of_its_command(name: str) -> None:
    options = {param.name: param.default for param in typer.main.get_command(app).commands[name].params}  # type: ignore[attr-defined]
    parameters = {key: one.default for key, one in inspect.signature(getattr(finray, name)).parameters.items()}
    assert options.keys() - OWN == parameters.keys() - OWN
    for key in options.keys() - OWN:
        assert parameters[key] == options[key], key


def test_plan_and_inspect_give_what_their_json_gives_and_show_themselves(
    tiny_run: Callable[..., Plain], tmp_path: Path
) -> None:
    plain = tiny_run()
    file = runs.write_config(plain, tmp_path / "run.yaml")
    planned, inspected = finray.plan(plain), finray.inspect(str(file), rows=1, html=str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").is_file()
    for result, words in ((planned, ["plan"]), (inspected, ["inspect", "--rows", "1"])):
        code, out, err = runs.finray(words[0], file, *words[1:], "--json")
        assert (code, err) == (0, "")
        document, own = json.loads(out), json.loads(json.dumps(result.plain()))
        for one in (document, own):
            if one.get("data"):
                one["data"].pop("seconds")
        assert document == own
        bundle = result._repr_mimebundle_()
        assert plain["model"]["name"] in bundle["text/plain"]
        assert bundle["text/html"].startswith("<pre")
    assert planned.starts
    assert inspected.splits[0].rows == 30


@pytest.mark.parametrize("is_behind_a_url", [True, False])
def test_the_result_of_a_run_behind_a_url_stands_for_its_url_and_of_another_for_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind_a_url: bool
) -> None:
    """What a command makes in a copy alone would stay on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = f"memory://{tmp_path.name}" if is_behind_a_url else str(tmp_path)
    plain = {"model": {"name": "m"}, "data": {"source": "d"}, "run": {"name": "one", "output_dir": folder}}
    config = finray.load_config(plain)
    run = RunDir.of(config)
    write_run(run.path)
    run.keep_config(config)
    objects = Objects(f"{folder}/one") if is_behind_a_url else None
    if objects is not None:
        push(run.path, objects, ["config.yaml", "metrics.jsonl"])
    summary: Any = "as it is"
    reported = finray.report([TrainResult(run.path, run.final, 40, summary)])
    assert reported.output == f"{folder}/one/report.html"
    page = (run.path / "report.html").read_bytes() if objects is None else objects.read("report.html")
    assert b"<html" in (page or b"")


def test_a_run_that_was_stopped_before_it_chose_takes_a_value_in_the_place_of_auto(
    tiny_run: Callable[..., Plain],
) -> None:
    plain = tiny_run({"train.global_batch_size": "auto"})
    with open_run(with_absolute_paths(finray.load_config(plain)), fresh=False, notify=print):
        pass
    named = with_absolute_paths(finray.load_config(plain, train={"global_batch_size": 2}))
    with open_run(named, fresh=False, notify=print) as run:
        (run.path / "checkpoint-000004").mkdir()
    other = with_absolute_paths(finray.load_config(plain, train={"global_batch_size": 3}))
    with pytest.raises(ConfigError, match="global_batch_size"), open_run(other, fresh=False, notify=print):
        pass


def test_inspect_counts_packs_as_long_as_training_takes_them(tiny_run: Callable[..., Plain], tmp_path: Path) -> None:
    little = tiny_run({"train.global_batch_size": "auto", "data.max_length": 1024})
    fixed = tiny_run({"data.max_length": 1024})
    (short, *_), (full, *_) = finray.inspect(little).splits, finray.inspect(fixed).splits
    assert short.packing is not None
    assert full.packing is not None
    assert full.packing.capacity == 1024
    assert short.packing.packs >= 16 > full.packing.packs


def test_a_table_of_metrics_has_a_row_for_each_step(tmp_path: Path) -> None:
    train = TrainRecord(1, 0.5, 2.0, 1.0, 1e-3, 10, 5, "d", 100.0, 0.0, 1, 0.1)
    records = [
        EvalRecord(0, {"eval_loss": 3.0}, 5, 0.1),
        train,
        Note("hello", 1),
        EvalRecord(2, {"eval_loss": 2.5}, 5, 0.1),
        TrainRecord(2, 1.0, 1.5, 1.0, 1e-3, 20, 5, "d", 100.0, 0.0, 1, 0.2),
    ]
    (tmp_path / FILE).write_text("".join(json.dumps(one.json()) + "\n" for one in records))
    table = metrics_table(tmp_path)
    assert table.index.tolist() == [0, 1, 2]
    assert table["loss"].tolist()[1:] == [2.0, 1.5]
    assert table["eval_loss"].dropna().to_dict() == {0: 3.0, 2: 2.5}


@pytest.mark.nightly
def test_in_a_notebook_an_error_is_its_message_and_a_defect_has_its_traceback() -> None:
    def said(code: str) -> str:
        command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=nocolor", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout + done.stderr

    text = said("import finray; finray.load_config('no.yaml')")
    assert "ConfigError: no.yaml: the file does not exist\n  repair: `finray init`" in text
    assert "Traceback" not in text
    assert "Traceback" in said("import finray; 1 / 0")


def test_observers_see_every_record_and_one_that_fails_is_named_once() -> None:
    seen: list[Record] = []
    shown: list[Record] = []

    def broken(record: Record) -> None:
        raise ZeroDivisionError("my mistake")

    api.with_observers(shown.append, seen.append)(Note("alone"))
    assert seen.pop() == shown.pop() == Note("alone")
    handle = api.with_observers(shown.append, [broken, seen.append])
    records: list[Record] = [Note("one"), Note("two")]
    for record in records:
        handle(record)
    assert seen == records
    assert shown[:1] + shown[2:] == records
    warning = shown[1]
    assert isinstance(warning, Note)
    assert warning.level == "warning"
    for part in ("broken", "ZeroDivisionError", "my mistake"):
        assert part in warning.message


def test_a_keyword_that_a_function_lacks_is_no_key_of_the_config() -> None:
    with pytest.raises(ConfigError, match="`quiet` is no option of this function and no section of a config"):
        finray.plan(model="m", data="d", quiet=True)
    with pytest.raises(ConfigError, match=r"no section of a config \(did you mean `train.learning_rate`\?\)"):
        finray.plan(model="m", data="d", learning_rate=1e-4)
