"""Workers on hosts that join, are lost and are cut off: the rows of each step stay, and so does the loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from finray.tracking.starts import read_starts
from tests.hosts import kills
from tests.support import forks, gated, hosts, runs, tiny

pytestmark = pytest.mark.nightly

STEPS, EVERY = 60, 4
# Seconds are printed and not compared: they say more of the machine than of the code. SOAK.md has those of an idle one.
until = partial(hosts.wait_until, timeout=kills.PATIENCE_S)


@pytest.fixture
def cluster(bed: hosts.Bed) -> Iterator[kills.RayHosts]:
    """A head, and a host with the CPUs of one worker."""
    with forks.server(bed.shared):
        yield kills.RayHosts(bed, workers=1, cpus=2)


def test_one_worker_then_three_then_two(bed: hosts.Bed, cluster: kills.RayHosts, tokenizer: Any) -> None:
    """Two hosts join, one is lost, and one is without a network for 20 seconds."""
    tiny.save_model("llama", bed.shared / "model", tokenizer)
    rows = tiny.write_chat_rows(bed.shared, 50)
    output = bed.shared / "runs"
    changes = {
        "train.max_steps": STEPS,
        "adapter.dropout": 0.2,
        "checkpoint": {"every_steps": EVERY, "keep_last": 3, "asynchronous": False},
        "cluster": {"num_workers": {"min": 1, "max": 3}, "cpus_per_worker": 2, "resize_seconds": 1},
    }
    plain = runs.tiny_run(bed.shared / "model", rows, output, changes)
    config = runs.write_config(gated.gated(plain, output), bed.shared / "run.yaml")
    run_dir = output / "run"

    def steps() -> int:
        return max([0, *runs.values(run_dir, "step")])

    def workers() -> int:
        return len(runs.read_workers(run_dir)) if (run_dir / "workers.json").exists() else 0

    def last_size() -> int:
        return read_starts(run_dir)[-1].header.world_size

    def grown_by(host: hosts.Host, count: int) -> None:
        """Wait until there is room for so many; then let steps begin, one at a time, until so many are at work."""
        until(lambda: any(f"there is room for {count} workers" in line for line in said), f"room for {count}")
        while last_size() != count:
            assert started.poll() is None, said
            before = steps()
            gated.allow(output, before + 1)
            until(lambda before=before: steps() > before or last_size() == count, "a step or other workers")  # type: ignore[misc]
        seconds = read_starts(run_dir)[-1].time - cluster.noted(host, "listed")
        print(f"{count} workers are at work {seconds:.0f} s after Ray lists {host.name}")

    gated.allow(output, 3)
    cluster.watch()
    started = cluster.head.start_finray("train", config, f"cluster.address={cluster.address}", cwd=hosts.ROOT)
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(iter(started.stdout.readline, "")), daemon=True).start()  # type: ignore[union-attr]
    until(lambda: steps() == 3, "three steps")
    assert workers() == 1
    second = cluster.add()
    grown_by(second, 2)
    third = cluster.add()
    grown_by(third, 3)
    after_checkpoint = (steps() // EVERY + 1) * EVERY + 1
    gated.allow(output, after_checkpoint)
    until(lambda: steps() == after_checkpoint, "a checkpoint")
    lost_at = time.time()
    third.kill()
    # No step is needed: Ray hears of the lost node, and those that are left start again.
    until(lambda: last_size() == 2, "two workers")
    seconds = read_starts(run_dir)[-1].time - lost_at
    print(f"2 workers are at work {seconds:.0f} s after {third.name} was lost")
    with second.partitioned():
        gated.allow(output, STEPS)
        time.sleep(20)
    assert started.wait(300) == 0, said
    starts = [one.header for one in read_starts(run_dir)]
    assert [one.world_size for one in starts][:4] == [1, 2, 3, 2]
    # What is done again are the steps since the last checkpoint.
    assert after_checkpoint - EVERY <= starts[3].step <= after_checkpoint
    undisturbed = bed.shared / "undisturbed"
    runs.run_alone(runs.changed(plain, {"cluster.num_workers": 1}), undisturbed)
    assert runs.values(run_dir, "samples") == runs.values(undisturbed, "samples")
    curve, other = runs.values(run_dir, "loss"), runs.values(undisturbed, "loss")
    assert curve == pytest.approx(other, rel=1e-4)
    # What three workers round otherwise grows with the steps.
    norms, others = runs.values(run_dir, "grad_norm"), runs.values(undisturbed, "grad_norm")
    assert norms[:30] == pytest.approx(others[:30], rel=1e-4)
    assert curve[-1] == pytest.approx(other[-1], abs=1e-4)
