"""Workers on hosts that join, are lost and are cut off: the rows of each step stay, and so does the loss."""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from finray.tracking.starts import read_starts
from tests.support import gated, hosts, runs, tiny
from tests.support.hosts import Host, wait_until

STEPS, EVERY = 60, 4
TOKEN = secrets.token_hex(32)
RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
}


def start_ray(host: Host, head: Host) -> None:
    """A node with the CPUs of one worker, in the foreground of a process that ends with its host."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.ip}", "--num-cpus=2"]
    words += ["--object-store-memory=80000000", "--block"]
    words += ["--head", "--port=6379", "--include-dashboard=false"] if host is head else [f"--address={head.ip}:6379"]
    log = (host.bed.shared / f"{host.name}.log").open("w")
    host.start(*words, stdout=log, stderr=log)


@pytest.fixture
def three(bed: hosts.Bed) -> Iterator[list[Host]]:
    made = [bed.host(RAY) for _ in range(3)]
    yield made
    for one in made:
        one.kill()


def test_one_worker_then_three_then_two(bed: hosts.Bed, three: list[Host], tokenizer: Any) -> None:
    """Two hosts join, one is lost, and one is without a network for 20 seconds."""
    first, second, third = three
    tiny.save_model("llama", bed.shared / "model", tokenizer)
    rows = tiny.write_chat_rows(bed.shared, 50)
    output = bed.shared / "runs"
    plain = runs.tiny_run(
        bed.shared / "model",
        rows,
        output,
        {
            "train.max_steps": STEPS,
            "adapter.dropout": 0.2,
            "checkpoint": {"every_steps": EVERY, "keep_last": 3, "asynchronous": False},
            "cluster": {"num_workers": {"min": 1, "max": 3}, "cpus_per_worker": 2, "resize_seconds": 1},
        },
    )
    config = runs.write_config(gated.gated(plain, output), bed.shared / "run.yaml")
    run_dir = output / "run"

    def steps() -> int:
        return max([0, *runs.values(run_dir, "step")])

    def workers() -> int:
        return len(runs.read_workers(run_dir)) if (run_dir / "workers.json").exists() else 0

    def grown_to(count: int) -> None:
        """Wait until there is room for so many; then let steps begin, one at a time, until so many are at work."""
        began = time.monotonic()
        wait_until(lambda: any(f"there is room for {count} workers" in line for line in said), f"room for {count}")
        while workers() != count:
            assert started.poll() is None, said
            before = steps()
            gated.allow(output, before + 1)
            wait_until(lambda before=before: steps() > before or workers() == count, "a step or other workers")  # type: ignore[misc]
        print(f"{count} workers {time.monotonic() - began:.0f} s after a host was turned on")

    gated.allow(output, 3)
    start_ray(first, first)
    wait_until(lambda: first.call(lambda: hosts_answer(first)), "Ray's head")
    started = first.start_finray("train", str(config), f"cluster.address={first.ip}:6379", cwd=hosts.ROOT)
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(iter(started.stdout.readline, "")), daemon=True).start()  # type: ignore[union-attr]
    wait_until(lambda: steps() == 3, "three steps")
    assert workers() == 1
    start_ray(second, first)
    grown_to(2)
    start_ray(third, first)
    grown_to(3)
    after_checkpoint = (steps() // EVERY + 1) * EVERY + 1
    gated.allow(output, after_checkpoint)
    wait_until(lambda: steps() == after_checkpoint, "a checkpoint")
    third.kill()
    # No step is needed: Ray hears of the lost node, and those that are left start again.
    wait_until(lambda: workers() == 2, "two workers")
    with second.partitioned():
        gated.allow(output, STEPS)
        time.sleep(20)
    assert started.wait(300) == 0, said
    starts = [one.header for one in read_starts(run_dir)]
    assert [one.world_size for one in starts][:4] == [1, 2, 3, 2]
    assert json.loads((run_dir / "resolved.json").read_text())["world_size"] == starts[-1].world_size
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


def hosts_answer(head: Host) -> bool:
    import socket

    try:
        socket.create_connection((head.ip, 6379), 1).close()
    except OSError:
        return False
    return True
