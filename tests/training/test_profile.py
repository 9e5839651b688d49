"""A profiled run writes a trace and a table, and is the run that it would have been."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.config.schema import ProfileConfig
from finray.errors import ConfigError
from finray.records import Note
from finray.training.profile import PARTS, Profiler
from tests.support import runs
from tests.support.runs import Plain, changed


@pytest.fixture(scope="module")
def plain(tiny_run: Callable[..., Plain]) -> Plain:
    return tiny_run()


def profiled(plain: Plain, *steps: int) -> Plain:
    return changed(plain, {"train.profile": {"steps": list(steps)}})


def test_a_profile_is_written_and_changes_nothing(plain: Plain, tmp_path: Path) -> None:
    runs.run_alone(plain, tmp_path / "plain")
    told: list[Any] = []
    (tmp_path / "looked").mkdir()
    loop = runs.assemble_alone(profiled(plain, 3, 5), tmp_path / "looked", notify=told.append).loop
    loop.run()
    assert runs.trace(tmp_path / "looked") == runs.trace(tmp_path / "plain")
    folder = tmp_path / "looked" / "profile"
    with gzip.open(folder / "trace-rank0.json.gz", "rt") as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    for part in PARTS:
        # Four micro-batches a step have a forward and a backward pass each.
        count = sum(event["name"] == f"finray: {part}" for event in events)
        assert count == (12 if part in ("forward", "backward") else 3), part
    text = (folder / "summary.txt").read_text()
    notes = [record.message for record in told if isinstance(record, Note)]
    assert notes == [f"loading {plain['model']['name']}", text]
    head = re.match(r"profile of 3 steps: ([\d.]+) ms a step", text)
    assert head is not None
    rows = dict(re.findall(r"^  (\S[a-z_ ]*?) +([\d.]+) ms +[\d.]+%$", text, flags=re.MULTILINE))
    assert list(rows) == [*PARTS, "rest"]
    assert sum(map(float, rows.values())) == pytest.approx(float(head[1]), abs=0.1)
    # What the table says of a part is what the trace says of it.
    forward = sum(event["dur"] for event in events if event["name"] == "finray: forward") / 3000
    assert float(rows["forward"]) == pytest.approx(forward, rel=0.2)
    assert "aten::" in text


def test_a_run_that_ends_earlier_writes_what_it_saw(plain: Plain, tmp_path: Path) -> None:
    runs.run_alone(profiled(plain, 7, 100), tmp_path / "run")
    assert "profile of 2 steps" in (tmp_path / "run" / "profile" / "summary.txt").read_text()
    # One that is continued among the steps has what is left of them.
    runs.run_alone(profiled(plain, 3, 5), runs.cut(tmp_path / "run", tmp_path / "cut", step=4))
    assert "profile of 1 steps" in (tmp_path / "cut" / "profile" / "summary.txt").read_text()
    runs.run_alone(profiled(plain, 50, 60), tmp_path / "never")
    assert not (tmp_path / "never" / "profile").exists()


@pytest.mark.parametrize(("ends", "files"), [(5, ["trace-rank3.json.gz"]), (1, [])])
def test_other_ranks_write_their_trace_and_say_nothing(tmp_path: Path, ends: int, files: list[str]) -> None:
    """Where it ended within the first step, there is none to speak of."""
    strategy: Any = SimpleNamespace(rank=3, device=torch.device("cpu"))
    profiler = Profiler(ProfileConfig(steps=(2, 3)), tmp_path, strategy, notify=pytest.fail)
    for step in range(1, ends + 1):
        profiler.before(step)
        profiler.after(step)
    profiler.before(ends + 1)
    profiler.close()
    assert [path.name for path in tmp_path.rglob("*.gz")] == files


def test_steps_are_in_order(plain: Plain) -> None:
    with pytest.raises(ConfigError, match="the first step and the last step"):
        runs.config_of(profiled(plain, 5, 3))
