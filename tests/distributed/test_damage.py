"""Damage of any file of a checkpoint that two ranks wrote: on disk, behind a URL and in memory.

One group of processes trains a run of each kind; then files are damaged one after the other, and looked for as a start
does. (Of one rank: tests/training. How ranks share the search: test_verification.py.)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from finray.checkpoint.objects import Objects
from finray.checkpoint.remote import RemoteStore
from finray.parallel.ddp import DDPStrategy
from finray.training import memory as memories
from tests.support import damaged, runs, s3
from tests.support.group import KeptInFiles, run_all, warnings_of
from tests.support.runs import Plain, changed

FULL = {"adapter.method": "none", "train.learning_rate": 0.002}
FSDP, ZERO = {"parallel.strategy": "fsdp"}, {"parallel.strategy": "deepspeed"}
SECOND = "training_state/optimizer-00002-of-00002.safetensors"
# Each kind, and the files that its ranks wrote beside the moments.
WEIGHTS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
KINDS: dict[str, tuple[Plain, set[str]]] = {
    "fsdp": (FULL | FSDP, WEIGHTS),
    "fsdp-adapter": (FSDP, {"adapter_model.safetensors"}),
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


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_file_of_any_rank_in_memory_is_named_and_the_checkpoint_before_is_used(
    done: Done, kind: str, tmp_path: Path
) -> None:
    names = check_memory(KeptInFiles(done[kind]), tmp_path / "scratch")
    assert {SECOND, "metrics.jsonl", *KINDS[kind][1]} <= {*names}


def check_memory(memory: KeptInFiles, scratch: Path) -> list[str]:
    """Damage each file of all ranks' parts of the newest checkpoint in memory in each way; returns their names."""
    strategy = DDPStrategy(torch.device("cpu"))

    def newest_is(warn: Callable[[str], None]) -> int:
        found = memories.fetch_newest(memory, strategy, scratch, after=0, warn=warn)
        assert found is not None
        shutil.rmtree(found.path)
        return found.step

    scratch.mkdir()
    newest, before, *_ = memories.whole(memory.parts())
    names = []
    assert newest_is(pytest.fail) == newest[0].step
    for part, old in zip(newest, before, strict=True):
        for path in sorted(one for one in memory.folder_of(part).rglob("*") if one.is_file()):
            name = path.relative_to(memory.folder_of(part)).as_posix()
            content, other = path.read_bytes(), memory.folder_of(old) / name
            for kind, other_content in damaged.damages(content, other.read_bytes() if other.exists() else None).items():
                if other_content is None:
                    path.unlink()
                else:
                    path.write_bytes(other_content)
                said: list[str] = []
                assert (newest_is(said.append), len(said)) == (before[0].step, 1), (name, kind)
                assert f"{name} of step {part.step} in memory" in said[0], (kind, said)
            path.write_bytes(content)
            names.append(name)
    assert newest_is(pytest.fail) == newest[0].step
    return names


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
        (_, second), *_ = memories.whole(memory.parts())
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
