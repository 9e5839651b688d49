"""Whatever a file of a run holds, commands about runs show the rest of it, and all other runs."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from finray.records import Note
from finray.reporting import listing, recorded
from finray.reporting.listing import Listed, compare_runs, list_runs, watch
from finray.reporting.report import report
from finray.tracking.console import RunView
from finray.tracking.jsonl import mean_loss, metrics_table
from tests.support.recorded import answers, machine, write_evaluation, write_run

pytestmark = pytest.mark.long

EVIL: dict[str, str] = {"very large": "9" * 5000, "negative": "-" + "9" * 400, "nan": "NaN", "list": '[["x"]]'}
MARK = "@@"


def places(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are, the first of a list only."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from places(value, (*path, key))
    elif isinstance(plain, list) and plain:
        yield from places(plain[0], (*path, 0))
    if path:
        yield path


def put(plain: Any, path: tuple[Any, ...], value: str) -> str:
    """The JSON text with another value at a place."""
    copy = json.loads(json.dumps(plain))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = MARK
    return json.dumps(copy).replace(json.dumps(MARK), value)


def shown(result: Any) -> str:
    target = io.StringIO()
    result.print(Console(file=target, width=200))
    json.dumps(result.plain())
    return target.getvalue()


def look_at(folder: Path) -> None:
    """Every command about runs, on a damaged one beside a good one."""
    listed = list_runs(folder, now=1_700_000_100.0)
    assert "good" in shown(listed)
    shown(compare_runs(folder / "bad", folder / "good"))
    shown(compare_runs(folder / "good", folder / "bad"))
    with RunView(Console(file=io.StringIO(), width=160)) as view:
        shown(watch(folder / "bad", view, sleep=lambda seconds: None, held=lambda path: False))
    report([str(folder / "bad"), str(folder / "good")], folder / "page.html")
    report([str(folder / "bad")], folder / "page.html")
    if (folder / "bad" / "metrics.jsonl").is_file():
        metrics_table(folder / "bad")
    mean_loss(folder / "bad")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    for name in ("bad", "good"):
        run = write_run(tmp_path / name, steps=20, notes=[Note("n", 3)], samples=[machine(1), machine(2)])
        (run / "resolved.json").write_text('{"precision": "bf16", "bits": null, "world_size": 2}')
        (run / "failures.jsonl").write_text('{"attempt": "a", "from_step": 1, "error": "ValueError: x"}\n')
        write_evaluation(run, answers(3), confusion=True)
    return tmp_path


LINES = ("metrics.jsonl", "starts.jsonl", "failures.jsonl", "evaluation/predictions.jsonl")
WHOLE = ("summary.json", "resolved.json", "evaluation/metrics.json", "config.yaml")


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.parametrize("name", [*LINES, *WHOLE])
def test_a_value_of_any_kind_at_any_place_is_passed_over(pair: Path, name: str, evil: str) -> None:
    path = pair / "bad" / name
    before = path.read_text()
    if name in LINES:
        # Of each kind of record one; all places at once, each in a line of its own.
        kinds = {json.loads(line).get("kind", ""): json.loads(line) for line in before.splitlines()}
        lines = [put(one, place, EVIL[evil]) for one in kinds.values() for place in places(one)]
        path.write_text(before * (evil in ("nan", "list")) + "\n".join(lines) + "\n")
        look_at(pair)
        return
    plain = yaml.safe_load(before) if name.endswith(".yaml") else json.loads(before)
    found = list(places(plain))
    for place in found:
        path.write_text(put(plain, place, EVIL[evil]))
        shown(Listed(pair, (recorded.read_run(pair / "bad"),), 1_700_000_100.0))
    # All commands at one of them.
    look_at(pair)


@pytest.mark.parametrize("name", [*LINES, *WHOLE, "attempt", "run_id"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\xff\xfe", b"[" * 100_000, b"null", b'"x"'])
def test_a_file_of_any_content_is_passed_over(pair: Path, name: str, content: bytes) -> None:
    (pair / "bad" / name).write_bytes(content)
    look_at(pair)


@pytest.mark.parametrize("name", [*LINES, *WHOLE, "run_id", "checkpoint-000004", "final", "evaluation"])
def test_a_directory_or_a_broken_link_in_the_place_of_a_file_is_passed_over(pair: Path, name: str) -> None:
    path = pair / "bad" / name
    for make in (path.mkdir, lambda: path.symlink_to("nowhere"), lambda: path.symlink_to(path.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make()
        look_at(pair)


def test_lines_that_are_left_out_are_counted(pair: Path) -> None:
    with (pair / "bad" / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind":"eval","step":' + "9" * 400 + ',"eval_loss":1}\n{"kind":"eval","step":-1}\n')
    assert "bad: metrics.jsonl: 2 damaged lines are left out" in shown(list_runs(pair, now=1_700_000_100.0))


def test_one_run_that_cannot_be_read_at_all_is_named_below_the_others(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = recorded.read_run

    def failing(place: Path, **options: Any) -> Any:
        if Path(place).name == "bad":
            raise OverflowError("int too large to convert to float")
        return read(place, **options)

    monkeypatch.setattr(listing, "read_run", failing)
    listed = list_runs(pair, now=1_700_000_100.0)
    assert [run.name for run in listed.runs] == ["good"]
    assert "bad: cannot be read: OverflowError: int too large" in shown(listed)
    assert listed.plain()["unreadable"] == ["bad: cannot be read: OverflowError: int too large to convert to float"]
