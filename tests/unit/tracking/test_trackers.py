"""Trackers: records survive kills and resumes; the console says what matters, in lines where there is no terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finray.tracking.console import ConsoleTracker, describe, duration
from finray.tracking.jsonl import JsonlTracker, read_records
from finray.tracking.tensorboard import TensorBoardTracker


def record(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "loss": 2.0 / step,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens_per_s": 1234.5,
        **fields,
    }


def test_records_come_back_and_those_after_the_resumed_step_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path, resume_step=0)
    for step in range(1, 6):
        first.log(record(step))
    second = JsonlTracker(path, resume_step=3)
    # A process left over from the first attempt goes on writing, to a file that no longer has the name.
    first.log(record(6))
    second.log(record(4, loss=9.0))
    first.close()
    second.close()
    assert [(item["step"], item["loss"]) for item in read_records(path)] == [(1, 2.0), (2, 1.0), (3, 2 / 3), (4, 9.0)]


def test_a_line_cut_off_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(record(1)) + "\n" + '{"kind": "tra')
    assert [item["step"] for item in read_records(path)] == [1]


def test_floats_survive_to_the_bit(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    value = 0.1 + 0.2 / 3
    tracker.log(record(1, loss=value))
    tracker.close()
    assert next(read_records(tmp_path / "m.jsonl"))["loss"] == value


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, resume_step=0)
    for step in (1, 2):
        tracker.log(record(step, samples_digest="abc"))
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert "train/samples_digest" not in events.Tags()["scalars"]


def plain_lines(records: list[dict[str, Any]], times: list[float], total: int) -> list[str]:
    target = io.StringIO()
    clock = iter(times)
    with ConsoleTracker(Console(file=target, width=160), total_steps=total, clock=lambda: next(clock)) as tracker:
        for item in records:
            tracker.log(item)
    return target.getvalue().splitlines()


def test_plain_lines_show_progress_and_do_not_flood() -> None:
    lines = plain_lines([record(step) for step in range(1, 11)], [step * 0.5 for step in range(10)], total=10)
    assert len(lines) == 4
    assert lines[0].startswith("step 1/10  loss 2.0000  lr 1.00e-03  grad norm 0.500  1,23")
    assert lines[1].endswith("eta 2s")
    assert lines[-1].startswith("step 10/10")


def test_evaluations_are_always_shown() -> None:
    lines = plain_lines([{"kind": "eval", "step": 5, "eval_loss": 1.0, "perplexity": 2.718}] * 2, [], total=10)
    assert lines == ["step 5/10  eval loss 1.0000  perplexity 2.718"] * 2


def test_a_terminal_gets_a_bar() -> None:
    target = io.StringIO()
    with ConsoleTracker(Console(file=target, width=120, force_terminal=True), total_steps=4) as tracker:
        tracker.log(record(4))
    assert "4/4" in target.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3s"), (65, "1m05s"), (3720, "1h02m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_step_without_a_norm_says_why() -> None:
    assert "grad norm too large for fp16" in describe(record(1, grad_norm=None))
