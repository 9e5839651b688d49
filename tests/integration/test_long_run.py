"""Ten thousand steps: no process of a run grows, in memory, open files or threads, nor do logs and checkpoints."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from finray.data.sampling.collate import Batch
from finray.tasks.causal_lm import CausalLM
from tests.support import runs

pytestmark = pytest.mark.nightly

MIB = 2**20
# What caches and arenas may still gain after a tenth of the run, in a process.
MEMORY, FILES, THREADS, LOGS = 48 * MIB, 8, 8, MIB
HELD: list[bytearray] = []


class LeakyLM(CausalLM):
    """A task that keeps 50 KiB and every tenth step an open file: for the negative control."""

    def outputs(self, batch: Batch) -> torch.Tensor:
        """As always."""
        HELD.append(bytearray(b"x" * 50 * 1024))
        if len(HELD) % 10 == 0:
            HELD.append(open("/dev/null", "rb"))  # type: ignore[arg-type]  # noqa: PTH123, SIM115
        return super().outputs(batch)


@dataclass(frozen=True)
class Usage:
    """Of the processes of a run, by what they are; several of a kind count as the largest."""

    memory: dict[str, int]
    files: dict[str, int]
    threads: dict[str, int]
    logs: int

    def growth(self, later: Usage) -> list[str]:
        """What has grown by more than it may."""
        found = []
        for name in ("memory", "files", "threads"):
            before, after = getattr(self, name), getattr(later, name)
            limit = {"memory": MEMORY, "files": FILES, "threads": THREADS}[name]
            found += [
                f"{name} of {kind}: {before[kind]} to {after[kind]}"
                for kind in before.keys() & after.keys()
                if after[kind] - before[kind] > limit
            ]
        return found + ([f"logs: {self.logs} to {later.logs}"] if later.logs - self.logs > LOGS else [])


def measure(pid: int, logs: Path) -> Usage:
    """Everything that a command has started, and its Ray's logs."""
    memory, files, threads = defaultdict[str, int](int), defaultdict[str, int](int), defaultdict[str, int](int)
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error), process.oneshot():
            words = process.cmdline() or [process.name()]
            kind = words[0].partition("::")[2] or Path(words[0]).name
            kind = "finray" if process.pid == pid else kind
            memory[kind] = max(memory[kind], process.memory_info().rss)
            files[kind] = max(files[kind], process.num_fds())
            threads[kind] = max(threads[kind], process.num_threads())
    size = sum(path.stat().st_size for path in logs.rglob("*") if path.is_file() and not path.is_symlink())
    return Usage(dict(memory), dict(files), dict(threads), size)


def train(plain: runs.Plain, folder: Path, steps: int) -> tuple[Usage, Usage]:
    """Train in a Ray of its own; what it uses after a tenth of the steps and short of the end, medians of three."""
    run_dir = Path(plain["run"]["output_dir"]) / "run"
    file = runs.write_config(plain, folder / "config.yaml")
    process = runs.start_cli("train", str(file), env={"RAY_ADDRESS": None, "RAY_TMPDIR": str(folder)})
    found = []
    try:
        for step in (steps // 10, steps * 19 // 20):
            while not (recorded := runs.values(run_dir, "step")) or recorded[-1] < step:
                assert process.poll() is None, process.communicate()
                time.sleep(1.0)
            found.append(measure(process.pid, folder / "ray"))
            print(step, found[-1], flush=True)
        out, err = process.communicate(timeout=runs.PATIENCE_S)
        assert process.returncode == 0, out + err
    finally:
        process.kill()
    return found[0], found[1]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """For a Ray of its own: its sockets have short names."""
    folder = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def small(tiny_run: Callable[..., runs.Plain], steps: int) -> runs.Plain:
    changes = {"train.max_steps": steps, "train.global_batch_size": 1, "train.learning_rate": 1e-4}
    changes |= {"tracking.record_samples": False, "data.packing": False}
    changes |= {"checkpoint.every_steps": steps // 20, "checkpoint.keep_last": 2, "tracking.log_every": 10}
    return tiny_run({**changes, "tracking.system_every_seconds": 1.0, "tracking.tensorboard": True}, rows=24)


@pytest.mark.timeout(3600)
def test_ten_thousand_steps_grow_nothing(tiny_run: Callable[..., runs.Plain], short_dir: Path) -> None:
    plain = small(tiny_run, 10_000)
    early, late = train(plain, short_dir, 10_000)
    assert {"finray", "raylet", "gcs_server"} <= early.memory.keys()
    assert any("Worker" in kind for kind in early.memory), early.memory
    assert early.growth(late) == []
    run_dir = Path(plain["run"]["output_dir"]) / "run"
    assert len(list(run_dir.glob("checkpoint-*"))) <= 3
    # Records grow by the step, and with nothing else.
    content = (run_dir / "metrics.jsonl").read_bytes()
    assert len(content) / 10_000 < 120
    assert len(runs.values(run_dir, "step")) == 1000


def test_a_leak_is_seen(tiny_run: Callable[..., runs.Plain], short_dir: Path) -> None:
    """The negative control."""
    plain = runs.changed(small(tiny_run, 2000), {"model.task": f"{__name__}:LeakyLM"})
    early, late = train(plain, short_dir, 2000)
    grown = early.growth(late)
    assert any(one.startswith("memory of") and "Worker" in one for one in grown), grown
    assert any(one.startswith("files of") and "Worker" in one for one in grown), grown
