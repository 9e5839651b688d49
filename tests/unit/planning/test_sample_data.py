"""What `finray plan` reads of the data: as much as the time allows, and what it says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finray.planning.result import DataPlan, Plan
from finray.planning.sample_data import DataReport, examine
from tests.support import runs

Examine = Callable[..., DataReport]


@pytest.fixture
def examined(tiny_model_dir: Path, tmp_path: Path) -> Examine:
    def run(source: Path, seconds: float, **data: Any) -> DataReport:
        """Each look at the clock takes a second."""
        plain = runs.tiny_run(tiny_model_dir, source, tmp_path / "out", {"data": {"packing": False, **data}})
        ticks = count()
        return examine(runs.config_of(plain), budget_s=seconds, clock=lambda: float(next(ticks)))

    return run


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.jsonl"])
@pytest.mark.parametrize(("seconds", "rows", "complete"), [(0, 256, False), (2, 512, False), (9, 600, True)])
def test_a_large_part_is_read_until_the_time_is_over(
    examined: Examine, tmp_path: Path, name: str, seconds: float, rows: int, complete: bool
) -> None:
    """A file that cannot be split is one part, however large it is."""
    texts = [f"word {number}" for number in range(600)]
    as_json = [json.dumps({"text": text}) for text in texts]
    joined = {"csv": "\n".join(["text", *texts]), "json": f"[{','.join(as_json)}]", "jsonl": "\n".join(as_json)}
    file = tmp_path / name
    file.write_text(joined[name.split(".")[1]])
    found = examined(file, seconds)
    assert (found.problems, found.rows, found.complete) == ([], rows, complete)
    # All of it was read, however long that took.
    few = tmp_path / f"few-{name}"
    few.write_text({"csv": "text\none", "json": f"[{as_json[0]}]", "jsonl": as_json[0]}[name.split(".")[1]])
    assert examined(few, 0).complete


def test_answers_to_rows_without_prompts_are_refused_before_the_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"one {number}"}) + "\n" for number in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    asked = {"evaluation": {"generate_rows": 2, "every_steps": 1}, "data": {"eval_ratio": 0.3}}
    plain = runs.tiny_run(tiny_model_dir, tmp_path / "rows.jsonl", tmp_path / "out", asked)
    assert ["no prompts to answer" in str(one) for one in examine(runs.config_of(plain)).problems] == [True]


def test_each_source_is_looked_at_even_when_the_time_is_over(examined: Examine, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / "data").mkdir(exist_ok=True)
        rows = "".join(json.dumps({"text": f"word {number}"}) + "\n" for number in range(600))
        (tmp_path / "data" / f"{name}.jsonl").write_text(rows)
    found = examined(tmp_path / "data", 0, eval_split="validation")
    assert (found.rows, found.complete) == (256, False)
    assert any(note.startswith("eval: 256 rows") for note in found.notes)


@pytest.mark.parametrize("complete", [True, False])
def test_steps_of_a_part_of_the_data_are_said_to_be_of_that_part(complete: bool) -> None:
    counts = {
        "rows": 600,
        "tokens": 1200,
        "supervised": 600,
        "packs": 75,
        "longest": 9,
        "steps": 75,
        "seen_tokens": 1200,
    }
    data = DataPlan(**counts, complete=complete, notes=(), global_batch_size=1, epochs=1.0, seconds=0.1)
    console = Console(file=StringIO(), width=200)
    Plan(data=data).print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("for that part: 75 steps" in text) is not complete
    assert ("in the part that was read" in text) is not complete
