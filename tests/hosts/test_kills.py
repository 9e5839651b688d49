"""Workers, raylets, hosts, the driver and the head are killed, and hosts are cut off, at random steps of a run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import kills
from tests.support import forks, hosts, runs

SEED = int(os.environ.get("FINRAY_TEST_SEED", "1"))
# How often each thing is done.
TIMES = int(os.environ.get("FINRAY_TEST_TIMES", "3"))
# Of kills.STRATEGIES and of kills.KINDS, with blanks between them.
STRATEGIES = os.environ.get("FINRAY_TEST_STRATEGIES", " ".join(kills.STRATEGIES)).split()
KINDS = os.environ.get("FINRAY_TEST_KINDS", " ".join(kills.KINDS)).split()


@pytest.fixture(scope="module")
def plain(bed: hosts.Bed, tokenizer: Any) -> runs.Plain:
    return kills.small_run(bed.shared, tokenizer)


@pytest.fixture(scope="module")
def cluster(bed: hosts.Bed) -> Iterator[kills.RayHosts]:
    with forks.server(bed.shared):
        yield kills.RayHosts(bed, workers=3)


@pytest.mark.parametrize("number", range(TIMES))
def test_whatever_is_killed_the_steps_since_the_last_checkpoint_are_lost_and_nothing_else(
    bed: hosts.Bed, cluster: kills.RayHosts, plain: runs.Plain, tmp_path: Path, number: int
) -> None:
    """Each kind once, in a random order, in a run under each strategy; at each, how much is lost is looked at.

    With as many numbers as strategies, each kind is once done under each.
    """
    print(f"seed {SEED + number} (FINRAY_TEST_SEED={SEED})")
    chance, found = random.Random(SEED + number), list[kills.Kill]()
    for index, strategy in enumerate(STRATEGIES):
        own = runs.changed(plain, kills.STRATEGIES[strategy])
        kinds = [kind for at, kind in enumerate(KINDS) if (at + SEED + number - index) % len(STRATEGIES) == 0]
        print(f"{strategy}: {', '.join(kinds)}")
        steps = kills.steps_for(len(kinds))
        run = kills.victim(cluster, own, bed.shared / f"kills-{number}-{strategy}", {}, steps=steps)
        kills.disturb(run, kills.plan(kinds, chance), chance)
        kills.require_same(run.run_dir, kills.undisturbed(own, tmp_path / strategy, steps=steps))
        found += run.kills
    assert sorted(one.kind for one in found) == sorted(KINDS)
    # Now and then it was less than to the last checkpoint on storage: the memory of the cluster was used.
    assert any(one.again > one.stored for one in found) or list(kills.KINDS) != KINDS


def test_a_host_that_comes_back_and_still_writes_changes_nothing(
    bed: hosts.Bed, cluster: kills.RayHosts, plain: runs.Plain, tmp_path: Path
) -> None:
    """It is alone, so that nothing stops it: it trains on for twenty seconds, into the same directory."""
    chance, at, steps = random.Random(SEED), 0, 8 * kills.EVERY * TIMES
    print(f"seed {SEED} (FINRAY_TEST_SEED)")
    tracker = f"{kills.__name__}:{kills.Did.__name__}"
    changes = {"cluster.num_workers": 1, "checkpoint.in_memory_every": None, "tracking.trackers": [tracker]}
    run = kills.victim(cluster, plain, bed.shared / "still", changes, steps=steps)
    run.train()
    for _ in range(TIMES):
        at = max(at, run.steps()) + chance.randint(2, 2 * kills.EVERY)
        print(kills.cut_off_and_writing(run, at, chance), flush=True)
    run.finish()
    kills.require_same(run.run_dir, kills.undisturbed(plain, tmp_path / "undisturbed", steps=steps, workers=1))
