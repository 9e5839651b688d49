"""Lists of runs, two of them compared, and one that is watched; by the commands."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest

from finray.checkpoint.copies import named_run
from finray.evaluation.subjects import files_of
from finray.records import RunHeader, TrainRecord
from finray.reporting import listing
from finray.reporting.listing import RecordFollower, age, compare_runs, latest, list_runs, shown_name, size, watch
from finray.reporting.recorded import EARLIER_WEIGHTS, read_run
from finray.reporting.report import tables
from finray.results import PlainConsole
from finray.tracking.console import RunView
from tests.support.recorded import at_work, header, prediction, train, write_evaluation, write_run
from tests.support.runs import finray


def test_runs_are_listed_the_last_one_first(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", shift=0.5)
    new = write_run(tmp_path / "new", steps=15, finished=False)
    for path, time in ((old, 1_000_000_000), (new, 1_000_000_500)):
        for one in (*path.iterdir(), path):
            os.utime(one, (time, time))
    with at_work(new):
        code, out, _ = finray("runs", tmp_path, "--json")
    assert code == 0
    first, second = json.loads(out)["runs"]
    assert (first["name"], first["state"], first["step"], first["total_steps"]) == ("new", "running", 15, 40)
    assert (second["name"], second["state"], second["step"]) == ("old", "finished", 40)
    records = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert second["best"] == min(one["eval_loss"] for one in records if one["kind"] == "eval")
    assert second["loss"] == [one["loss"] for one in records if one["kind"] == "train"][-1]
    assert second["bytes"] == sum(one.stat().st_size for one in old.rglob("*") if one.is_file())
    assert second["changed"] == 1_000_000_000
    shown = finray("runs", tmp_path)[1]
    assert shown == finray("runs", "list", tmp_path)[1]
    assert shown.index("new") < shown.index("old")
    (line,) = (one for one in shown.splitlines() if "old" in one)
    for part in ("finished", "40/40", f"eval loss {second['best']:.4g}", f"{second['bytes'] / 1024:,.1f} KiB"):
        assert part in line
    assert re.search(r" \d{4,}d ago", line)


def test_runs_stand_in_the_directory_runs_if_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert finray("runs") == (
        0,
        "no runs in runs; start one with: finray train CONFIG (`finray init my-run.yaml` writes a config)\n",
        "",
    )
    assert json.loads(finray("runs", "--json")[1]) == {"folder": "runs", "runs": [], "unreadable": []}
    # A directory that is named has to be there.
    code, out, err = finray("runs", "elsewhere")
    assert (code, out) == (2, "")
    assert "elsewhere: the directory does not exist" in err
    write_run(tmp_path / "runs" / "mine")
    assert json.loads(finray("runs", "--json")[1])["runs"][0]["name"] == "mine"


def test_two_runs_are_compared(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a")
    two = write_run(tmp_path / "b", shift=0.25, config={"train": {"learning_rate": 0.02, "max_steps": 40}})
    write_evaluation(one, [prediction(0, base=0, tuned=1), prediction(1, base=0, tuned=0)])
    write_evaluation(two, [prediction(0, base=0, tuned=1), prediction(1, base=0, tuned=1)])
    code, out, _ = finray("runs", "compare", one, two, "--json")
    assert code == 0
    plain = json.loads(out)
    assert plain["config"] == {"train.learning_rate": ["0.01", "0.02"]}
    assert plain["results"]["held-out rows: exact match"] == [0.5, 1.0]
    first, second = plain["results"]["loss at the last step"]
    assert second - first == pytest.approx(0.25)
    shown = finray("runs", "compare", one, two)[1]
    assert "+0.25" in shown
    assert "train.learning_rate" in shown
    assert finray("runs", "compare", one, tmp_path / "none")[0] == 2


def test_scores_of_earlier_weights_are_named_with_their_run_in_a_comparison_and_a_report(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    for run in runs:
        folder = write_evaluation(run, [prediction(0, base=0, tuned=1)])
        (run / "final").mkdir()
        (file := run / "final" / "model.safetensors").write_text("x")
        plain = json.loads((folder / "metrics.json").read_text())
        plain["made_by"]["model"] = {"weights": files_of(str(run / "final"))}
        (folder / "metrics.json").write_text(json.dumps(plain))
    assert json.loads(finray("runs", "compare", *runs, "--json")[1])["notes"] == []
    os.utime(file, ns=(6, 6))
    said = f"b: held-out rows: {EARLIER_WEIGHTS}"
    assert json.loads(finray("runs", "compare", *runs, "--json")[1])["notes"] == [said]
    assert said in finray("runs", "compare", *runs)[1].splitlines()
    (table,) = tables([read_run(run) for run in runs])
    assert table.notes == ["a note of the evaluation", f"b: {EARLIER_WEIGHTS}"]
    (table,) = tables([read_run(runs[1])])
    assert table.notes == ["a note of the evaluation", EARLIER_WEIGHTS]


def test_a_run_that_is_not_there_and_a_report_that_cannot_be_written_are_one_message(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for words, said in (
        *(((command, tmp_path / "none"), "does not exist") for command in ("report", "watch", "runs")),
        (("report", path, "--output", tmp_path), "is a directory"),
        (("report", path, "--output", tmp_path / "no" / "page.html"), "no such file"),
    ):
        code, out, err = finray(*words)
        assert (code, out, err.startswith("error: "), "Traceback" in err) == (2, "", True, False)
        assert said in err


def test_a_report_is_written_into_the_run_or_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run")
    plain = json.loads(finray("report", path, "--json")[1])
    assert Path(plain["output"]) == path / "report.html"
    assert plain["bytes"] == (path / "report.html").stat().st_size
    monkeypatch.chdir(tmp_path)
    assert finray("report", path, path)[0] == 0
    assert (tmp_path / "report.html").is_file()


def test_sizes_and_ages() -> None:
    assert [size(one) for one in (5, 2048, 3 * 2**20, 5 * 2**40)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 TiB"]
    assert [age(one) for one in (-3, 5, 90, 3 * 86_400)] == ["0s", "5s", "1m30s", "3d"]


# --- watching -------------------------------------------------------------------------------------------------------


def line(step: int, **changes: object) -> str:
    return json.dumps({**train(step).json(), **changes}) + "\n"


def steps_of(follower: RecordFollower) -> list[int]:
    return [one.step for one in follower.new() if isinstance(one, TrainRecord)]


def test_new_records_are_told_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=3, finished=False)
    follower = RecordFollower(path)
    assert [type(one) for one in follower.new()] == [RunHeader, *[TrainRecord] * 3]
    assert list(follower.new()) == []
    whole = line(4)
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write(whole[:20])
        stream.flush()
        assert steps_of(follower) == []
        stream.write(whole[20:] + line(5))
        stream.flush()
        assert steps_of(follower) == [4, 5]


def test_a_restart_tells_the_steps_again_that_are_done_again(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=6, finished=False)
    records, follower = path / "metrics.jsonl", RecordFollower(path)
    assert steps_of(follower) == [1, 2, 3, 4, 5, 6]
    kept = "".join(records.read_text().splitlines(keepends=True)[:4])
    (path / "scratch").write_text(kept)
    os.replace(path / "scratch", records)
    assert steps_of(follower) == []
    with records.open("a") as stream:
        stream.write(line(5, seconds=9.0) + line(6, seconds=9.5))
    assert steps_of(follower) == [5, 6]


def test_a_run_is_watched_as_long_as_somebody_works_on_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=2, finished=False)
    out, to_come = StringIO(), iter([3, 40])
    with ExitStack() as work, RunView(PlainConsole(file=out, width=200)) as view:
        work.enter_context(at_work(path))

        def more(seconds: float) -> None:
            with (path / "metrics.jsonl").open("a") as stream:
                stream.write(line(step := next(to_come)))
            if step == 40:
                work.close()

        found = watch(path, view, sleep=more)
    text = out.getvalue()
    assert "model      models/tiny" in text
    assert text.index("step 1/40") < text.index("step 40/40")
    assert (found.run.state, found.run.step) == ("stopped", 40)


def test_who_comes_late_is_shown_the_last_steps() -> None:
    records = [header(), *[train(step) for step in range(1, 101)], header(50), train(51)]
    found = latest(records, 3)
    assert [type(one).__name__ for one in found] == ["TrainRecord", "TrainRecord", "RunHeader", "TrainRecord"]
    assert [one.step for one in found] == [99, 100, 50, 51]


def test_a_finished_run_is_shown_at_once(tmp_path: Path) -> None:
    code, out, _ = finray("watch", write_run(tmp_path / "run"))
    assert code == 0
    assert "run: finished at step 40 of 40" in out


def test_ctrl_c_ends_the_watching_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", finished=False)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "watch", interrupted)
    code, out, err = finray("watch", path)
    assert code == 130
    assert "the run continues" in out
    assert "Traceback" not in err


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_in_the_list_is_one_that_commands_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/faq", "runs/cls", "other/faq"):
        write_run(Path(name), steps=10)
    (tmp_path / "faq.csv").write_text("q,a")
    # A directory of data with the name of a run.
    (tmp_path / "cls").mkdir()
    listed = {run.path: shown_name(run) for folder in ("runs", "other") for run in list_runs(folder, now=0.0).runs}
    names = {"faq": "runs/faq", "cls": "runs/cls", "other/faq": "other/faq"}
    assert listed == {tmp_path / path: name for name, path in names.items()}
    for name, path in names.items():
        assert read_run(name).path == tmp_path / path
    assert [run.name for run in compare_runs("faq", "cls").runs] == ["faq", "cls"]
    assert "faq" in finray("runs", "compare", "faq", "cls")[1]
    assert (finray("report", "faq")[0], (tmp_path / "runs" / "faq" / "report.html").is_file()) == (0, True)
    assert finray("watch", "faq")[0] == 0
    # What is there is meant, and what is nowhere keeps its name.
    (tmp_path / "runs" / "faq" / "final").mkdir()
    write_run(Path("here"), steps=10)
    write_run(Path("runs/here"), steps=20)
    for name, meant in {
        "here": "here",
        "faq/final": "runs/faq/final",
        "faq/none": "faq/none",
        "gpt2": "gpt2",
        "acme/faq": "acme/faq",
        "../faq": "../faq",
        "~/faq": "~/faq",
        ".": ".",
        str(tmp_path / "faq"): str(tmp_path / "faq"),
        "s3://bucket/faq": "s3://bucket/faq",
        "\0": "\0",
        "x" * 5000: "x" * 5000,
    }.items():
        assert str(named_run(name)) == meant
