"""Which trackers of a run are called at once, and which in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

SEEN: list[tuple[str, threading.Thread]] = []


class Service:
    """A tracker from outside, which may hang."""

    def start(self, run: Any) -> None:
        SEEN.append((run.run_id, threading.current_thread()))

    def log(self, record: Any) -> None:
        SEEN.append((type(record).__name__, threading.current_thread()))

    def finish(self) -> None:
        pass


def test_a_service_has_a_thread_and_the_runs_own_records_are_written_before_the_next_step(
    tiny_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    told: list[tuple[threading.Thread, int]] = []

    def notify(record: Any) -> None:
        told.append((threading.current_thread(), len(runs.records(tmp_path / "run"))))

    plain = tiny_run({"train.max_steps": 2, "tracking.trackers": [f"{__name__}:Service"]}, rows=12)
    assembled = runs.assemble_alone(plain, tmp_path / "run", notify=notify)
    assembled.loop.run()
    assembled.loop.trackers.finish()
    main = threading.main_thread()
    assert all(thread is main for thread, _ in told)
    # Whoever watches sees a step when it is on disk already.
    steps = [written for _, written in told if written]
    assert steps[:2] == [1, 2]
    assert all(thread is not main for _, thread in SEEN)
    assert [name for name, _ in SEEN[1:]].count("TrainRecord") == 2
    assert SEEN[0][0] == (tmp_path / "run" / "run_id").read_text()


@pytest.mark.parametrize(("seconds", "some"), [(0.01, True), (1000, False), (None, False)])
def test_the_machine_is_recorded_as_often_as_the_config_says(
    tiny_run: Callable[..., runs.Plain], tmp_path: Path, seconds: float | None, some: bool
) -> None:
    runs.run_alone(tiny_run({"tracking.system_every_seconds": seconds}), tmp_path)
    assert bool(runs.records(tmp_path, "system")) == some
