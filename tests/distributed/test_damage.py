"""Damage of any file of a checkpoint that two ranks wrote: on disk and behind a URL; and storage that fails.

One group of processes trains a run of each kind; then files are damaged one after the other, and looked for as a start
does. (Of one rank: tests/training. How ranks share the search: test_verification.py.)
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finray.checkpoint import objects
from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.training import memory as memories
from tests.support import damaged, faulty_s3, runs, s3
from tests.support.group import KeptInFiles, run_all, warnings_of
from tests.support.runs import Plain, changed

FULL = {"adapter.method": "none", "train.learning_rate": 0.002}
FSDP, ZERO = {"parallel.strategy": "fsdp"}, {"parallel.strategy": "deepspeed"}
SECOND = "training_state/optimizer-00002-of-00002.safetensors"
# Each kind, and the files that its ranks wrote beside the moments.
WEIGHTS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
KINDS: dict[str, tuple[Plain, set[str]]] = {
    "fsdp": (FULL | FSDP, WEIGHTS),
    "zero-2-adapter": (ZERO | {"parallel.zero_stage": 2}, {"adapter_model.safetensors"}),
    "zero-3": (FULL | ZERO | {"parallel.zero_stage": 3}, WEIGHTS),
}


@dataclass
class Done:
    """What the group has trained, by kind: run directories, which are copies of runs behind URLs."""

    folder: Path
    buckets: dict[str, s3.Bucket]
    jobs: dict[str, Plain]

    def __getitem__(self, kind: str) -> Path:
        return self.folder / kind

    def objects(self, kind: str) -> Objects:
        """What is behind the URL."""
        return Objects(self.buckets[kind].url("runs/run"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, s3_server: s3.Server, tiny_run: Callable[..., Plain]) -> Done:
    """Four steps: 2 and 4 are stored, 1 and 3 are in memory."""
    saved = {"every_steps": 2, "in_memory_every": 2, "asynchronous": False}
    plain = tiny_run({"train.max_steps": 4, "checkpoint": saved}, rows=24)
    made = Done(tmp_path_factory.mktemp("runs"), {kind: s3_server.bucket() for kind in KINDS}, {})
    for kind, (changes, _) in KINDS.items():
        made.jobs[kind] = changed(plain, changes, {"run.output_dir": made.buckets[kind].url("runs")})
    run_all([(made.jobs[kind], made[kind]) for kind in KINDS], world_size=2, in_memory=True)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_file_of_any_rank_on_disk_is_named_and_the_checkpoint_before_is_used(
    done: Done, kind: str
) -> None:
    names = {*damaged.check_that_all_damage_is_named(done[kind])}
    assert {SECOND, "manifest.json", *KINDS[kind][1]} <= names
    # What DeepSpeed itself writes, for others.
    assert any(one.startswith("deepspeed/") and "_rank_1_" in one for one in names) == kind.startswith("zero")


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_file_of_any_rank_behind_a_url_is_named_and_the_checkpoint_before_is_used(
    done: Done, kind: str, tmp_path: Path
) -> None:
    names = damaged.check_that_all_damage_behind_a_url_is_named(
        done.objects(kind), done.buckets[kind], tmp_path / "copy"
    )
    assert {SECOND, "manifest.json", *KINDS[kind][1]} <= {*names}


def note_step(assembled: Any, run_dir: Path) -> None:
    """Write down from which step a run continues."""
    run_dir.with_name(f"{run_dir.name}-continued").write_text(str(assembled.loop.state.step))


def test_training_goes_on_from_the_checkpoint_before_as_if_nothing_had_been(done: Done) -> None:
    """The second rank's share of the newest is damaged behind the URL and in memory; the machine is another one."""
    before = {kind: runs.trace(done[kind]) for kind in KINDS}
    for kind in KINDS:
        key = f"runs/run/{RemoteStore(done[kind], done.objects(kind)).places()[4]}/{SECOND}"
        content = done.buckets[kind].get(key)
        done.buckets[kind].put(key, damaged.damages(content, None)["flipped"] or b"")
        memory = KeptInFiles(done[kind])
        (_, second), *_ = memories.whole(memory.parts(), after=0)
        (memory.folder_of(second) / SECOND).write_bytes(b"")
        shutil.rmtree(done[kind])
    run_all([(done.jobs[kind], done[kind]) for kind in KINDS], world_size=2, in_memory=True, look=note_step)
    for kind in KINDS:
        assert done[kind].with_name(f"{kind}-continued").read_text() == "2", kind
        stored, kept = (one for one in warnings_of(done[kind]) if "skipped" in one)
        assert SECOND in stored, kind
        assert "checkpoint-000004-" in stored
        assert f"{SECOND} of step 3 in memory" in kept
        assert runs.trace(done[kind]) == before[kind], kind


