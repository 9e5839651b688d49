"""What the page of a report is made of: thinned curves, marks, differences, time, answers; and that text stays text."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finray.checkpoint import manifest
from finray.records import Note
from finray.reporting.answers import explorer
from finray.reporting.plots import Series, thinned
from finray.reporting.recorded import RecordedRun, read_run
from finray.reporting.report import (
    changed_fields,
    config_differences,
    labels,
    machine_plots,
    marks_of,
    page,
    phase_parts,
    plots,
)
from tests.support.html import Page
from tests.support.recorded import at_work, machine, prediction, write_evaluation, write_run
from tests.support.runs import finray

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=400),
    st.integers(4, 60),
)
def test_a_thinned_curve_keeps_its_ends_and_extremes(values: list[float | None], most: int) -> None:
    series = Series("a", list(range(len(values))), values)
    found = thinned(series, most)
    assert (found is series) == (len(values) <= most)
    assert len(found.x) <= max(most, len(values) if len(values) <= most else 0)
    assert (found.x[0], found.x[-1]) == (0, len(values) - 1)
    assert list(found.x) == sorted(set(found.x))
    assert all(values[int(x)] is y for x, y in zip(found.x, found.y, strict=True))
    finite = [one for one in values if one is not None and math.isfinite(one)]
    kept = [one for one in found.y if one is not None and math.isfinite(one)]
    if finite:
        assert (min(kept), max(kept)) == (min(finite), max(finite))


def run_of(path: Path, **options: Any) -> RecordedRun:
    return read_run(write_run(path, **options))


def test_restarts_and_other_numbers_of_workers_are_marked(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", starts=[(0, 2), (10, 2), (20, 4), (20, 4), (30, 1), (30, 3)])
    assert [(one.x, one.label) for one in marks_of(run)] == [
        (10, "restart"),
        (20, "2 → 4 workers"),
        (30, "1 → 3 workers"),
    ]
    assert marks_of(run_of(tmp_path / "calm")) == []


def test_curves_are_the_numbers_of_the_records(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    raw = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    found = {plot.title: plot for plot in plots([read_run(path)])}
    assert list(found) == [
        *("Loss", "Eval loss", "Perplexity", "Learning rate", "Gradient norm", "Throughput", "Peak memory of rank 0")
    ]
    keys = {"Loss": "loss", "Learning rate": "lr", "Gradient norm": "grad_norm", "Throughput": "tokens_per_s"}
    for title, key in keys.items():
        (series,) = found[title].series
        wanted = [(one["step"], one[key]) for one in raw if one["kind"] == "train"]
        assert list(series.x) == [step for step, _ in wanted]
        assert list(series.y) == [None if one is None else pytest.approx(one, rel=1e-6) for _, one in wanted]
    (series,) = found["Eval loss"].series
    assert list(series.y) == pytest.approx([one["eval_loss"] for one in raw if one["kind"] == "eval"], rel=1e-6)


def test_what_the_machine_did_is_drawn(tmp_path: Path) -> None:
    """Of several samples of a step the mean; of several GPUs what their title says; nothing where nothing is known."""
    samples = [machine(step) for step in (1, 2, 2, 5)]
    samples.append(replace(machine(2), numbers={"rss_bytes": 4 * 2**30}))
    one, two = run_of(tmp_path / "a", samples=samples), run_of(tmp_path / "b", samples=[machine(1, gpus=0)])
    found = {plot.title: [(list(one.x), list(one.y)) for one in plot.series] for plot in machine_plots([one, two])}
    mib = 1 / 1024
    rss = [pytest.approx(1 + mib), pytest.approx((2 * (1 + 2 * mib) + 4) / 3), pytest.approx(1 + 5 * mib)]
    cpu = [pytest.approx(50 + 40 * math.sin(step)) for step in (1, 2, 5)]
    assert found == {
        "CPU, all cores": [([1, 2, 5], cpu), ([1], cpu[:1])],
        "Memory of rank 0's process": [([1, 2, 5], rss), ([1], [pytest.approx(1 + mib)])],
        "GPU utilization, mean": [([1, 2, 5], [85.0] * 3)],
        "GPU memory, largest": [([1, 2, 5], [5.0] * 3)],
        "Power of all GPUs": [([1, 2, 5], [601.0] * 3)],
        "Network, sent and received": [([1, 2, 5], [2.0] * 3), ([1], [2.0])],
        "Disk, read and written": [([1, 2, 5], [2.0, 4.0, 10.0]), ([1], [2.0])],
    }
    assert machine_plots([run_of(tmp_path / "c")]) == []
    # A run has one colour in all plots.
    empty = run_of(tmp_path / "empty", steps=0, finished=False)
    for plot in plots([empty, two, run_of(tmp_path / "d")]):
        assert [(one.label, one.colour) for one in plot.series] == [("b", 1), ("d", 2)]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, two = run_of(tmp_path / "x" / "run"), run_of(tmp_path / "y" / "run")
    assert labels([one, two]) == ["x/run", "y/run"]
    assert labels([one]) == ["run"]
    assert labels([one, one]) == ["run", "run (2)"]


def test_differences_of_configs(tmp_path: Path) -> None:
    one = run_of(tmp_path / "a")
    two = run_of(tmp_path / "b", config={"train": {"learning_rate": 0.02, "max_steps": 40}, "data": {}})
    assert config_differences([one, two]) == [
        ("data.source", [("rows.jsonl", False), ("–", True)]),
        ("train.learning_rate", [("0.01", False), ("0.02", True)]),
    ]
    assert config_differences([one, one]) == []
    assert config_differences([one]) == []
    changed = {path: value for path, value, _ in changed_fields(one)}
    assert (changed["train.learning_rate"], changed["model.name"]) == ("0.01", "models/tiny")
    assert "adapter.method" not in changed


def test_parts_of_the_time_are_the_whole_of_it() -> None:
    phases = {"train": 60.0, "data_wait": 6.0, "evaluate": 10.0, "total": 100.0}
    found = {label: share for _, label, _, share in phase_parts(phases)}
    assert found == {
        "training": pytest.approx(0.54),
        "waiting for data": pytest.approx(0.06),
        "evaluation": pytest.approx(0.1),
        "other": pytest.approx(0.3),
    }
    assert phase_parts({}) == []


# --- answers --------------------------------------------------------------------------------------------------------


def with_rows(path: Path, rows: list[dict[str, Any]], **options: Any) -> RecordedRun:
    write_evaluation(write_run(path), rows, **options)
    return read_run(path)


def test_the_same_row_of_two_runs_is_one_row(tmp_path: Path) -> None:
    one = with_rows(tmp_path / "a", [prediction(row, base=0, tuned=1) for row in range(3)])
    rows = [{**prediction(row, base=0, tuned=0), "row": 9 - row} for row in (2, 1)]
    two = with_rows(tmp_path / "b", [*rows, prediction(5, base=1, tuned=1)])
    found = explorer([("a", one.evaluations), ("b", two.evaluations)])
    assert found is not None
    data = found.data
    assert data["models"] == ["a: base", "a: tuned", "b: base", "b: tuned"]
    (only,) = data["sets"]
    texts = data["texts"]
    assert len(texts) == len(set(texts))
    shown = {
        texts[row[0]]: [texts[at] if at >= 0 else None for at in row[3]] + [row[4][1], row[4][3]]
        for row in only["rows"]
    }
    assert shown == {
        "eval.jsonl:1": ["base says 0", "tuned says 0", None, None, [1], None],
        "eval.jsonl:2": ["base says 1", "tuned says 1", "base says 1", "tuned says 1", [1], [0]],
        "eval.jsonl:3": ["base says 2", "tuned says 2", "base says 2", "tuned says 2", [1], [0]],
        "eval.jsonl:6": [None, None, "base says 5", "tuned says 5", None, [1]],
    }
    assert (found.rows, found.limit) == ((4, 4), None)


def test_rows_of_one_place_stay_apart(tmp_path: Path) -> None:
    rows = [prediction(row, base=0, tuned=1, where="eval.jsonl:1", reference="same") for row in range(3)]
    found = explorer([("a", with_rows(tmp_path / "a", rows).evaluations)])
    assert found is not None
    assert found.rows == (3, 3)


@pytest.mark.parametrize("letter", ["a", "<", "é"])
def test_answers_stay_within_their_budget(tmp_path: Path, letter: str) -> None:
    rows = [prediction(row, base=0, tuned=1, prompt=f"{row} " + letter * 3000) for row in range(200)]
    run = with_rows(tmp_path / "a", rows)
    budget = 40_000
    found = explorer([("a", run.evaluations)], budget=budget)
    assert found is not None
    assert found.limit is not None
    assert found.rows[1] == 200
    assert found.rows[0] > 10
    html = page([run])
    assert letter * 3000 not in html or letter == "a"
    held = json.dumps(found.data["texts"]).translate({ord(one): "\\u0000" for one in "<>&'"})
    assert len(held) < 1.1 * budget


def test_whether_less_is_better_is_known_by_the_score_or_said_by_the_evaluation(tmp_path: Path) -> None:
    """Where it is not known, no row is called better."""
    names = ("mean_squared_error", "exact_match", "wer", "error")
    scores = {model: dict.fromkeys(names, 1.0) for model in ("base", "tuned")}
    run = with_rows(tmp_path / "a", [prediction(0, base=0, tuned=0, scores=scores)])
    said = [replace(one, higher_is_better={"wer": None, "error": True}) for one in run.evaluations]
    by_name: dict[str, Any] = {"mean_squared_error": True, "exact_match": False, "wer": False, "error": True}
    for evaluations, expected in ((run.evaluations, by_name), (said, {**by_name, "wer": None, "error": False})):
        found = explorer([("a", evaluations)])
        assert found is not None
        (only,) = found.data["sets"]
        assert dict(zip(only["scores"], only["less"], strict=True)) == expected


# --- the page -------------------------------------------------------------------------------------------------------


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """Names, configs, notes, errors, classes, models and answers, all of them hostile, make no element of their own."""

    def made(name: str, text: str) -> str:
        path = write_run(
            tmp_path / name / text.replace("/", "⁄")[:60],
            config={"model": {"name": text}, "run": {"name": text}, "evaluation": {"metric": text}},
            notes=[Note(text, 3, "warning")],
            lines=[json.dumps({"kind": "eval", "step": 40, text: 0.5, "eval_targets": 1, "eval_seconds": 1.0}) + "\n"],
        )
        said = {"answers": {text: text}, "scores": {text: {"exact_match": 1.0}}}
        rows = [prediction(0, base=0, tuned=1, where=text, prompt=text, reference=text, **said)]
        folder = write_evaluation(path, rows)
        plain = json.loads((folder / "metrics.json").read_text())
        plain |= {"says": [text], "notes": [text], "classes": [text, "b"], "confusion": {text: [[1, 2], [3, 4]]}}
        (folder / "metrics.json").write_text(json.dumps(plain))
        (path / "run_id").write_text(text)
        return page([read_run(path)])

    hostile, plain = made("hostile", EVIL), made("plain", "harmless")
    assert "<script>alert" not in hostile
    assert "<img" not in hostile
    found = Page(hostile).elements
    assert [tag for tag, _, _ in found] == [tag for tag, _, _ in Page(plain).elements]
    assert not [name for _, attributes, _ in found for name in attributes if name.startswith("on")]


def test_text_that_is_no_unicode_can_be_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_evaluation(path, [prediction(0, base=0, tuned=1, reference="half \ud800 of a pair")])
    code, _, err = finray("report", path)
    assert code == 0, err
    assert (path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_nothing_on_the_page_is_fetched(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_evaluation(path, [prediction(0, base=0, tuned=1)], confusion=True)
    html = page([read_run(path), read_run(path)])
    found = [attributes for _, attributes, _ in Page(html).elements]
    linked = [one for attributes in found for name, one in attributes.items() if name in ("src", "href")]
    assert linked
    assert all(one is not None and one.startswith("#") for one in linked)
    targets = {attributes["id"] for attributes in found if "id" in attributes}
    assert {one.removeprefix("#") for one in linked if one} <= targets
    assert "default-src &#39;none&#39;" in html
    assert not re.search(r"@import|url\(", html)


def test_the_page_says_what_a_run_was_made_of_and_by(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "final").mkdir()
    (path / "final" / "adapter_model.safetensors").write_bytes(b"weights")
    weights = manifest.entry(path / "final", path / "final" / "adapter_model.safetensors")
    manifest.write(path / "final", [weights], step=40, metrics={})
    html = page([read_run(path)]).partition('<section id="made">')[2]
    assert f'<pre class="command">finray train {path / "config.yaml"}</pre>' in html
    # The run id, versions and files that `write_run` and this test have written.
    for value in ("ab" * 16, "3.11.7", "2.13.0", hashlib.sha256(b"weights").hexdigest()):
        assert f">{value}<" in html


def test_every_state_of_a_run_is_reported(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_text("{}\n")
    cut = write_run(tmp_path / "cut", steps=2, finished=False, lines=['{"kind'])
    damaged = write_run(tmp_path / "damaged")
    (damaged / "summary.json").write_text("{")
    for path, state in ((bare, "not started"), (cut, "stopped"), (damaged, "stopped")):
        assert f'id="state">{state}<' in page([read_run(path)])
    with at_work(cut):
        html = page([read_run(cut)])
    assert ('id="state">running<' in html, "2 of 40" in html) == (True, True)
    together = page([read_run(path) for path in (bare, cut, damaged)])
    assert "summary.json" in together
