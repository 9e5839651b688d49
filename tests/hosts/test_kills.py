"""Workers, raylets, hosts, the driver and the head are killed, and hosts are cut off, at random steps of a run."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import kills
from tests.support import forks, hosts, runs


def seed() -> int:
    """That of the environment; else one that changes with each commit."""
    if given := os.environ.get("FINRAY_TEST_SEED"):
        return int(given)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=hosts.ROOT, capture_output=True, text=True)
    return int(done.stdout.strip()[:8] or "1", 16)


SEED = seed()
# How often each thing is done under each strategy.
TIMES = int(os.environ.get("FINRAY_TEST_TIMES", "1"))
# Of kills.KINDS, with blanks between them.
KINDS = os.environ.get("FINRAY_TEST_KINDS", " ".join(kills.KINDS)).split()


@pytest.fixture(scope="module")
def plain(bed: hosts.Bed, tokenizer: Any) -> runs.Plain:
    return kills.small_run(bed.shared, tokenizer)


@pytest.fixture(scope="module")
def cluster(bed: hosts.Bed) -> Iterator[kills.RayHosts]:
    with forks.server(bed.shared):
        yield kills.RayHosts(bed, workers=3)


# One in the gate, another with each commit; make test-nightly has the others.
STRATEGIES = [
    pytest.param(strategy, marks=[] if number == SEED % len(kills.STRATEGIES) else [pytest.mark.nightly])
    for number, strategy in enumerate(kills.STRATEGIES)
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whatever_is_killed_the_steps_since_the_last_checkpoint_are_lost_and_nothing_else(
    bed: hosts.Bed, cluster: kills.RayHosts, plain: runs.Plain, tmp_path: Path, strategy: str
) -> None:
    """Each kind, in a random order, in one run; at each, how much is lost is looked at."""
    print(f"FINRAY_TEST_SEED={SEED}")
    chance = random.Random(SEED + [*kills.STRATEGIES].index(strategy))
    kinds = KINDS * TIMES
    own, steps = runs.changed(plain, kills.STRATEGIES[strategy]), kills.steps_for(len(kinds))
    run = kills.victim(cluster, own, bed.shared / f"kills-{strategy}", {}, steps=steps)
    kills.disturb(run, kills.plan(kinds, chance), chance)
    kills.require_same(run.run_dir, kills.undisturbed(own, tmp_path / "undisturbed", steps=steps))
    assert sorted(one.kind for one in run.kills) == sorted(kinds)
    # Now and then it was less than to the last checkpoint on storage: the memory of the cluster was used.
    assert any(one.again > one.stored for one in run.kills) or list(kills.KINDS) != KINDS


def test_a_host_that_comes_back_and_still_writes_changes_nothing(
    bed: hosts.Bed, cluster: kills.RayHosts, plain: runs.Plain, tmp_path: Path
) -> None:
    """It is alone, so that nothing stops it: it trains on for twenty seconds, into the same directory."""
    chance, at, steps = random.Random(SEED), 0, 8 * kills.EVERY * TIMES
    print(f"FINRAY_TEST_SEED={SEED}")
    tracker = f"{kills.__name__}:{kills.Did.__name__}"
    changes = {"cluster.num_workers": 1, "checkpoint.in_memory_every": None, "tracking.trackers": [tracker]}
    run = kills.victim(cluster, plain, bed.shared / "still", changes, steps=steps)
    run.train()
    for _ in range(TIMES):
        at = max(at, run.steps()) + chance.randint(2, 2 * kills.EVERY)
        print(kills.cut_off_and_writing(run, at, chance), flush=True)
    run.finish()
    kills.require_same(run.run_dir, kills.undisturbed(plain, tmp_path / "undisturbed", steps=steps, workers=1))