# --- storage on a bad day -------------------------------------------------------------------------------------------


@pytest.fixture
def faulty(s3_server: s3.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[faulty_s3.Faulty]:
    """What ranks reach instead of the server."""
    with faulty_s3.before(s3_server.endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def stop_in_the_third_step(assembled: Any, run_dir: Path) -> None:
    """Ask the run to stop, which makes it save a checkpoint; and let this process try again without long pauses."""
    objects._LONGEST_PAUSE_S = 0.01
    if run_dir.name.endswith("-first"):
        assembled.loop.has_request = lambda: assembled.loop.state.step == 2


@pytest.mark.parametrize(
    "kind", ["fsdp", *(pytest.param(one, marks=pytest.mark.nightly) for one in KINDS if one != "fsdp")]
)
def test_ranks_on_a_storage_that_throttles_cuts_and_changes_train_as_if_it_did_not(
    done: Done, kind: str, tmp_path: Path, s3_server: s3.Server, faulty: faulty_s3.Faulty
) -> None:
    turns: Counter[tuple[str, str]] = Counter()

    def fault(request: faulty_s3.Request) -> str:
        # The first three times that anything is done to a file of a checkpoint, another thing goes wrong.
        if "/checkpoint-" not in request.path or request.lists or request.method not in ("GET", "PUT"):
            return ""
        turns[request.method, request.path] += 1
        return {1: "throttle", 2: "cut", 3: "flip"}.get(turns[request.method, request.path], "")

    faulty.fault = fault
    job = changed(done.jobs[kind], {"run.output_dir": s3_server.bucket().url("runs")})
    # The run is stopped after three steps, and continues in a directory without any of its files.
    starts = [(job, tmp_path / part) for part in ("run-first", "run-second")]
    run_all(starts, world_size=2, look=stop_in_the_third_step)
    assert runs.trace(tmp_path / "run-second") == runs.trace(done[kind])
    met = {(what, request.method) for what, request in faulty.met if request.path.endswith(SECOND)}
    assert met == {(what, method) for what in ("throttle", "cut", "flip") for method in ("GET", "PUT")}


def test_an_upload_of_the_second_rank_that_fails_for_good_ends_all_ranks_and_the_checkpoint_before_is_used(
    done: Done, tmp_path: Path, s3_server: s3.Server, faulty: faulty_s3.Faulty
) -> None:
    job = changed(done.jobs["fsdp"], {"run.output_dir": s3_server.bucket().url("runs")})
    faulty.fault = lambda request: "throttle" * ("/checkpoint-000004-" in request.path and SECOND in request.path)
    with pytest.raises(Exception, match="step 4 could not be uploaded: the storage failed 6 times"):
        run_all([(job, tmp_path / "run")], world_size=2, look=stop_in_the_third_step)
    faulty.fault = lambda request: ""
    shutil.rmtree(tmp_path / "run")
    run_all([(job, tmp_path / "run")], world_size=2, look=note_step)
    assert (tmp_path / "run-continued").read_text() == "2"
    assert runs.trace(tmp_path / "run") == runs.trace(done["fsdp"])
