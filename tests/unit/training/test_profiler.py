"""Which ranks and which steps a profile is of, with a clock that is made up; tests/training has that of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finray.config.schema import ProfileConfig
from finray.training import profile
from finray.training.profile import Profiler


class Recorder:
    """Stands for torch's profiler."""

    made: list[Recorder]

    def __init__(self, *, activities: list[Any], acc_events: bool) -> None:
        self.activities = {one.name for one in activities}
        self.state = "made"
        Recorder.made.append(self)

    def start(self) -> None:
        self.state = "started"

    def stop(self) -> None:
        self.state = "stopped"

    def export_chrome_trace(self, path: str) -> None:
        assert self.state == "stopped"
        Path(path).write_text("trace")

    def key_averages(self) -> Any:
        return SimpleNamespace(table=lambda **options: f"{options['sort_by']} {options['row_limit']}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    Recorder.made = []
    monkeypatch.setattr(torch.profiler, "profile", Recorder)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])
    return now


def profiler(tmp_path: Path, told: list[str], *, device: str = "cpu", rank: int = 0, steps: Any = (2, 3)) -> Profiler:
    strategy: Any = SimpleNamespace(rank=rank, device=torch.device(device))
    return Profiler(None if steps is None else ProfileConfig(steps=steps), tmp_path, strategy, notify=told.append)


def run(made: Profiler, clock: list[float], steps: range, parts: dict[str, float]) -> None:
    for step in steps:
        made.before(step)
        for name, seconds in parts.items():
            with made.parts(name):
                clock[0] += seconds
        clock[0] += 0.5
        made.after(step)


PARTS = {"forward": 0.25, "backward": 0.5, "optimizer": 0.125}


def test_other_ranks_write_their_trace_and_say_nothing(tmp_path: Path, clock: list[float]) -> None:
    told: list[str] = []
    run(profiler(tmp_path, told, rank=3), clock, range(1, 6), PARTS)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace-rank3.json.gz"]
    assert told == []


def test_a_run_that_is_continued_among_the_steps_profiles_what_is_left_of_them(
    tmp_path: Path, clock: list[float]
) -> None:
    told: list[str] = []
    run(profiler(tmp_path, told), clock, range(3, 6), PARTS)
    assert told[0].startswith("profile of 1 steps: 1375.0 ms")
    # Ended within the first: there is no step to speak of.
    made = profiler(tmp_path / "other", told)
    made.before(2)
    made.close()
    assert len(told) == 1
    assert not (tmp_path / "other").exists()
