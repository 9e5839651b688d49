"""On a cluster whose CPUs others have, nobody waits in silence, and a preparation does not wait at all."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finray.data.dataset.prepare import Preparation
from finray.data.sources import pieces
from finray.pretrained.tokenizers import load_tokenizer
from finray.records import Note, Record, TrainRecord
from finray.runtime import prepare as runtime_prepare
from finray.runtime import watch
from finray.runtime.cluster import remove_orphans
from finray.runtime.driver import train
from finray.runtime.prepare import prepare
from tests.support import gated, runs
from tests.support.gated import allow
from tests.support.runs import Plain


@pytest.fixture
def taken(ray_cluster: str) -> Iterator[Any]:
    """A placement group over every CPU."""
    import ray

    group = ray.util.placement_group([{"CPU": 1}] * 4, name="somebody else's")
    ray.get(group.ready(), timeout=runs.PATIENCE_S)
    yield group
    ray.util.remove_placement_group(group)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watch, runtime_prepare):
        monkeypatch.setattr(module, "SILENCE_S", 0.3)


def test_a_preparation_goes_on_alone(
    tiny_run: Callable[..., Plain], taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_said = threading.Event()

    def late(model: Any) -> Any:
        assert has_said.wait(runs.PATIENCE_S)
        return load_tokenizer(model)

    monkeypatch.setattr("finray.data.dataset.prepare.load_tokenizer", late)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 200)
    monkeypatch.setattr(Preparation, "patience_s", 2.0)
    config = runs.config_of(tiny_run({"prepare.num_workers": 3}))
    said: list[str] = []

    def note(record: Record) -> None:
        if isinstance(record, Note):
            said.append(record.message)
            if record.message.startswith("waiting"):
                has_said.set()

    location = prepare(config, handle=note)
    assert (Path(location) / "manifest.json").is_file()
    assert (
        "waiting for 2 CPUs to prepare with: 0 of 4 CPUs are free; held by placement group somebody else's (4 CPUs); "
        "meanwhile only this process works"
    ) in said


def test_a_training_says_what_it_waits_for_and_begins_when_it_is_there(
    tiny_run: Callable[..., Plain], taken: Any
) -> None:
    import ray

    config = runs.config_of(tiny_run({"train.max_steps": 1}))
    said: list[str] = []

    def note(record: Record) -> None:
        if isinstance(record, Note):
            said.append(record.message)
            if record.message.startswith("waiting"):
                ray.util.remove_placement_group(taken)

    assert train(config, handle=note).summary.step == 1
    wait = "waiting for 1 worker of 1 CPU: 0 of 4 CPUs are free; held by placement group somebody else's (4 CPUs)"
    at = [said.index(line) for line in ("starting 1 worker", wait, f"loading {config.model.name}")]
    assert at == sorted(at)


def kill_controller() -> None:
    from ray._private.state import actors

    for actor in actors().values():
        if actor["ActorClassName"] == "TrainController" and actor["State"] == "ALIVE":
            runs.kill(actor["Pid"])


def test_a_run_that_fails_keeps_no_cpu(tiny_run: Callable[..., Plain], ray_cluster: str) -> None:
    """Its controller dies, as when memory runs out: Ray itself keeps the placement group while the driver lives."""
    import ray

    from finray.errors import TrainingError

    config = runs.config_of(tiny_run({"train.max_steps": 100_000, "cluster.max_failures": 0}))

    def kill(record: Record) -> None:
        if not isinstance(record, Note):
            kill_controller()

    with pytest.raises(TrainingError, match="ended without an error message"):
        train(config, handle=kill)
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}


def test_a_controller_that_dies_is_started_again(
    tiny_run: Callable[..., Plain], tmp_path: Path, ray_cluster: str
) -> None:
    plain = tiny_run({"train.max_steps": 12, "checkpoint.every_steps": 2})
    config = runs.config_of(gated.gated(plain, tmp_path))
    allow(tmp_path, 3)
    killed: list[int] = []
    said: list[str] = []

    def kill_once(record: Record) -> None:
        if isinstance(record, Note):
            said.append(record.message)
            # Not before: the workers could come to the end without it.
            if record.message.endswith("; restarting"):
                allow(tmp_path, 12)
        if isinstance(record, TrainRecord) and record.step >= 3 and not killed:
            killed.append(record.step)
            kill_controller()

    assert train(config, handle=kill_once).summary.step == 12
    assert any(line.endswith("; restarting") for line in said)


def test_what_a_dead_driver_left_on_a_cluster_is_removed(ray_cluster: str) -> None:
    """Detached groups stand for those that a controller creates after its driver's end: Ray keeps them, too."""
    import ray
    from ray._private.state import state
    from ray.util.placement_group import PlacementGroup

    def names() -> set[str]:
        return {group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"}

    theirs = {"finray gone 0123abcd 4567cdef", "finray-replicas 0123abcd", "somebody else's"}
    code = "import ray, sys; from ray.util import placement_group as group; ray.init(sys.argv[1], log_to_driver=False)"
    code += "\nfor name in sys.argv[2:]: assert group([{'CPU': 1}], name=name, lifetime='detached').wait(300)"
    subprocess.run(
        [sys.executable, "-c", code, ray_cluster, *theirs], check=True, capture_output=True, timeout=runs.PATIENCE_S
    )
    mine = ray.util.placement_group([{"CPU": 1}], name="finray mine 0123abcd")
    assert mine.wait(300)
    try:
        assert names() == {*theirs, "finray mine 0123abcd"}
        deadline = time.monotonic() + runs.PATIENCE_S
        # The last eight digits of a group's id are the job's; earlier tests have left dead jobs.
        groups = {one: group for one, group in ray.util.placement_group_table().items() if group["name"] in theirs}
        jobs = {one[-8:] for one, group in groups.items() if group["state"] != "REMOVED"}
        while not jobs <= {job["JobID"] for job in state.job_table() if job["IsDead"]}:
            assert time.monotonic() < deadline
        remove_orphans(ray)
        while (left := names()) != {"somebody else's", "finray mine 0123abcd"}:
            assert time.monotonic() < deadline, left
    finally:
        for identity in ray.util.placement_group_table():
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(identity)))
